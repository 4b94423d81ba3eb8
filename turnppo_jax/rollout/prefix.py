"""The state of an episode after some of its turns, to be entered again."""

import dataclasses

import numpy as np

from turnppo_jax.types import Trajectory, Turn


@dataclasses.dataclass(frozen=True)
class Prefix:
    """The beginning of an episode that was played before.

    The environment gets there again by playing the texts of the turns after a reset with the same seed; the context
    is made of their very token ids.

    Attributes:
      turns: played already; may be none.
      observation: what the environment showed after them.
    """

    turns: tuple[Turn, ...]
    observation: str

    @classmethod
    def before_turn(cls, trajectory: Trajectory, turn: int) -> "Prefix":
        """The state that turn number `turn` (from 0) of a trajectory answered.

        Raises:
          ValueError: there is no such turn, or a turn before it or itself begins a new row: its context is not that of
            the turns before it.
        """
        if not 0 <= turn < len(trajectory.turns):
            raise ValueError(f"turn {turn} of an episode; allowed: 0 to {len(trajectory.turns) - 1}")
        if any(played.starts_row for played in trajectory.turns[1 : turn + 1]):
            raise ValueError(f"turn {turn} of an episode with window prompts; allowed: contexts that only grow")
        return cls(tuple(trajectory.turns[:turn]), trajectory.turns[turn].observation)

    def observation_after(self, num_turns: int) -> str:
        """What the environment showed after so many of the turns."""
        return self.turns[num_turns].observation if num_turns < len(self.turns) else self.observation

    @property
    def token_ids(self) -> list[np.ndarray]:
        """Prompts and responses in order."""
        return [ids for turn in self.turns for ids in (turn.prompt_ids, turn.response_ids)]

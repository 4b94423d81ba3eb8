"""The seam that every environment implements: text in, text out."""

import abc
from typing import Any


class TextEnv(abc.ABC):
    """An environment that shows text and is acted on with text.

    The contract:

    * An object plays one episode at a time and is reused: `reset` begins the next one, also in the
      middle of an episode.
    * `reset(seed)` is a pure function of the constructor's arguments and the seed. The same seed gives
      the same episode in every process; global random state (`random`, `numpy.random`) is left alone.
    * `step` accepts any string without raising. What cannot be understood is an action too: the
      environment says what it costs.
    * Rewards are finite and stay within bounds that the environment documents.
    * `info` holds what JSON can hold (str, int, float, bool, None, lists, dicts with str keys).
      `info["success"]` says whether the task is solved; nobody guesses it from the reward. Where a task can be
      solved in part, `info["score"]` of every turn says how far, from 0 to 1. `info["reward_terms"]` may hold further
      numbers by name that a run can weight as rewards (`config.reward.terms`); each of them stands in every turn.
      `info["effective"]` may say whether the turn changed anything, where the observation alone does not tell.
    * Module and object need neither jax nor turnppo_jax: environments live in worker processes that
      must not touch the accelerator.
    * Printing is allowed; it goes to the worker's stderr.

    Attributes:
      instructions: the system prompt; "" for none. Read after each `reset`.
    """

    instructions: str = ""

    @abc.abstractmethod
    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Begins the episode of `seed`.

        Returns:
          observation: what the first turn answers.
          info: about the episode.
        """

    @abc.abstractmethod
    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Plays one turn. Not called again once an episode has ended.

        Args:
          text: the whole response of the policy, as decoded.

        Returns:
          observation: what the next turn would answer, also where the episode has ended.
          reward: of this turn alone.
          terminated: the task ended (solved or lost).
          truncated: a limit of turns, actions or time ended the episode.
          info: about this turn.
        """

    def close(self) -> None:  # noqa: B027 - most environments hold nothing that must be given back
        """Gives back files, processes and the like. Called once, last."""

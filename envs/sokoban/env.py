"""Sokoban for a policy that answers in text, several moves a turn."""

import abc
from typing import Any

from envs import answer
from envs.base import TextEnv
from envs.sokoban import generator, prompts, rules, splits


class _SokobanBase(TextEnv):
    """Turns, parsing, rewards and limits; where rooms come from is the subclasses' business.

    A turn's reward is the sum of `rules.move` over the moves it plays, plus `format_penalty` once if the
    response does not have the response format, names no action, or names an unknown one. Unknown names
    are passed over and the others are played, as in RAGEN; actions beyond `actions_per_turn` or beyond
    what the episode has left are dropped without a penalty. A turn of n moves in a room of b boxes is
    rewarded within [-1.1 n + format_penalty, 0.9 n + 10 + b].

    Solving ends the episode as terminated; the limit of actions or turns as truncated.

    `info`: success, num_actions, actions_left, num_turns, invalid_action (the penalty was charged),
    boxes_on_target; with a turn also effective (the room is another than before).
    """

    def __init__(
        self,
        *,
        split: str,
        num_eval_rooms: int,
        max_actions: int,
        max_turns: int,
        actions_per_turn: int,
        format_penalty: float,
        prompt: str,
        thinking: bool,
    ):
        splits.check_split(split, num_eval_rooms)
        limits = {"max_actions": max_actions, "max_turns": max_turns, "actions_per_turn": actions_per_turn}
        for name, value in limits.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if not -float("inf") < format_penalty <= 0:
            raise ValueError(f"format_penalty must be finite and at most 0, got {format_penalty!r}")
        if prompt not in prompts.STYLES:
            raise ValueError(f"unknown prompt {prompt!r}; known: {', '.join(prompts.STYLES)}")
        self._split, self._num_eval_rooms = split, num_eval_rooms
        self._max_actions, self._max_turns, self._actions_per_turn = max_actions, max_turns, actions_per_turn
        self._format_penalty, self._prompt, self._thinking = format_penalty, prompt, bool(thinking)
        self.instructions = prompts.instructions(prompt, thinking=self._thinking, **limits)
        self._room: rules.Room | None = None
        self._num_actions = self._num_turns = 0

    @property
    def room(self) -> rules.Room:
        """The position now."""
        if self._room is None:
            raise RuntimeError("reset the environment first")
        return self._room

    @property
    def actions_per_turn(self) -> int:
        return self._actions_per_turn

    @property
    def actions_left(self) -> int:
        return self._max_actions - self._num_actions

    @property
    def thinking(self) -> bool:
        return self._thinking

    @abc.abstractmethod
    def _room_of(self, seed: int) -> rules.Room:
        """The room that a seed stands for."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self._room = self._room_of(seed)
        self._num_actions = self._num_turns = 0
        return self._observation(None, False), self._info(False)

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        room = self.room
        actions, invalid = parse_actions(text, actions_per_turn=self._actions_per_turn, thinking=self._thinking)
        reward = self._format_penalty if invalid else 0.0
        for action in actions[: self.actions_left]:
            room, move_reward = rules.move(room, action)
            reward += move_reward
            self._num_actions += 1
            if room.solved:
                break
        effective = room != self._room
        self._room = room
        self._num_turns += 1
        # Sums of tenths, without the tail that binary fractions leave.
        reward = round(reward, 9)
        terminated = room.solved
        truncated = not terminated and (self.actions_left == 0 or self._num_turns == self._max_turns)
        return (
            self._observation(reward, invalid),
            reward,
            terminated,
            truncated,
            self._info(invalid) | {"effective": effective},
        )

    def _observation(self, last_reward: float | None, invalid: bool) -> str:
        return prompts.turn(
            self._prompt,
            self.room,
            number=self._num_turns + 1,
            max_turns=self._max_turns,
            actions_left=self.actions_left,
            last_reward=last_reward,
            invalid=invalid,
            thinking=self._thinking,
        )

    def _info(self, invalid: bool) -> dict[str, Any]:
        return {
            "success": self.room.solved,
            "num_actions": self._num_actions,
            "actions_left": self.actions_left,
            "num_turns": self._num_turns,
            "invalid_action": invalid,
            "boxes_on_target": self.room.boxes_on_target,
        }


class SokobanEnv(_SokobanBase):
    """Sokoban in generated rooms.

    Args:
      height, width: of the grid, border walls included.
      num_boxes: boxes, and targets.
      search_depth: moves of reverse play at most; more makes rooms harder.
      split: "train" (never an evaluation room, up to symmetry), "eval", or "seed"; see `splits`.
      num_eval_rooms: how many rooms are held out.
      max_actions: moves of an episode.
      max_turns: responses of an episode.
      actions_per_turn: moves that one response may name.
      format_penalty: reward of a turn that is not valid, at most 0.
      prompt: "full" (instructions and labelled turns) or "compact" (the grid without its border, and
        the actions left).
      thinking: whether responses hold `<think>…</think>` before `<answer>…</answer>`.

    Raises:
      ValueError: an argument out of range, by name.
    """

    def __init__(
        self,
        height: int = 6,
        width: int = 6,
        num_boxes: int = 1,
        search_depth: int = 300,
        split: str = "train",
        num_eval_rooms: int = 256,
        max_actions: int = 10,
        max_turns: int = 5,
        actions_per_turn: int = 5,
        format_penalty: float = -0.1,
        prompt: str = "full",
        thinking: bool = True,
    ):
        super().__init__(
            split=split,
            num_eval_rooms=num_eval_rooms,
            max_actions=max_actions,
            max_turns=max_turns,
            actions_per_turn=actions_per_turn,
            format_penalty=format_penalty,
            prompt=prompt,
            thinking=thinking,
        )
        self._settings = generator.RoomSettings(height, width, num_boxes, search_depth)

    def _room_of(self, seed: int) -> rules.Room:
        return splits.generated_room(self._settings, self._split, seed, self._num_eval_rooms)


class BoxobanEnv(_SokobanBase):
    """Sokoban on the levels of a file in Boxoban's format.

    Args:
      path: the file.
      split: "train", "eval" (kept apart by content) or "seed" (all levels in file order). A seed stands
        for level number seed mod the number of levels of the split.
      num_eval_rooms: how many levels are held out.
      max_actions, max_turns, actions_per_turn, format_penalty, prompt, thinking: as in SokobanEnv.

    Raises:
      ValueError: an argument out of range, by name, or a file without proper levels.
    """

    def __init__(
        self,
        path: str,
        split: str = "train",
        num_eval_rooms: int = 256,
        max_actions: int = 120,
        max_turns: int = 24,
        actions_per_turn: int = 5,
        format_penalty: float = -0.1,
        prompt: str = "full",
        thinking: bool = True,
    ):
        super().__init__(
            split=split,
            num_eval_rooms=num_eval_rooms,
            max_actions=max_actions,
            max_turns=max_turns,
            actions_per_turn=actions_per_turn,
            format_penalty=format_penalty,
            prompt=prompt,
            thinking=thinking,
        )
        self._levels = splits.level_sets(str(path), num_eval_rooms)[split]

    def _room_of(self, seed: int) -> rules.Room:
        return self._levels[seed % len(self._levels)]


_ACTION_NAMES = {action.lower(): action for action in rules.ACTIONS}


def parse_actions(text: str, *, actions_per_turn: int, thinking: bool) -> tuple[list[str], bool]:
    """The actions that a response names.

    Args:
      text: the whole response.
      actions_per_turn: names counted at most; the rest of the answer is not looked at.
      thinking: whether the response must hold a thinking block.

    Returns:
      actions: the valid ones in order.
      invalid: no answer in the response format, an empty answer, or an unknown name among the names counted.
    """
    inside = answer.find_answer(text, thinking=thinking)
    if inside is None:
        return [], True
    names = [name.strip().lower() for name in inside.split("||")]
    names = [name for name in names if name][:actions_per_turn]
    actions = [_ACTION_NAMES[name] for name in names if name in _ACTION_NAMES]
    return actions, not names or len(actions) < len(names)

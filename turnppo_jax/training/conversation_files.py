"""Conversations to imitate out of files: messages, or the trajectories of a run (rejection sampling).

A line of JSON is either `{"messages": [...]}` or a trajectory as `training.trajectory_log` writes it. The conversation
of a trajectory is rebuilt from its texts: the environment's instructions, then observation and action of each turn.
"""

import collections
import dataclasses
import glob
import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from turnppo_jax.rollout.chat import Chat, check_messages
from turnppo_jax.training.trajectory_log import tokens_checksum
from turnppo_jax.types import StopReason

_CUT = (StopReason.TURN_LIMIT, StopReason.CONTEXT_LIMIT)
# What is left out, and how a person is told.
REASONS = {
    "without_turns": "without a turn",
    "cut": "with a turn cut by a limit of tokens",
    "unsuccessful": "without success",
    "below_min_reward": "below sft.min_reward",
}


@dataclasses.dataclass(frozen=True)
class Conversation:
    """One conversation.

    Attributes:
      messages: system at most, then user and assistant in turns.
      tokens_crc32: checksum of the tokens that were sampled and shown, where it was a trajectory; else None.
      ended: the last of these tokens is an end-of-turn id.
    """

    messages: list[dict]
    tokens_crc32: int | None = None
    ended: bool = True

    def same_tokens(self, ids: np.ndarray, chat: Chat) -> bool:
        """Whether ids [n] of the encoded messages are the tokens of the trajectory; True where it was none."""
        if self.tokens_crc32 is None:
            return True
        if not self.ended and len(ids) and ids[-1] == chat.end_id:
            ids = ids[:-1]  # a stop string: the end-of-turn id is added for imitation
        return tokens_checksum([ids]) == self.tokens_crc32


class Selection:
    """Which conversations are imitated; counts those that are not, by reason.

    Args:
      min_reward: least return of an episode, of the environment's rewards; None for any.
      only_success: leave out what the environment does not call a success.

    Attributes:
      counts: "read", and the names of `REASONS`.
    """

    def __init__(self, min_reward: float | None = None, only_success: bool = False):
        if min_reward is not None and not math.isfinite(min_reward):
            raise ValueError(f"sft.min_reward={min_reward}; allowed: a finite number, or None for any")
        self._min_reward, self._only_success = min_reward, only_success
        self.counts = collections.Counter(read=0, **dict.fromkeys(REASONS, 0))

    def keeps(self, row: Mapping[str, Any]) -> bool:
        """Whether the conversation of a row is imitated.

        Raises:
          ValueError: the row does not say what is asked for.
        """
        reason = self._reason_against(row)
        self.counts["read"] += 1
        if reason:
            self.counts[reason] += 1
        return not reason

    @property
    def line(self) -> str:
        """What was left out, for a person; "" for nothing."""
        parts = [f"{self.counts[name]} {words}" for name, words in REASONS.items() if self.counts[name]]
        return f"of {self.counts['read']} conversations left out: {', '.join(parts)}" if parts else ""

    def _reason_against(self, row: Mapping[str, Any]) -> str:
        if "turns" in row:
            if not row["turns"]:
                return "without_turns"
            if any(turn["stop"] in _CUT for turn in row["turns"]):
                return "cut"
        if self._only_success and not _said(row, "success", "sft.only_success"):
            return "unsuccessful"
        if self._min_reward is not None:
            reward = _said(row, "return", "sft.min_reward")
            if reward is None or reward < self._min_reward:  # null: it was not finite
                return "below_min_reward"
        return ""


def read_conversations(path: str | pathlib.Path, selection: Selection | None = None) -> Iterator[Conversation]:
    """The conversations of files that the selection keeps, in order of file name and line.

    Only a line feed ends a line (text may hold U+2028 and the like); empty lines are passed over.

    Args:
      path: a file of JSON lines, a directory (its *.jsonl), or a glob pattern.
      selection: None keeps all but the trajectories that are no examples: without turns, or cut.

    Raises:
      ValueError: there is no such file, or a line is not of either form; names the file, the line and what is wrong.
    """
    selection = selection or Selection()
    for file_path in _files_of(str(path)):
        with file_path.open("rb") as file:  # binary files end lines at b"\n" alone
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line.decode("utf-8"))
                    conversation = _conversation(row)
                    kept = selection.keeps(row)
                    if kept:
                        check_messages(conversation.messages)
                except ValueError as error:  # of JSON and UTF-8 too
                    raise ValueError(f"{file_path}:{number}: {error}") from None
                if kept:
                    yield conversation


def _files_of(path: str) -> list[pathlib.Path]:
    if pathlib.Path(path).is_dir():
        found = sorted(pathlib.Path(path).glob("*.jsonl"))
        if not found:
            raise ValueError(f"sft.path: directory {path!r} holds no *.jsonl file")
        return found
    if pathlib.Path(path).is_file():
        return [pathlib.Path(path)]
    found = [pathlib.Path(name) for name in sorted(glob.glob(path, recursive=True)) if pathlib.Path(name).is_file()]
    if not found:
        raise ValueError(f"demonstrations file {path!r} does not exist")
    return found


def _conversation(row: Any) -> Conversation:
    if isinstance(row, dict) and isinstance(row.get("turns"), list):
        return _of_trajectory(row)
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        raise ValueError('expected an object with a list "messages", or a trajectory with a list "turns"')
    return Conversation(row["messages"])


def _of_trajectory(row: Mapping[str, Any]) -> Conversation:
    for name in ("instructions", "tokens_crc32"):
        if name not in row:
            raise ValueError(f"this trajectory holds no {name!r}: an older version wrote it; collect it anew")
    messages = [{"role": "system", "content": row["instructions"]}] if row["instructions"] else []
    for number, turn in enumerate(row["turns"]):
        for name in ("observation", "action", "stop"):
            if not isinstance(turn, dict) or not isinstance(turn.get(name), str):
                raise ValueError(f"turn {number} of the trajectory needs a text {name!r}")
        messages += [
            {"role": "user", "content": turn["observation"]},
            {"role": "assistant", "content": turn["action"]},
        ]
    ended = bool(row["turns"]) and row["turns"][-1]["stop"] == StopReason.EOS
    return Conversation(messages, row["tokens_crc32"], ended)


def _said(row: Mapping[str, Any], name: str, field: str) -> Any:
    if name not in row:
        raise ValueError(f"{field} is set, but the conversation says no {name!r}; trajectories do")
    return row[name]

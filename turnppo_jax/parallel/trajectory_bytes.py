"""Trajectories as bytes and back: numbers in flat arrays, text and info as JSON."""

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from turnppo_jax.types import StopReason, Trajectory, Turn

_STOPS = tuple(StopReason)
_NO_PROMPT = -1  # length of a final prompt that there is none of


def encode_trajectories(trajectories: Sequence[Trajectory], extra: Mapping[str, Any] | None = None) -> bytes:
    """The trajectories and something of JSON types beside them.

    Token ids stand in one line after another: of each turn prompt and response, of each trajectory the final prompt
    after its last turn. Numbers keep their bits; `info` comes back as JSON gives it (keys are text, tuples are lists).

    Args:
      trajectories: in the order that they come back in.
      extra: comes back equal.

    Raises:
      TypeError: an `info` or `extra` that JSON does not hold.
    """
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    ids: list[np.ndarray] = []
    for trajectory in trajectories:
        for turn in trajectory.turns:
            ids += [turn.prompt_ids, turn.response_ids]
        if trajectory.final_prompt_ids is not None:
            ids.append(trajectory.final_prompt_ids)
    text = {
        "turns": [[turn.observation, turn.action, turn.info] for turn in turns],
        "trajectories": [[t.info, t.instructions, t.final_observation] for t in trajectories],
        "extra": dict(extra or {}),
    }
    arrays = {
        "ids": _joined(ids, np.int32),
        "logprobs": _joined([turn.behavior_logprobs for turn in turns], np.float32),
        "rewards": np.asarray([turn.reward for turn in turns], np.float64),
        "turns": np.asarray(
            [
                (len(t.prompt_ids), len(t.response_ids), _STOPS.index(t.stop), t.policy_step, t.starts_row)
                for t in turns
            ],
            np.int64,
        ).reshape(-1, 5),
        "trajectories": np.asarray(
            [
                (
                    len(t.turns), t.terminated, t.truncated, t.group, t.seed, t.episode,
                    _NO_PROMPT if t.final_prompt_ids is None else len(t.final_prompt_ids),
                )
                for t in trajectories
            ],
            np.int64,
        ).reshape(-1, 7),
        # ASCII, so that lone surrogates pass too.
        "text": np.frombuffer(json.dumps(text).encode("ascii"), np.uint8),
    }  # fmt: skip
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def decode_trajectories(data: bytes) -> tuple[list[Trajectory], dict[str, Any]]:
    """(trajectories, extra) of `encode_trajectories`."""
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    text = json.loads(arrays["text"].tobytes())
    ids, logprobs = _Line(arrays["ids"]), _Line(arrays["logprobs"])
    turns = iter(zip(arrays["turns"].tolist(), arrays["rewards"].tolist(), text["turns"], strict=True))
    trajectories = []
    for numbers, texts in zip(arrays["trajectories"].tolist(), text["trajectories"], strict=True):
        info, instructions, final_observation = texts
        num_turns, terminated, truncated, group, seed, episode, num_final = numbers
        of_episode = [_turn(*next(turns), ids, logprobs) for _ in range(num_turns)]
        trajectories.append(
            Trajectory(
                turns=of_episode,
                terminated=bool(terminated),
                truncated=bool(truncated),
                group=group,
                seed=seed,
                episode=episode,
                final_prompt_ids=None if num_final == _NO_PROMPT else ids.take(num_final),
                info=info,
                instructions=instructions,
                final_observation=final_observation,
            )
        )
    return trajectories, text["extra"]


def _turn(numbers: list[int], reward: float, text: list[Any], ids: "_Line", logprobs: "_Line") -> Turn:
    num_prompt, num_response, stop, policy_step, starts_row = numbers
    observation, action, info = text
    return Turn(
        prompt_ids=ids.take(num_prompt),
        response_ids=ids.take(num_response),
        behavior_logprobs=logprobs.take(num_response),
        reward=reward,
        stop=_STOPS[stop],
        policy_step=policy_step,
        observation=observation,
        action=action,
        info=info,
        starts_row=bool(starts_row),
    )


class _Line:
    """An array that is read piece by piece."""

    def __init__(self, array: np.ndarray):
        self._array, self._at = array, 0

    def take(self, count: int) -> np.ndarray:
        self._at += count
        return self._array[self._at - count : self._at]


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *(np.asarray(part, dtype) for part in parts)])

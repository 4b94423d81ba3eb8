"""The text, rewards, values and advantages of every turn of a step, one JSON line a trajectory."""

import os
import pathlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from turnppo_jax.training.json_lines import dumps, read_jsonl, write_atomically
from turnppo_jax.types import Trajectory


def trajectory_path(workdir: str | os.PathLike, step: int) -> pathlib.Path:
    """`workdir/trajectories/step_000012.jsonl`."""
    return pathlib.Path(workdir) / "trajectories" / f"step_{step:06d}.jsonl"


def write_trajectories(
    workdir: str | os.PathLike,
    step: int,
    trajectories: Sequence[Trajectory],
    turn_values: Sequence[Sequence[float]] | None = None,
    turn_advantages: Sequence[Sequence[float]] | None = None,
    reward_terms: Sequence[Sequence[Mapping[str, float]]] | None = None,
) -> pathlib.Path:
    """Writes the file of a step in one move, so that it is whole or absent.

    Args:
      workdir: the run's directory.
      step: the training step that collected the trajectories.
      trajectories: in any order.
      turn_values: row m holds the critic's values of the turns of `trajectories[m]`, for example a table [M, K] padded
        at the end; None writes null.
      turn_advantages: the same for the advantages that the update used.
      reward_terms: the terms of each turn, "total" among them, see `training.reward_terms`; None writes null.

    Returns:
      The file's path.

    Raises:
      ValueError: a table has another number of rows than there are trajectories, or a row too few turns.
    """
    tables = {"turn_values": turn_values, "turn_advantages": turn_advantages, "reward_terms": reward_terms}
    for name, table in tables.items():
        if table is None:
            continue
        if len(table) != len(trajectories):
            raise ValueError(f"{name} has {len(table)} rows for {len(trajectories)} trajectories")
        for index, (row, trajectory) in enumerate(zip(table, trajectories, strict=True)):
            if len(row) < len(trajectory.turns):
                raise ValueError(f"{name}[{index}] has {len(row)} entries for {len(trajectory.turns)} turns")
    path = trajectory_path(workdir, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        dumps(_record(step, trajectory, *(None if table is None else table[index] for table in tables.values())))
        for index, trajectory in enumerate(trajectories)
    ]
    write_atomically(path, "".join(line + "\n" for line in lines).encode("ascii"))
    return path


def write_played(path: str | os.PathLike, step: int, played: Mapping[str, Sequence[Trajectory]]) -> None:
    """Writes evaluated episodes in one move; each line also says how they were sampled.

    Args:
      path: of the file.
      step: of the policy.
      played: trajectories by the way of sampling, "temperature 1" or "greedy".
    """
    records = [
        _record(step, trajectory, None, None, None) | {"sampling": sampling}
        for sampling, trajectories in played.items()
        for trajectory in trajectories
    ]
    write_atomically(path, "".join(dumps(record) + "\n" for record in records).encode("ascii"))


def read_trajectories(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The records of a file that `write_trajectories` or `write_played` wrote."""
    return read_jsonl(path)


def tokens_checksum(ids: Sequence[np.ndarray]) -> int:
    """CRC-32 of token ids (int32, little-endian) one array after another."""
    checksum = 0
    for array in ids:
        checksum = zlib.crc32(np.asarray(array, "<i4").tobytes(), checksum)
    return checksum


def _record(
    step: int,
    trajectory: Trajectory,
    values: Sequence[float] | None,
    advantages: Sequence[float] | None,
    terms: Sequence[Mapping[str, float]] | None,
) -> dict[str, Any]:
    return {
        "step": step,
        "episode": trajectory.episode,
        "seed": trajectory.seed,
        "group": trajectory.group,
        "terminated": trajectory.terminated,
        "truncated": trajectory.truncated,
        "return": trajectory.total_reward,
        "success": trajectory.success,
        "info": trajectory.info,
        "instructions": trajectory.instructions,
        "final_observation": trajectory.final_observation,
        "tokens_crc32": tokens_checksum([i for turn in trajectory.turns for i in (turn.prompt_ids, turn.response_ids)]),
        "turns": [
            {
                "observation": turn.observation,
                "action": turn.action,
                "reward": turn.reward,
                "reward_terms": None if terms is None else terms[index],
                "value": None if values is None else values[index],
                "advantage": None if advantages is None else advantages[index],
                "stop": turn.stop,
                "num_prompt_tokens": len(turn.prompt_ids),
                "num_tokens": len(turn.response_ids),
                "policy_step": turn.policy_step,
                "info": turn.info,
            }
            for index, turn in enumerate(trajectory.turns)
        ],
    }

"""Checkpoints of a run: model states, step, config; saved in the background, restored onto any mesh.

    checkpoints/12/actor    ModelState: parameters, optimizer state, counters
    checkpoints/12/critic   the same, where the run has a critic
    checkpoints/12/config   JSON: the finalised config, the model sizes, and the score that ranks the checkpoint

A checkpoint of step n is written after step n is finished. Keys and environment seeds are pure functions
of (seed, step, index), so there is nothing else to save.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers

from turnppo_jax.models.sizes import ModelSizes
from turnppo_jax.training.checkpoint_reading import (
    CheckpointError,
    first_line,
    read_record,
    restore_actor_params,
    restore_onto,
    scan_steps,
    usable_steps,
)
from turnppo_jax.training.json_lines import jsonable, truncate_jsonl

__all__ = ["CheckpointError", "Checkpoints", "cut_back", "restore_actor_params", "usable_steps"]

_UNFINISHED = ".orbax-checkpoint-tmp"  # part of the name of a directory that Orbax is still writing
_UNUSABLE = ".unusable"  # how `Checkpoints` renames a step directory that it passes over


class Checkpoints:
    """The checkpoints of one run, for the process that trains.

    Opening it sets aside what an interrupted save has left behind, by name and with a printed line.

    Args:
      workdir: the run's directory; checkpoints lie in `workdir/checkpoints`.
      config: the finalised config as JSON types, saved in every checkpoint.
      sizes: sizes of the actor's model, saved in every checkpoint; None saves none.
      keep_latest: how many of the newest checkpoints to keep.
      keep_best: how many of the best to keep beside them (0: none).
      save_every: `save` acts on multiples of it.
      score: name of the metric that decides which is best; larger is better, a NaN counts as none.
    """

    def __init__(
        self,
        workdir: str | pathlib.Path,
        *,
        config: Mapping[str, Any] | None = None,
        sizes: ModelSizes | None = None,
        keep_latest: int = 2,
        keep_best: int = 1,
        save_every: int = 1,
        score: str = "score",
    ):
        for name, value, least in (
            ("keep_latest", keep_latest, 1),
            ("keep_best", keep_best, 0),
            ("save_every", save_every, 1),
        ):
            if value < least:
                raise ValueError(f"{name}={value}: must be at least {least}")
        self._directory = pathlib.Path(workdir).absolute() / "checkpoints"
        self._record = {
            "config": jsonable(dict(config or {})),
            "sizes": None if sizes is None else dataclasses.asdict(sizes),
        }
        self._save_every = save_every
        self._score = score
        if jax.process_index() == 0:
            self._directory.mkdir(parents=True, exist_ok=True)
            _set_aside(self._directory)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("turnppo_jax: checkpoints set aside")
        self._scores = {step: read_record(self._directory, step)["score"] for step in usable_steps(workdir)}
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_KeepLatestAndBest(keep_latest, keep_best, self._scores),
            cleanup_tmp_directories=True,
        )
        self._manager = ocp.CheckpointManager(self._directory, options=options)

    def latest_step(self) -> int | None:
        """The newest step that can be restored (or is being written), None where there is none."""
        return self._manager.latest_step()

    def best_step(self) -> int | None:
        """The kept step with the highest score (the later one of equals), None where no step has one."""
        return next(iter(_best(self.all_steps(), self._scores, 1)), None)

    def all_steps(self) -> list[int]:
        """Every kept step in order, after the saves in progress have ended."""
        self.wait()
        return sorted(self._manager.all_steps())

    def due(self, step: int) -> bool:
        """Whether `save` would act on this step."""
        return step % self._save_every == 0

    def save(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float] | None = None, *, force: bool = False
    ) -> bool:
        """Starts to save; the state may be donated or changed as soon as this returns.

        Orbax copies device memory to the host before it returns, or, where host and device memory are one, holds
        the buffers, so that a donating program leaves them alone.

        Args:
          step: the finished step.
          state: ModelState by name ("actor", "critic"); a None is left out.
          metrics: holds the score where this step was evaluated.
          force: save although the step is not due; a step that is already saved is left as it is.

        Returns:
          Whether a save was started.

        Raises:
          CheckpointError: an earlier save failed in the background.
        """
        if not (force or self.due(step)) or step == self.latest_step():
            return False
        items = {name: ocp.args.StandardSave(value) for name, value in state.items() if value is not None}
        score = float((metrics or {}).get(self._score, np.nan))
        self._scores[step] = score if np.isfinite(score) else None
        record = ocp.args.JsonSave(self._record | {"step": step, "score": self._scores[step]})
        try:
            self._manager.check_for_errors()
            # Whether a step is due was decided above; without `force` Orbax would skip a step while the previous one
            # is still being written. It waits for that one instead.
            return self._manager.save(step, args=ocp.args.Composite(config=record, **items), force=True)
        except Exception as error:
            raise CheckpointError(
                f"saving to {self._directory} failed at or before step {step}: {first_line(error)}"
            ) from error

    def restore(self, step: int, target: Mapping[str, Any], *, cast: bool = False) -> dict[str, Any]:
        """Restores one step onto the shapes, dtypes and shardings of `target`.

        Args:
          step: one of `all_steps()`.
          target: ModelState by name, of arrays or of `jax.ShapeDtypeStruct` with a sharding (any mesh); None where
            the run has none.
          cast: convert to the target's dtypes where they differ, instead of refusing.

        Returns:
          The state by name, None where the target is None.

        Raises:
          CheckpointError: the step is not there or cannot be read, or holds another structure, shape or dtype; names
            the first leaf that differs.
        """
        self.wait()
        return restore_onto(self._directory, step, target, cast=cast)

    def restore_latest(self, target: Mapping[str, Any], *, cast: bool = False) -> tuple[int, dict[str, Any]] | None:
        """(step, state) of the newest checkpoint, None where there is none; see `restore`."""
        step = self.latest_step()
        return None if step is None else (step, self.restore(step, target, cast=cast))

    def config(self, step: int) -> dict[str, Any]:
        """The config that a checkpoint was written with, as JSON types."""
        self.wait()
        return read_record(self._directory, step)["config"]

    def wait(self) -> None:
        """Returns when every started save is on the disk.

        Raises:
          CheckpointError: a save failed in the background.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise CheckpointError(
                f"saving to {self._directory} failed in the background: {first_line(error)}"
            ) from error

    def close(self) -> None:
        """Waits for the saves in progress and ends the background threads."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


@dataclasses.dataclass(frozen=True)
class _KeepLatestAndBest(checkpoint_managers.PreservationPolicy):
    """Keeps the newest and, counted apart, the best.

    One count for both, as a score beside `max_to_keep` would be, throws away the newest checkpoint when it is not
    among the best, and a preempted run loses its work.
    """

    keep_latest: int
    keep_best: int
    scores: Mapping[int, float | None]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = set(sorted(steps)[-self.keep_latest :]) | set(_best(steps, self.scores, self.keep_best))
        return [step in kept for step in steps]


def _best(steps: Sequence[int], scores: Mapping[int, float | None], count: int) -> list[int]:
    """At most `count` steps that have a score, the highest first and the later of equals first."""
    scored = [step for step in steps if scores.get(step) is not None]
    return sorted(scored, key=lambda step: (scores[step], step), reverse=True)[:count]


def cut_back(workdir: str | pathlib.Path, step: int) -> None:
    """Removes what a run wrote after a step that it is resumed from, so that no step is recorded twice.

    Args:
      workdir: the run's directory; `metrics.jsonl` and `eval_rooms.jsonl` are cut, `trajectories/step_*.jsonl` of later
        steps are removed.
      step: the checkpoint's step; -1 starts from nothing.
    """
    workdir = pathlib.Path(workdir)
    for name in ("metrics.jsonl", "eval_rooms.jsonl"):
        truncate_jsonl(workdir / name, step)
    for path in sorted(workdir.glob("trajectories/step_*.jsonl")):
        number = path.stem.removeprefix("step_")
        if number.isdigit() and int(number) > step:
            path.unlink()


def _set_aside(directory: pathlib.Path) -> None:
    """Names what an interrupted save left, and renames step directories that would hide the whole ones."""
    for entry in sorted(directory.iterdir()):
        if _UNFINISHED in entry.name:
            print(f"checkpoints: {entry.name} is half-written; passed over and removed", flush=True)
    for step, missing in scan_steps(directory):
        if missing is not None:
            target = directory / f"{step}{_UNUSABLE}"
            number = 1
            while target.exists():
                number += 1
                target = directory / f"{step}{_UNUSABLE}-{number}"
            (directory / str(step)).rename(target)
            print(f"checkpoints: {step} is not whole ({missing}); passed over, renamed to {target.name}", flush=True)

"""What a run has left in its directory, read for a comparison."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from turnppo_jax.command_line import UserError
from turnppo_jax.training.checkpoint_reading import usable_steps
from turnppo_jax.training.evaluation import EvaluationSettings
from turnppo_jax.training.json_lines import read_jsonl

FINISHED, CRASHED, UNFINISHED = "finished", "crashed", "unfinished"


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """One run as it stands.

    Attributes:
      directory: of the run.
      config: the finalised config that was asked for.
      rows: of `metrics.jsonl`, in the order of steps.
      rooms: by step, the mean of each room for every evaluated metric.
      state: "finished" | "crashed" | "unfinished".
      why: of a crash.
    """

    directory: pathlib.Path
    config: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...]
    rooms: Mapping[int, Mapping[str, list[float]]]
    state: str
    why: str = ""

    @property
    def step(self) -> int:
        """The last step that is recorded; -1 before the first evaluation."""
        return self.rows[-1]["step"] if self.rows else -1

    def series(self, metric: str) -> dict[int, float]:
        """The metric's finite values by step."""
        found = {row["step"]: row.get(metric) for row in self.rows}
        return {step: float(value) for step, value in found.items() if value is not None and math.isfinite(value)}

    def due_steps(self, metric: str) -> list[int]:
        """The training steps whose end the metric is due at, by the config: evaluations, or every step."""
        steps = range(1, self.config["steps"] + 1)
        if not metric.startswith("eval/"):
            return list(steps)
        evaluation = EvaluationSettings(**self.config.get("evaluation", {}))
        return [step for step in steps if evaluation.due(step, self.config["steps"])]

    def counted_steps(self, metric: str, last: int) -> list[int]:
        """The steps whose values count: of the `last` due ones each, or where the run ended before, its last one.

        This is the rule for crashed runs: what they last had is carried forward. Without any value: none.
        """
        known = sorted(self.series(metric))
        carried = [[step for step in known if step <= due][-1:] for due in self.due_steps(metric)[-last:]]
        return [step for steps in carried for step in steps]

    def value(self, metric: str, last: int) -> float | None:
        """The mean over `counted_steps`; None for a run that is still to be finished, or that has no value."""
        steps = self.counted_steps(metric, last)
        if self.state == UNFINISHED or not steps:
            return None
        series = self.series(metric)
        return float(np.mean([series[step] for step in steps]))

    def room_values(self, metric: str, last: int) -> np.ndarray | None:
        """[N], the same for each room by itself; None where the run has kept none."""
        rows = [self.rooms.get(step, {}).get(metric) for step in self.counted_steps(metric, last)]
        if self.state == UNFINISHED or not rows or any(row is None for row in rows):
            return None
        return np.mean(np.asarray(rows, np.float64), axis=0)

    def total(self, *metrics: str) -> float:
        """The sum of metrics over all steps."""
        return float(sum(sum(self.series(metric).values()) for metric in metrics))

    def mean(self, metric: str) -> float | None:
        """The mean of a metric over the steps that have it, None where none has."""
        series = self.series(metric)
        return float(np.mean(list(series.values()))) if series else None

    def alarms(self) -> dict[str, int]:
        """Alarms that were on after some step, with the step where the first of each began."""
        began: dict[str, int] = {}
        for row in self.rows:
            for name, value in row.items():
                alarm = name.removeprefix("collapse/")
                if alarm != name and not alarm.endswith("_since_step") and value:
                    began.setdefault(alarm, int(row[f"{name}_since_step"]))
        return began

    def trajectories(self) -> dict[int, float]:
        """Training episodes played up to the end of each step, by step."""
        episodes = self.config["rollout"]["num_prompts"] * self.config.get("algorithm", {}).get("group_size", 1)
        return self._cumulated(lambda row: episodes - (row.get("episode/num_dropped") or 0.0))

    def sampled_tokens(self) -> dict[int, float]:
        """Tokens sampled in training up to the end of each step, by step."""
        return self._cumulated(lambda row: row.get("rollout/sampled_tokens") or 0.0)

    def wall_time(self) -> dict[int, float]:
        """Seconds of training steps up to the end of each step, by step; evaluations are left out."""
        return self._cumulated(lambda row: row.get("time/step_s") or 0.0)

    def _cumulated(self, of_row) -> dict[int, float]:
        total, out = 0.0, {}
        for row in self.rows:
            total += of_row(row) if row["step"] > 0 else 0.0
            out[row["step"]] = total
        return out


def read_run(directory: pathlib.Path, config: Mapping[str, Any]) -> RunRecord:
    """Reads a run's directory; one that is not there is a run that is unfinished before its first step.

    Args:
      directory: of the run.
      config: finalised, that the run is asked to have.

    Raises:
      UserError: the directory holds a run of another config; names the directory and the first field that differs.
    """
    check_same_run(directory, config)
    metrics, by_room = directory / "metrics.jsonl", directory / "eval_rooms.jsonl"
    rows = tuple(read_jsonl(metrics)) if metrics.exists() else ()
    rooms = {row["step"]: row for row in read_jsonl(by_room)} if by_room.exists() else {}
    return RunRecord(directory, config, rows, rooms, *_state(directory, config, rows))


def check_same_run(directory: pathlib.Path, config: Mapping[str, Any]) -> None:
    """Sees that a directory is empty or holds a run of this very config.

    Raises:
      UserError: as `read_run`.
    """
    path = directory / "config.json"
    if not path.exists():
        if directory.is_dir() and any(directory.iterdir()):
            raise UserError(f"{directory} is not empty and holds no config.json; allowed: a run of this comparison")
        return
    found = json.loads(path.read_text(encoding="utf-8"))
    if field := _first_difference(found, config):
        raise UserError(f"{directory} holds a run of another config: {field}; give another --out or remove it")


def known_metrics(records: Iterable[RunRecord]) -> list[str]:
    """Every number that a run has recorded."""
    names = {name for record in records for row in record.rows for name, value in row.items() if _is_number(value)}
    return sorted(names - {"step"})


def _state(directory: pathlib.Path, config: Mapping[str, Any], rows: tuple[Mapping[str, Any], ...]) -> tuple[str, str]:
    last = rows[-1] if rows else {"step": -1}
    for name in ("crashed.json", "failed.json"):
        if (directory / name).exists():
            return CRASHED, json.loads((directory / name).read_text(encoding="utf-8"))["why"]
    if last["step"] != config["steps"] or usable_steps(directory)[-1:] != [config["steps"]]:
        return UNFINISHED, ""
    if last.get("collapse/non_finite"):
        return (
            CRASHED,
            f"non_finite: steps without a finite loss from step {int(last['collapse/non_finite_since_step'])}",
        )
    return FINISHED, ""


def _first_difference(found: Any, asked: Any, path: str = "") -> str:
    if isinstance(found, Mapping) and isinstance(asked, Mapping):
        for name in dict.fromkeys((*found, *asked)):
            if difference := _first_difference(found.get(name), asked.get(name), f"{path}.{name}".lstrip(".")):
                return difference
        return ""
    return "" if found == asked and type(found) is type(asked) else f"{path}={found!r}, asked for {asked!r}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

"""The numbers of a comparison: means with intervals over seeds, paired differences, and what the runs have cost."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from turnppo_jax.command_line import UserError
from turnppo_jax.comparison.arms import Comparison, differences, rooms_of
from turnppo_jax.comparison.records import RunRecord, known_metrics
from turnppo_jax.training.statistics import Interval, mean_interval

RULE = (
    "A run counts with the mean of its last {last} evaluations. A crashed run's last evaluation is carried forward to "
    "those that it missed (where an alarm ends a run, it is evaluated once more). A run that is not finished does not "
    "count."
)
# Means over the steps of a run: name in the record, metric.
_MEANS = (
    ("clip_fraction_turn", "policy/clip_fraction_turn"),
    ("clip_fraction_token", "policy/clip_fraction_token"),
    ("turn_log_ratio_std", "policy/turn_log_ratio_std"),
)

Records = Mapping[str, Mapping[int, RunRecord]]  # by arm, by seed


def compare(comparison: Comparison, records: Records, metric: str, remarks: Sequence[str] = ()) -> dict[str, Any]:
    """The whole comparison as JSON types.

    With v[a, s] the value of arm a's run of seed s (see RULE), an arm's mean is over its seeds and its difference to
    the first arm the mean of v[a, s] − v[first, s] over the seeds that both have; both with t intervals over seeds.
    Where all runs have kept their rooms, the difference has a second interval, over rooms: the same difference for
    each room by itself, averaged over seeds. It says how much other rooms would change these runs' difference, and
    nothing about other runs.

    Args:
      comparison: arms and seeds.
      records: of every run.
      metric: the number compared.
      remarks: of `check_comparable`.

    Raises:
      UserError: no run has the metric; the known ones are listed.
    """
    everything = [record for by_seed in records.values() for record in by_seed.values()]
    # While runs are still missing, an arm that has not begun may be the one that has the metric.
    every_arm_has_begun = all(any(record.rows for record in by_seed.values()) for by_seed in records.values())
    if every_arm_has_begun and metric not in (known := known_metrics(everything)):
        raise UserError(f"unknown metric {metric!r}; known: {', '.join(known)}")
    first = comparison.arms[0].name
    return {
        "metric": metric,
        "last": comparison.last,
        "seeds": list(comparison.seeds),
        "reference": first,
        "rule": RULE.format(last=comparison.last),
        "remarks": list(remarks),
        "arms": [
            {"name": arm.name, "config": arm.config_file, "overrides": dict(arm.overrides)}
            | _arm(records[arm.name], metric, comparison.last)
            | ({"difference": _difference(records[arm.name], records[first], metric, comparison.last)}
               if arm.name != first else {})
            for arm in comparison.arms
        ],
        "settings_that_differ": differences(
            {name: next(iter(by_seed.values())).config for name, by_seed in records.items()}
        ),
    }  # fmt: skip


def _arm(runs: Mapping[int, RunRecord], metric: str, last: int) -> dict[str, Any]:
    values = {seed: run.value(metric, last) for seed, run in runs.items()}
    before = [run.series(metric)[0] for run in runs.values() if 0 in run.series(metric)]
    return {
        "value": _interval([value for value in values.values() if value is not None]),
        "before_training": float(np.mean(before)) if before else None,
        "runs": {str(seed): _run(run, metric, values[seed], last) for seed, run in runs.items()},
    }


def _run(run: RunRecord, metric: str, value: float | None, last: int) -> dict[str, Any]:
    cost = {"trajectories": run.trajectories(), "sampled_tokens": run.sampled_tokens(), "wall_time_s": run.wall_time()}
    return {
        "state": run.state,
        "why": run.why,
        "step": run.step,
        "value": value,
        "counted_steps": run.counted_steps(metric, last),
        "curve": {str(step): number for step, number in run.series(metric).items()},
        "alarms": run.alarms(),
        "optimizer_steps": run.total("optim/steps_actor"),
        "optimizer_steps_critic": run.total("optim/steps_critic"),
        "eval_time_s": run.total("time/eval_s"),
        **{name: max(sums.values(), default=0.0) for name, sums in cost.items()},
        **{name: run.mean(metric) for name, metric in _MEANS},
    }


def _difference(
    runs: Mapping[int, RunRecord], reference: Mapping[int, RunRecord], metric: str, last: int
) -> dict[str, Any] | None:
    pairs = {seed: (run.value(metric, last), reference[seed].value(metric, last)) for seed, run in runs.items()}
    paired = {seed: here - there for seed, (here, there) in pairs.items() if None not in (here, there)}
    if not paired:
        return None
    interval = _interval(list(paired.values()))
    return interval | {
        "by_seed": {str(seed): value for seed, value in paired.items()},
        "over_rooms": _over_rooms([(runs[seed], reference[seed]) for seed in paired], metric, last),
    }


def _over_rooms(pairs: Sequence[tuple[RunRecord, RunRecord]], metric: str, last: int) -> dict[str, Any] | None:
    rows = []
    for run, reference in pairs:
        here, there = run.room_values(metric, last), reference.room_values(metric, last)
        if (
            here is None
            or there is None
            or here.shape != there.shape
            or rooms_of(run.config) != rooms_of(reference.config)
        ):
            return None
        rows.append(here - there)
    return _interval(np.mean(rows, axis=0))


def _interval(values: Sequence[float]) -> dict[str, Any] | None:
    """A mean with its t interval; of one value alone there is no interval."""
    if not len(values):
        return None
    found: Interval = mean_interval(values)
    known = found.units > 1
    return {
        "mean": found.mean,
        "low": found.low if known else None,
        "high": found.high if known else None,
        "n": found.units,
    }

"""Alarms that tell of a collapsing policy, from the metrics of a run's steps so far.

The signs are those of RAGEN's study (arXiv 2504.20073, section 4): the spread of rewards inside groups dies well
before the mean falls, the gradient norm spikes, entropy and length leave their range, responses repeat themselves. An
alarm compares a step with the mean of the run's first steps, so that one default serves models of any size.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from turnppo_jax.training.json_lines import read_jsonl

_WATCHED = (
    "episode/group_return_std_mean", "episode/success_rate", "episode/turn_tokens_mean", "episode/cut_turn_rate",
    "episode/repeated_tokens_share", "policy/entropy", "optim/grad_norm", "optim/skipped_actor",
    "optim/skipped_critic",
)  # fmt: skip
_LEAST_ENTROPY = 0.1  # nats a token; of a start below it, a multiple says nothing

Row = Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class CollapseSettings:
    """`config.collapse`. "The start" is the mean of a metric over the first `baseline_steps` steps that have it.

    Attributes:
      stop_on_collapse: the first alarm ends the run with a checkpoint and a `crashed.json`.
      baseline_steps: the steps that make the start; RAGEN's rule has 10.
      steps: an alarm is on when its sign stood in each of so many last steps; RAGEN's rule has 10.
      reward_std: std of returns inside groups below this share of the start. RAGEN's rule: 0.1.
      gradient_spike: gradient norm above this multiple of the median of all earlier steps. RAGEN's collapsing runs
        rose from about 1 to 90-170.
      gradient_spikes: an alarm needs so many among the last `steps`: a single spike is clipped and forgotten.
      entropy_low: entropy below this share of the start.
      entropy_high: entropy above this multiple of the start, or of 0.1 nats where the start is lower.
      length_low: tokens of a response below this share of the start.
      length_high: tokens of a response above this multiple of the start.
      cut_turns: the share of responses cut at a limit rose by this much: a length near its limit cannot triple.
      repeated_tokens: the share of repeated 4-grams rose by this much.
      success: evaluated success below this share of its best, and the two 95 % intervals apart.
      success_evaluations: in each of so many last evaluations.
      non_finite_steps: an alarm needs so many among the last `steps` whose loss or gradient was not finite.
      solved: where training success is at least this, dying spread and entropy are convergence, not collapse.

    Raises:
      ValueError: naming the field, its value and what is allowed.
    """

    stop_on_collapse: bool = False
    baseline_steps: int = 10
    steps: int = 10
    reward_std: float = 0.1
    gradient_spike: float = 10.0
    gradient_spikes: int = 3
    entropy_low: float = 0.1
    entropy_high: float = 3.0
    length_low: float = 0.25
    length_high: float = 3.0
    cut_turns: float = 0.5
    repeated_tokens: float = 0.3
    success: float = 0.5
    success_evaluations: int = 2
    non_finite_steps: int = 3
    solved: float = 0.9

    def __post_init__(self):
        for name in ("baseline_steps", "steps", "gradient_spikes", "success_evaluations", "non_finite_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"collapse.{name}={getattr(self, name)}; allowed: at least 1")
        for name in ("gradient_spikes", "non_finite_steps"):
            if getattr(self, name) > self.steps:
                raise ValueError(f"collapse.{name}={getattr(self, name)}; allowed: at most collapse.steps={self.steps}")
        for name in ("reward_std", "entropy_low", "length_low", "cut_turns", "repeated_tokens", "success", "solved"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"collapse.{name}={getattr(self, name)}; allowed: from 0 to 1")
        for name in ("gradient_spike", "entropy_high", "length_high"):
            if not getattr(self, name) > 1:
                raise ValueError(f"collapse.{name}={getattr(self, name)}; allowed: above 1")


@dataclasses.dataclass(frozen=True)
class Alarm:
    """What one sign says after the last step.

    Attributes:
      name: of the metric `collapse/<name>`.
      since: the step where what is going on began, None while the alarm is off.
      why: for a person, empty while it is off.
    """

    name: str
    since: int | None = None
    why: str = ""


def watched(step: int, metrics: Mapping[str, Any], success: str) -> dict[str, float]:
    """The part of a step's metrics that alarms read. A NaN, an infinity and the null of a metrics file become NaN.

    Args:
      step: the training step.
      metrics: number by name, as logged or as read from `metrics.jsonl`.
      success: name of the evaluated success rate, `eval/<environment>/success_rate`.
    """
    row: dict[str, float] = {"step": step}
    for name in (*_WATCHED, success, f"{success}_low", f"{success}_high"):
        if name in metrics:
            value = metrics[name]
            row[name] = float(value) if value is not None and math.isfinite(value) else math.nan
    return row


def collapse_alarms(history: Sequence[Row], settings: CollapseSettings, success: str) -> list[Alarm]:
    """The alarms after the last step of a history; a pure function of it, so that a continued run says the same.

    Args:
      history: of `watched`, in the order of steps, the evaluation before the first step included.
      settings: thresholds.
      success: as for `watched`.

    Returns:
      An alarm for each sign whose metric the run has; without groups there is no spread inside them.
    """
    rows = [row for row in history if row["step"] > 0]

    def unsolved(row: Row) -> bool:
        return not row.get("episode/success_rate", 0.0) >= settings.solved

    def against_start(name: str, metric: str, is_bad: Callable[[float, float, Row], bool], text: str) -> Alarm | None:
        seen = [row for row in rows if math.isfinite(row.get(metric, math.nan))]
        if not seen:
            return None
        first, later = seen[: settings.baseline_steps], seen[settings.baseline_steps :]
        start = float(np.mean([row[metric] for row in first]))
        last = later[-settings.steps :]
        if len(last) < settings.steps or not all(is_bad(row[metric], start, row) for row in last):
            return Alarm(name)
        since = last[0]["step"]
        for row in reversed(later):
            if not is_bad(row[metric], start, row):
                break
            since = row["step"]
        return Alarm(name, int(since), text.format(now=last[-1][metric], start=start, since=int(since)))

    s = settings
    alarms = [
        against_start(
            "reward_std", "episode/group_return_std_mean",
            lambda x, start, row: x < s.reward_std * start and unsolved(row),
            "std of returns inside groups {now:.3g}, {start:.3g} at the start, since step {since}",
        ),
        _gradient_spikes(rows, s),
        against_start(
            "entropy_low", "policy/entropy", lambda x, start, row: x < s.entropy_low * start and unsolved(row),
            "entropy fell to {now:.3g} from {start:.3g}, since step {since}",
        ),
        against_start(
            "entropy_high", "policy/entropy", lambda x, start, _: x > s.entropy_high * max(start, _LEAST_ENTROPY),
            "entropy rose to {now:.3g} from {start:.3g}, since step {since}",
        ),
        against_start(
            "length_low", "episode/turn_tokens_mean", lambda x, start, _: x < s.length_low * start,
            "responses fell to {now:.3g} tokens from {start:.3g}, since step {since}",
        ),
        against_start(
            "length_high", "episode/turn_tokens_mean", lambda x, start, _: x > s.length_high * start,
            "responses rose to {now:.3g} tokens from {start:.3g}, since step {since}",
        ),
        against_start(
            "cut_turns", "episode/cut_turn_rate", lambda x, start, _: x > start + s.cut_turns,
            "the share of responses cut at a limit rose to {now:.3g} from {start:.3g}, since step {since}",
        ),
        against_start(
            "repeated_tokens", "episode/repeated_tokens_share", lambda x, start, _: x > start + s.repeated_tokens,
            "the share of repeated 4-grams rose to {now:.3g} from {start:.3g}, since step {since}",
        ),
        _success_fell(history, s, success),
        _non_finite(rows, s),
    ]  # fmt: skip
    return [alarm for alarm in alarms if alarm is not None]


def alarm_metrics(alarms: Sequence[Alarm]) -> dict[str, float]:
    """`collapse/<name>` 0 or 1, and `collapse/<name>_since_step` while it is 1."""
    metrics: dict[str, float] = {}
    for alarm in alarms:
        metrics[f"collapse/{alarm.name}"] = float(alarm.since is not None)
        if alarm.since is not None:
            metrics[f"collapse/{alarm.name}_since_step"] = float(alarm.since)
    return metrics


def read_history(workdir: pathlib.Path, success: str) -> list[dict[str, float]]:
    """`watched` of every row of a run's `metrics.jsonl`, none where there is no such file."""
    path = workdir / "metrics.jsonl"
    return [watched(row["step"], row, success) for row in read_jsonl(path)] if path.exists() else []


class CollapseWatch:
    """The history of one run as it grows, and what follows from it.

    Args:
      settings: thresholds, and whether an alarm ends the run.
      success: as for `watched`.
      history: of `read_history`, where the run is continued.
    """

    def __init__(self, settings: CollapseSettings, success: str, history: Sequence[Row] = ()):
        self._settings, self._success, self._history = settings, success, list(history)

    def add(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Takes in the metrics of a step; returns those of the alarms after it, none before the first update.

        Metrics of the step that was last taken in count in their place.
        """
        if self._history and self._history[-1]["step"] == step:
            self._history.pop()
        self._history.append(watched(step, metrics, self._success))
        return alarm_metrics(self._alarms())

    def crash(self) -> dict[str, Any] | None:
        """What `crashed.json` says where the run shall end after the last step, None where it goes on."""
        on = [alarm for alarm in self._alarms() if alarm.since is not None]
        if not on or not self._settings.stop_on_collapse:
            return None
        return {
            "step": int(self._history[-1]["step"]),
            "why": "; ".join(f"{alarm.name}: {alarm.why}" for alarm in on),
            "alarms": {alarm.name: alarm.since for alarm in on},
        }

    def _alarms(self) -> list[Alarm]:
        return collapse_alarms(self._history, self._settings, self._success)


def _gradient_spikes(rows: Sequence[Row], settings: CollapseSettings) -> Alarm | None:
    """Against the median of all earlier steps, which half of them would have to spike to move."""
    seen = [row for row in rows if math.isfinite(row.get("optim/grad_norm", math.nan))]
    if not seen:
        return None
    norms = [row["optim/grad_norm"] for row in seen]
    spikes = [
        index
        for index in range(max(settings.baseline_steps, len(seen) - settings.steps), len(seen))
        if norms[index] > settings.gradient_spike * float(np.median(norms[:index]))
    ]
    if len(spikes) < settings.gradient_spikes:
        return Alarm("gradient_spikes")
    largest = max(norms[index] for index in spikes)
    usual = float(np.median(norms[: spikes[0]]))
    text = f"{len(spikes)} gradient norms up to {largest:.3g} in the last {settings.steps} steps, {usual:.3g} as a rule"
    return Alarm("gradient_spikes", int(seen[spikes[0]]["step"]), text)


def _success_fell(history: Sequence[Row], settings: CollapseSettings, success: str) -> Alarm | None:
    seen = [row for row in history if math.isfinite(row.get(success, math.nan))]
    if not seen:
        return None
    bad: list[Row] = []  # the evaluations at the end that are far below the best before them
    best = seen[0]
    for row in seen:
        far = row[success] < settings.success * best[success]
        bad = [*bad, row] if far and row[f"{success}_high"] < best[f"{success}_low"] else []
        best = max(best, row, key=lambda row: row[success])
    if len(bad) < settings.success_evaluations:
        return Alarm("success")
    text = f"evaluated success {bad[-1][success]:.3f}, at its best {best[success]:.3f} at step {int(best['step'])}"
    return Alarm("success", int(bad[0]["step"]), text)


def _non_finite(rows: Sequence[Row], settings: CollapseSettings) -> Alarm | None:
    if not rows:
        return None

    def is_bad(row: Row) -> bool:
        skipped = any(row.get(f"optim/skipped_{model}", 0.0) > 0 for model in ("actor", "critic"))
        return skipped or any(math.isnan(value) for value in row.values())

    bad = [row for row in rows[-settings.steps :] if is_bad(row)]
    if len(bad) < settings.non_finite_steps:
        return Alarm("non_finite")
    since = int(bad[0]["step"])
    return Alarm(
        "non_finite", since, f"{len(bad)} of the last {settings.steps} steps were not finite, from step {since}"
    )

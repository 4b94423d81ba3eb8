"""A comparison as tables for a person."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def to_markdown(found: Mapping[str, Any], command: str) -> str:
    """The tables of a comparison.

    Args:
      found: of `table.compare`.
      command: that made it.
    """
    seeds = found["seeds"]
    states = [run for arm in found["arms"] for run in arm["runs"].values()]
    missing = sum(run["state"] == "unfinished" for run in states)
    spread = f"n = {len(seeds)}" if len(seeds) > 1 else "one seed has none"
    parts = [
        f"# {found['metric']}: mean of the last {found['last']} evaluations",
        f"{len(found['arms'])} arms, seeds {', '.join(map(str, seeds))}. {found['rule']}",
        f"Brackets: 95 % t intervals over seeds ({spread}). Differences are to {found['reference']}, paired by seed. "
        "Under rooms: the interval of the same difference over evaluation rooms, for these very runs; it says nothing "
        "about other seeds.",
    ]
    if missing:
        parts.append(f"**{missing} of {len(states)} runs are not finished and do not count.**")
    parts += [
        _values(found),
        "Per run of an arm, in the mean; clip fractions and the spread over its steps:",
        _costs(found),
    ]
    crashed = [
        f"- {arm['name']}, seed {seed}: crashed: {run['why']} (last step {run['step']})"
        for arm in found["arms"]
        for seed, run in arm["runs"].items()
        if run["state"] == "crashed"
    ]
    if crashed:
        parts.append("\n".join(crashed))
    if found["remarks"]:
        parts.append("\n".join(f"- note: {line}" for line in found["remarks"]))
    if found["settings_that_differ"]:
        parts += ["Settings that are not the same in all arms:", _settings(found)]
    parts.append(f"Command:\n\n    {command}")
    return "\n\n".join(parts) + "\n"


def _values(found: Mapping[str, Any]) -> str:
    rows = []
    for arm in found["arms"]:
        value, difference = arm["value"], arm.get("difference")
        rooms = (difference or {}).get("over_rooms")
        rows.append(
            [
                arm["name"],
                _number(arm["before_training"]),
                _interval(value),
                str(value["n"]) if value else "0",
                ", ".join(_one_run(run) for run in arm["runs"].values()),
                _interval(difference, sign=True),
                f"[{rooms['low']:+.3f}, {rooms['high']:+.3f}] (n={rooms['n']})"
                if rooms and rooms["low"] is not None
                else "",
            ]
        )
    by_seed = f"by seed {', '.join(map(str, found['seeds']))}"
    return _table(["arm", "before", "mean", "n", by_seed, f"difference to {found['reference']}", "rooms"], rows)


def _one_run(run: Mapping[str, Any]) -> str:
    unfinished = f"(at step {run['step']})" if run["step"] >= 0 else "(not begun)"
    mark = {"crashed": " (crashed)", "unfinished": unfinished}.get(run["state"], "")
    return f"{'' if run['value'] is None else _number(run['value'])}{mark}".strip() or "none"


def _costs(found: Mapping[str, Any]) -> str:
    """Means over the runs of an arm."""
    header = [
        "arm", "steps", "trajectories", "sampled tokens", "optimizer steps (critic)", "wall time", "evaluation",
        "clip by turn", "clip by token", "turn log-ratio std", "alarms (runs, first step)",
    ]  # fmt: skip
    rows = []
    for arm in found["arms"]:
        runs = list(arm["runs"].values())

        def mean(name, runs=runs):
            values = [run[name] for run in runs if run[name] is not None]
            return float(np.mean(values)) if values else None

        alarms: dict[str, list[int]] = {}
        for run in runs:
            for name, step in run["alarms"].items():
                alarms.setdefault(name, []).append(step)
        critic = mean("optimizer_steps_critic")
        rows.append(
            [
                arm["name"],
                _count(max(mean("step"), 0)),
                _count(mean("trajectories")),
                _count(mean("sampled_tokens")),
                _count(mean("optimizer_steps")) + (f" ({_count(critic)})" if critic else ""),
                _duration(mean("wall_time_s")),
                _duration(mean("eval_time_s")),
                _number(mean("clip_fraction_turn")),
                _number(mean("clip_fraction_token")),
                _number(mean("turn_log_ratio_std")),
                ", ".join(f"{name} ({len(steps)}/{len(runs)}, {min(steps)})" for name, steps in alarms.items())
                or "none",
            ]
        )
    return _table(header, rows)


def _settings(found: Mapping[str, Any]) -> str:
    names = [arm["name"] for arm in found["arms"]]
    rows = [[field, *(str(values[name]) for name in names)] for field, values in found["settings_that_differ"].items()]
    return _table(["setting", *names], rows)


def _interval(found: Mapping[str, Any] | None, *, sign: bool = False) -> str:
    if not found:
        return ""
    form = "{:+.3f}" if sign else "{:.3f}"
    if found["low"] is None:
        return form.format(found["mean"])
    return f"{form.format(found['mean'])} [{form.format(found['low'])}, {form.format(found['high'])}]"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 600
        else f"{seconds / 60:.0f} min"
        if seconds < 36000
        else f"{seconds / 3600:.1f} h"
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[text.replace("|", "\\|") for text in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["| " + " | ".join(text.ljust(width) for text, width in zip(row, widths)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])

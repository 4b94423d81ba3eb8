"""A whole comparison: checked, run, and written down anew whenever a run has ended."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

from turnppo_jax.command_line import UserError
from turnppo_jax.comparison import arms, markdown, picture, sweep, table
from turnppo_jax.comparison.records import read_run
from turnppo_jax.training.json_lines import write_atomically


def run_and_compare(
    comparison: arms.Comparison, out: pathlib.Path, command: str, say: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Runs what is missing and writes the comparison.

    Args:
      comparison: what is compared.
      out: its directory.
      command: that made it, for the table.
      say: takes what a person is told; None prints it.

    Returns:
      The comparison as JSON types, see `comparison.table.compare`.

    Raises:
      UserError: a wrong config, arms that cannot be compared, a directory that holds another run, an unknown metric.
    """
    say = say or (lambda line: print(line, flush=True))
    configs = {arm.name: arm.config(comparison.seeds[0]) for arm in comparison.arms}
    remarks = arms.check_comparable(configs)
    metric = _metric(comparison, configs[comparison.arms[0].name])
    runs = sweep.make_runs(comparison, out)
    for line in (*(f"note: {remark}" for remark in remarks), *sweep.warm_start_lines(runs)):
        say(line)
    out.mkdir(parents=True, exist_ok=True)

    def write() -> dict[str, Any]:
        records = {
            arm.name: {run.seed: read_run(run.directory, run.config) for run in runs if run.arm == arm}
            for arm in comparison.arms
        }
        found = table.compare(comparison, records, metric, remarks)
        text = markdown.to_markdown(found, command)
        write_atomically(out / "comparison.json", (json.dumps(found, indent=2) + "\n").encode())
        write_atomically(out / "comparison.md", text.encode())
        picture.draw(found, records, out / "comparison.png")
        return found

    sweep.run_all(runs, comparison.jobs, write, say)
    found = write()
    say(markdown.to_markdown(found, command))
    return found


def _metric(comparison: arms.Comparison, config: dict[str, Any]) -> str:
    """The metric by its whole name, refused before anything runs where no run could have it."""
    prefix = f"eval/{config['env']['id']}/"
    if comparison.metric is None:
        greedy = not config.get("evaluation", {}).get("samples", 1)
        return f"{prefix}{'greedy_' if greedy else ''}success_rate"
    if comparison.metric.startswith("eval/") and not comparison.metric.startswith(prefix):
        raise UserError(f"metric={comparison.metric!r}: evaluated metrics of these arms begin with {prefix!r}")
    return comparison.metric

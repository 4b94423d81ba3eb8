"""Where a run's numbers go: a JSON-lines file, TensorBoard, the console, Weights & Biases.

A number has one name, `area/name` with its unit in the name, in every place.
"""

import importlib
import math
import os
import pathlib
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tensorboardX import SummaryWriter

from turnppo_jax.training.json_lines import append_jsonl, jsonable


class MetricWriter:
    """A place for numbers. Outsiders add one by subclassing; this class itself drops everything."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records the numbers of a step; a step may come several times with different names.

        Args:
          step: the training step, 0 before the first update.
          metrics: number by name; 0-d arrays are numbers too.
        """

    def close(self) -> None:
        """Writes out what is pending. Nothing is logged after it."""


class JsonLinesWriter(MetricWriter):
    """One line of standard JSON for each `log`, on the disk when it returns.

    A NaN or infinity is null, and its name and kind stand under "non_finite", which other rows lack.
    """

    def __init__(self, path: str | os.PathLike):
        self._path = pathlib.Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends {"step": step, name: number, ...}."""
        row = {"step": int(step), **metrics}
        strange = {name: str(number) for name, number in _numbers(metrics).items() if not math.isfinite(number)}
        append_jsonl(self._path, [row | ({"non_finite": strange} if strange else {})])


class TensorBoardWriter(MetricWriter):
    """TensorBoard event files.

    Args:
      directory: where they go.
      first_step: events of an earlier, interrupted run after this step are hidden; None hides nothing.
    """

    def __init__(self, directory: str | os.PathLike, first_step: int | None = None):
        self._writer = SummaryWriter(os.fspath(directory), purge_step=None if first_step is None else first_step + 1)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds one scalar a name."""
        for name, number in _numbers(metrics).items():
            self._writer.add_scalar(name, number, int(step))
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


class WandbWriter(MetricWriter):
    """Weights & Biases; a resumed run continues the same curve.

    Raises:
      ValueError: the package wandb is not installed.
    """

    def __init__(self, workdir: str | os.PathLike, config: Mapping[str, Any] | None = None):
        try:
            wandb = importlib.import_module("wandb")
        except ImportError:
            raise ValueError("writer 'wandb' needs a package that is not installed: pip install wandb") from None
        workdir = pathlib.Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        identity = workdir / "wandb_run_id.txt"
        if not identity.exists():
            identity.write_text(secrets.token_hex(8))
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "turnppo_jax"),
            name=workdir.resolve().name,
            id=identity.read_text().strip(),
            resume="allow",
            dir=os.fspath(workdir),
            config=jsonable(dict(config or {})),
        )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Sends the numbers."""
        self._run.log(_numbers(metrics), step=int(step))

    def close(self) -> None:
        """Ends the run on the server."""
        self._run.finish()


# What a person wants to see of a step: the metric, its short name, its format.
_LINE = (
    ("episode/return_mean", "return", "{:7.3f}"),
    ("episode/success_rate", "success", "{:6.1%}"),
    ("policy/loss", "loss", "{:9.5f}"),
    ("policy/approx_kl", "kl", "{:8.5f}"),
    ("policy/clip_fraction_turn", "clip", "{:5.1%}"),
    ("policy/entropy", "entropy", "{:6.3f}"),
    ("value/explained_variance", "ev", "{:6.2f}"),
    ("time/rollout_s", "rollout", "{:.1f}s"),
    ("time/update_s", "update", "{:.1f}s"),
    ("sampler/tokens_per_s", "tok/s", "{:.0f}"),
)
_LONGEST = 8  # numbers in a line of a step that has none of the above


class ConsoleWriter(MetricWriter):
    """One readable line a step; on a terminal also a progress bar with the time left.

    Args:
      total_steps: the last step of the run, for the bar; None shows none.
      first_step: the step that a resumed run continues from.
      file: where to print, default standard output.
    """

    def __init__(self, total_steps: int | None = None, first_step: int | None = None, file: TextIO | None = None):
        self._file = sys.stdout if file is None else file
        self._total = total_steps
        self._progress = None
        if total_steps and self._file.isatty():
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=Console(file=self._file),
                # Steps take seconds to minutes; rich's default looks 30 s back and would forget the pace.
                speed_estimate_period=1800,
                refresh_per_second=1,
            )
            self._task = self._progress.add_task("", total=total_steps, completed=first_step or 0)
            self._progress.start()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Prints the line and moves the bar."""
        line = format_line(step, metrics, self._total)
        if self._progress is None:
            print(line, file=self._file, flush=True)
        else:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
            self._progress.update(self._task, completed=step)

    def close(self) -> None:
        """Leaves the bar as it stands."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class WriterGroup(MetricWriter):
    """Several writers as one."""

    def __init__(self, writers: Sequence[MetricWriter]):
        self._writers = list(writers)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Logs to each."""
        for writer in self._writers:
            writer.log(step, metrics)

    def close(self) -> None:
        """Closes each."""
        for writer in self._writers:
            writer.close()


def make_writer(
    names: Sequence[str],
    workdir: str | os.PathLike,
    *,
    config: Mapping[str, Any] | None = None,
    total_steps: int | None = None,
    first_step: int | None = None,
) -> MetricWriter:
    """Writers by name, as one.

    Args:
      names: of "jsonl" (`workdir/metrics.jsonl`), "tensorboard" (`workdir/tensorboard`), "console", "wandb".
      workdir: the run's directory.
      config: the finalised config, for writers that show it.
      total_steps: the last step of the run, where it is known.
      first_step: the step that a resumed run continues from, None for a run that starts.

    Raises:
      ValueError: an unknown name; lists the known ones.
    """
    workdir = pathlib.Path(workdir)
    makers = {
        "jsonl": lambda: JsonLinesWriter(workdir / "metrics.jsonl"),
        "tensorboard": lambda: TensorBoardWriter(workdir / "tensorboard", first_step),
        "console": lambda: ConsoleWriter(total_steps, first_step),
        "wandb": lambda: WandbWriter(workdir, config),
    }
    for name in names:
        if name not in makers:
            raise ValueError(f"unknown metric writer {name!r}; known: {sorted(makers)}")
    return WriterGroup([makers[name]() for name in names])


def format_line(step: int, metrics: Mapping[str, Any], total_steps: int | None = None) -> str:
    """The few numbers of a step that a person wants, in one line.

    Args:
      step: the training step.
      metrics: number by name; names ending in "success_rate" under "eval/" are shown too, and where nothing known is
        among them, the first few of what there is.
      total_steps: the last step of the run.
    """
    numbers = _numbers(metrics)
    parts = [f"{short} {form.format(numbers[name])}" for name, short, form in _LINE if name in numbers]
    for name, number in numbers.items():
        if name.startswith("eval/") and name.endswith("success_rate"):
            parts.append(f"{name.removesuffix('/success_rate')} {number:.1%}")
    if not parts:
        parts = [f"{name} {number:.5g}" for name, number in list(numbers.items())[:_LONGEST]]
    count = f"{step}/{total_steps}" if total_steps else f"{step}"
    return "  ".join([f"step {count}", *parts])


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The entries that are one number; text and lists go to the JSON-lines file alone."""
    numbers = {}
    for name, value in metrics.items():
        if isinstance(value, bool | int | float) or getattr(value, "shape", None) == ():
            numbers[name] = float(value)
    return numbers

"""Runs every arm with every seed as the real training command, each in a process of its own.

A run that is there and finished is not run again, one that was interrupted continues, one that crashes leaves the
others alone.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from turnppo_jax.comparison.arms import Arm, Comparison
from turnppo_jax.comparison.records import CRASHED, UNFINISHED, check_same_run, read_run
from turnppo_jax.training.json_lines import write_atomically

_TRAIN = "turnppo_jax.train"
_POLL_S = 0.2
_GRACE_S = 120.0  # a run that is told to stop finishes its update and saves
_STOPPED = (143, 130, -signal.SIGTERM, -signal.SIGINT)  # it was told to: no crash, it continues the next time


@dataclasses.dataclass
class Run:
    """One arm with one seed.

    Attributes:
      arm: what is run.
      seed: of the run.
      config: finalised.
      directory: of the run.
    """

    arm: Arm
    seed: int
    config: Mapping[str, Any]
    directory: pathlib.Path

    @property
    def start(self) -> pathlib.Path:
        """Where the run keeps its warm start."""
        return self.directory / "start"

    @property
    def warm_start_key(self) -> str | None:
        """Equal for runs whose warm starts are the same, None without one."""
        sft, env = self.config.get("sft", {}), self.config["env"]
        if not sft.get("steps", 0):
            return None
        return json.dumps([self.seed, self.config["model"], env["id"], env.get("kwargs", {}), sft], sort_keys=True)


def make_runs(comparison: Comparison, out: pathlib.Path) -> list[Run]:
    """Every run in the order in which they start: all arms of a seed before the next seed, so that pairs come first.

    Raises:
      UserError: a config that cannot be built, or a directory that holds a run of another.
    """
    runs = [
        Run(arm, seed, arm.config(seed), out / arm.name / f"seed{seed}")
        for seed in comparison.seeds
        for arm in comparison.arms
    ]
    for run in runs:
        check_same_run(run.directory, run.config)
    return runs


def warm_start_lines(runs: list[Run]) -> list[str]:
    """Who shares a warm start, for a person."""
    sharing: dict[str, list[Run]] = {}
    for run in runs:
        if run.warm_start_key is not None:
            sharing.setdefault(run.warm_start_key, []).append(run)
    return [
        f"seed {group[0].seed}  one warm start for {', '.join(run.arm.name for run in group)}"
        if len(group) > 1
        else f"seed {group[0].seed}  {group[0].arm.name} has a warm start of its own (other model, env or sft section)"
        for group in sharing.values()
    ]


def run_all(runs: list[Run], jobs: int, on_end: Callable[[], None], say: Callable[[str], None] = print) -> None:
    """Runs what is not finished, `jobs` at once.

    Args:
      runs: in the order in which they start.
      jobs: processes at once.
      on_end: called whenever a run has ended.
      say: takes a line for a person.
    """
    waiting = []
    for run in runs:
        record = read_run(run.directory, run.config)
        # What failed outside of training (memory, a full disk) may go well now.
        if record.state == UNFINISHED or (run.directory / "failed.json").exists():
            waiting.append(run)
        else:
            say(f"seed {run.seed}  {run.arm.name}: {record.state}{f': {record.why}' if record.why else ''}")
    running: dict[subprocess.Popen, tuple[Run, float]] = {}
    with _terminated_at_the_end(running):
        while waiting or running:
            for run in list(waiting):
                if len(running) < jobs and _may_start(run, [other for other, _ in running.values()]):
                    waiting.remove(run)
                    _take_warm_start(run, runs)
                    known = (run.directory / "metrics.jsonl").exists()
                    say(f"seed {run.seed}  {run.arm.name}: {'continues' if known else 'starts'} in {run.directory}")
                    running[_start(run)] = run, time.monotonic()
            time.sleep(_POLL_S)
            for process in [process for process in running if process.poll() is not None]:
                run, started = running.pop(process)
                say(f"seed {run.seed}  {run.arm.name}: {_outcome(run, process.returncode)}, "
                    f"{time.monotonic() - started:.0f} s")  # fmt: skip
                on_end()


def _may_start(run: Run, running: list[Run]) -> bool:
    """Not while another run makes the warm start that this one will take."""
    if run.warm_start_key is None or run.start.is_dir():
        return True
    makers = [other for other in running if other.warm_start_key == run.warm_start_key]
    return not makers or any(maker.start.is_dir() for maker in makers)


def _take_warm_start(run: Run, runs: list[Run]) -> None:
    """Takes over the warm start of another run that has made the same; whole or not at all."""
    if run.warm_start_key is None or run.start.is_dir():
        return
    for other in runs:
        if other.warm_start_key == run.warm_start_key and other.start.is_dir():
            unfinished = run.directory / "start.taken"
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.copytree(other.start, unfinished, copy_function=_link_or_copy)
            unfinished.rename(run.start)
            return


def _link_or_copy(source: str, target: str) -> None:
    """These files are written once and only read later: a second name is enough where the file system has them."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _start(run: Run) -> subprocess.Popen:
    run.directory.mkdir(parents=True, exist_ok=True)
    # So that a run stopped in its warm start is known to be of this config too.
    write_atomically(run.directory / "config.json", (json.dumps(run.config, indent=2) + "\n").encode())
    (run.directory / "failed.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", _TRAIN, *run.arm.flags(run.seed), f"--workdir={run.directory}"]
    with open(run.directory / "train.log", "ab") as log:
        # A session of its own: Ctrl-C reaches this process alone, which then stops its runs in order.
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def _outcome(run: Run, returncode: int) -> str:
    """How the run ended, for a person; a failure is kept in `failed.json`."""
    if returncode in _STOPPED:
        return "was stopped"
    if returncode != 0:
        log = (run.directory / "train.log").read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        ended = f"exit status {returncode}" if returncode > 0 else f"ended by signal {-returncode}"
        why = {"returncode": returncode, "why": f"{ended}: {lines[-1] if lines else 'no output'}"[:300]}
        write_atomically(run.directory / "failed.json", (json.dumps(why, indent=2) + "\n").encode())
    record = read_run(run.directory, run.config)
    return f"crashed: {record.why}" if record.state == CRASHED else record.state


@contextlib.contextmanager
def _terminated_at_the_end(running: Mapping[subprocess.Popen, Any]) -> Iterator[None]:
    """Whatever ends this process, SIGTERM and Ctrl-C included, its runs save what they have and end before it."""

    def leave(*_):
        sys.exit(143)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        signal.signal(signal.SIGTERM, previous)

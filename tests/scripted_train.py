"""Stands in for `turnppo_jax.train` in tests of the sweep: writes what a run leaves, as its learning rate says.

    actor_optimizer.learning_rate   1 .. 7: fails as named below; anything else: a run whose success is the rate

It keeps a file of when it began and ended, so that a test sees who ran at the same time.
"""

import json
import os
import pathlib
import signal
import sys
import time

CRASHES, FAILS, KILLED, WAITS, FAILS_ONCE = 1.0, 2.0, 3.0, 4.0, 5.0


def main() -> None:
    flags = dict(argument.removeprefix("--").partition("=")[::2] for argument in sys.argv[1:])
    workdir = pathlib.Path(flags["workdir"])
    config = json.loads((workdir / "config.json").read_text())
    kind = config["actor_optimizer"]["learning_rate"]
    began = time.monotonic()
    if config["sft"]["steps"] and not (workdir / "start").is_dir():
        time.sleep(0.5)  # longer than the sweep looks away
        (workdir / "start.unfinished").mkdir()
        (workdir / "start.unfinished" / "weights").write_text(f"made by {workdir.parent.name}")
        (workdir / "start.unfinished").rename(workdir / "start")
    if kind == FAILS or (kind == FAILS_ONCE and not (workdir / "failed_once").exists()):
        (workdir / "failed_once").touch()
        print("Traceback (most recent call last):\nMemoryError: out of memory", file=sys.stderr)
        sys.exit(1)
    if kind == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    steps = 2 if kind == CRASHES else config["steps"]
    with open(workdir / "metrics.jsonl", "w", encoding="utf-8") as file:
        for step in range(steps + 1):
            row = {"step": step, f"eval/{config['env']['id']}/success_rate": kind * (step > 0)}
            file.write(json.dumps(row) + "\n")
    if kind == WAITS:
        signal.signal(signal.SIGTERM, lambda *_: (print("saved"), sys.exit(143)))
        (workdir / "waits").touch()
        time.sleep(60)
    if kind == CRASHES:
        (workdir / "crashed.json").write_text(json.dumps({"step": 2, "why": "entropy_low: gone", "alarms": {}}))
    (workdir / "ran.json").write_text(json.dumps([began, time.monotonic()]))


if __name__ == "__main__":
    main()

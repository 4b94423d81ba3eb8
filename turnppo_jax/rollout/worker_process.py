"""One worker process as its parent sees it: lines out, lines in, never blocking, killed with all its children."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import envs

_READ_BYTES = 1 << 16  # what a pipe holds


class WorkerProcess:
    """A running `python -m envs.worker`, in a process group of its own.

    Requests are queued here and written as far as the pipe takes them, because a worker that is busy does
    not read: a blocking write could wait for a worker that itself waits for us to read.
    """

    def __init__(self, env_id: str, kwargs: dict[str, Any]):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "envs.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_worker_variables(),
            start_new_session=True,  # Ctrl-C in a terminal reaches the parent alone; one kill reaches all
            bufsize=0,
        )
        os.set_blocking(self._process.stdin.fileno(), False)
        os.set_blocking(self._process.stdout.fileno(), False)
        self._unsent, self._received = bytearray(), bytearray()
        self.send({"env_id": env_id, "kwargs": kwargs})

    @property
    def pid(self) -> int:
        """Process id of the worker, which is also the id of its process group."""
        return self._process.pid

    @property
    def reading_from(self) -> int:
        """The descriptor to wait on for replies."""
        return self._process.stdout.fileno()

    @property
    def writing_to(self) -> int | None:
        """The descriptor to wait on for room in the pipe; None when everything is sent."""
        return self._process.stdin.fileno() if self._unsent else None

    def send(self, message: dict[str, Any]) -> None:
        """Queues a message and writes what the pipe takes now."""
        self._unsent += json.dumps(message).encode("ascii") + b"\n"
        self.flush()

    def flush(self) -> None:
        """Writes what the pipe takes now. A broken pipe is left for `receive` to notice."""
        with contextlib.suppress(BrokenPipeError):
            while self._unsent:
                sent = self._process.stdin.write(self._unsent)
                if sent is None:  # the pipe is full
                    return
                del self._unsent[:sent]

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """What has arrived, without waiting.

        Returns:
          messages: complete ones, in order.
          alive: False once the worker is dead, has closed its end of the pipe, or wrote what is no message.
        """
        # Looked at before reading, so that what a worker said last is not lost.
        alive = not self._is_dead()
        while chunk := self._process.stdout.read(_READ_BYTES):
            self._received += chunk
        if chunk == b"":  # the end; None would mean that nothing has come yet
            alive = False
        *lines, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        messages = []
        for line in lines:
            try:
                messages.append(json.loads(line))
            except ValueError:
                return messages, False
        return messages, alive

    def close_input(self) -> None:
        """Tells the worker to close its environments and end."""
        self._unsent.clear()
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def kill(self, grace_s: float = 0.0) -> str:
        """Kills the whole process group and says how the worker ended.

        Args:
          grace_s: how long to wait for it to end by itself first.
        """
        deadline = time.monotonic() + grace_s
        while not self._is_dead() and time.monotonic() < deadline:
            time.sleep(0.005)
        # Before the process is reaped: until then its id cannot belong to anyone else.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self.close_input()
        self._process.stdout.close()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _is_dead(self) -> bool:
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return self._process.poll() is not None
        try:
            # Looks without reaping, see kill().
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # reaped by someone who waits for any child
            return True


def _worker_variables() -> dict[str, str]:
    """The environment variables of a worker: ours, on the CPU, importing from where we import."""
    variables = dict(os.environ)
    # A second process on an accelerator finds it taken. Workers need no jax; environments of others may import it.
    variables["JAX_PLATFORMS"] = "cpu"
    # Workers are the parallelism: a thread pool in each would only compete with the learner.
    variables.setdefault("OMP_NUM_THREADS", "1")
    # Modules are found where the parent finds them, in the same order, and in the current directory at last.
    package_root = str(pathlib.Path(envs.__file__).resolve().parent.parent)
    paths = [path or os.getcwd() for path in sys.path]
    variables["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*paths, package_root, os.getcwd()]))
    variables["PYTHONSAFEPATH"] = "1"
    return variables

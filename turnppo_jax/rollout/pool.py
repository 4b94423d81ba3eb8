"""Environments in worker processes, driven by index, answered in any order."""

import collections
import dataclasses
import json
import os
import selectors
import time
import weakref
from typing import Any

from envs import registry
from envs.worker import EnvHost
from turnppo_jax.rollout.worker_process import WorkerProcess

# How long a worker may take to import an environment and load its data, on top of the first reset.
START_TIMEOUT_S = 120.0
# The longest sleep while waiting for replies; a dead worker whose child holds the pipe open is noticed then.
_NAP_S = 0.5
# How long workers may take to close their environments at the end.
_CLOSE_GRACE_S = 2.0


class EnvStartError(ValueError):
    """No environment of the pool could be made: the settings are wrong, and no episode can succeed."""


@dataclasses.dataclass(frozen=True)
class EnvReply:
    """What an environment answered.

    Attributes:
      index: which environment.
      kind: "reset", "step" or "error". After an error the environment must be reset.
      observation, reward, terminated, truncated, info: as `envs.base.TextEnv` says; reward and flags are
        those of a step.
      instructions: the system prompt, with a reset.
      error: one line, with an error.
      timed_out: the error is a time limit.
    """

    index: int
    kind: str
    observation: str = ""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    instructions: str = ""
    error: str = ""
    timed_out: bool = False


@dataclasses.dataclass
class _Slot:
    """An environment as the pool knows it."""

    state: str = "idle"  # "idle" (to be reset), "playing", "ended" or "waiting" (a request is in flight)
    idle_reason: str = "it was never reset"
    made: bool = False  # exists in the worker that runs now


class _Worker:
    """A worker process that comes and goes, and the requests it owes answers to, oldest first."""

    def __init__(self):
        self.process: WorkerProcess | None = None
        self.requests: collections.deque[tuple[int, str, float]] = collections.deque()  # index, op, limit in seconds
        self.head_since = 0.0  # when the oldest request came to be the one worked on


class EnvPool:
    """`num_envs` environments of one kind, environment i in worker i mod `num_workers`.

    `reset` and `step` submit and return at once; `poll` gathers replies in whatever order they come. An
    environment has at most one request in flight.

    A worker works on its requests one after the other, so the clock of a request starts when the one before
    it is answered. A worker that dies, or hangs past a limit, is killed with all processes it started; every
    request in flight there is answered with an error; the other environments of the worker answer their next
    step with an error. The next reset starts a new worker. An environment that raises costs its own episode
    only. Errors in one place are never raised in another: the exception is `EnvStartError`, when not a single
    environment could be made.

    Args:
      env_id: registered id or "module:Class".
      env_kwargs: its arguments; must be JSON.
      num_envs: how many.
      num_workers: processes; 0 plays in this process, where no time limit can be enforced.
      reset_timeout_s, step_timeout_s: limits per request, wall clock. An environment's first reset in a
        worker may take `start_timeout_s` longer.

    Raises:
      ValueError: unknown id, arguments that are not JSON, or a number out of range.
    """

    def __init__(
        self,
        env_id: str,
        env_kwargs: dict[str, Any] | None,
        num_envs: int,
        num_workers: int,
        *,
        reset_timeout_s: float = 60.0,
        step_timeout_s: float = 60.0,
        start_timeout_s: float = START_TIMEOUT_S,
    ):
        registry.check_id(env_id)
        try:
            kwargs = json.loads(json.dumps(dict(env_kwargs or {})))
        except TypeError as error:
            raise ValueError(f"arguments of environment {env_id!r} must be JSON: {error}") from error
        if num_envs < 1 or num_workers < 0:
            raise ValueError(f"num_envs must be >= 1 and num_workers >= 0, got {num_envs} and {num_workers}")
        limits = {"reset_timeout_s": reset_timeout_s, "step_timeout_s": step_timeout_s}
        for name, value in (limits | {"start_timeout_s": start_timeout_s}).items():
            if not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")
        self._env_id, self._kwargs = env_id, kwargs
        self._limits = {"reset": reset_timeout_s, "step": step_timeout_s}
        self._start_timeout_s = start_timeout_s
        self._slots = [_Slot() for _ in range(num_envs)]
        self._ready: collections.deque[EnvReply] = collections.deque()
        self._answered: collections.deque[tuple[dict[str, Any], str]] = collections.deque()  # in this process
        self._ever_made = False
        self._num_starts = 0
        self._host = EnvHost(env_id, kwargs) if num_workers == 0 else None
        self._workers = [_Worker() for _ in range(min(num_workers, num_envs))]
        # Also runs when the pool is forgotten and at the end of the program; holds the workers, not the pool.
        self._finalizer = weakref.finalize(self, _close_all, os.getpid(), self._workers, self._host)
        for worker in self._workers:
            self._start(worker)

    @property
    def num_envs(self) -> int:
        """Environments of the pool; indices are 0..num_envs-1."""
        return len(self._slots)

    @property
    def num_in_flight(self) -> int:
        """Requests whose replies `poll` has not given out yet."""
        return sum(len(worker.requests) for worker in self._workers) + len(self._answered) + len(self._ready)

    @property
    def num_restarts(self) -> int:
        """Worker processes started beyond the first ones."""
        return self._num_starts - len(self._workers)

    def reset(self, index: int, seed: int) -> None:
        """Begins an episode in an environment, also in the middle of another.

        Raises:
          RuntimeError: a request is in flight there, or the pool is closed.
        """
        slot = self._slot(index)
        if slot.state == "waiting":
            raise RuntimeError(f"environment {index} has a request in flight; poll before the next one")
        limit = self._limits["reset"] + (0.0 if slot.made else self._start_timeout_s)
        self._submit(index, {"op": "reset", "index": index, "seed": int(seed)}, limit)

    def step(self, index: int, text: str) -> None:
        """Plays a turn in an environment.

        Raises:
          RuntimeError: a request is in flight there, its episode has ended, or the pool is closed. An episode
            lost with its worker is no such error: it is answered with an error reply.
        """
        slot = self._slot(index)
        if slot.state == "waiting":
            raise RuntimeError(f"environment {index} has a request in flight; poll before the next one")
        if slot.state == "ended":
            raise RuntimeError(f"the episode of environment {index} has ended; reset it before the next step")
        if slot.state == "idle":
            self._ready.append(EnvReply(index, "error", error=f"no episode to step: {slot.idle_reason}"))
            return
        self._submit(index, {"op": "step", "index": index, "text": text}, self._limits["step"])

    def poll(self, timeout_s: float | None = 0.0) -> list[EnvReply]:
        """Replies that have arrived.

        Args:
          timeout_s: how long to wait for the first one; 0 looks only, None waits as long as anything is in
            flight (which ends, by the limits). Returns at once when nothing is in flight.

        Raises:
          EnvStartError: making the very first environment failed.
          RuntimeError: the pool is closed.
        """
        self._check_open()
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while True:
            while self._answered:
                self._take(*self._answered.popleft())
            for worker in self._workers:
                self._serve(worker)
            if self._ready:
                replies = list(self._ready)
                self._ready.clear()
                return replies
            now = time.monotonic()
            busy = [worker for worker in self._workers if worker.requests]
            if not busy or now >= deadline:
                return []
            limits = [worker.head_since + worker.requests[0][2] for worker in busy]
            self._wait(busy, max(0.0, min(deadline, *limits, now + _NAP_S) - now))

    def close(self) -> None:
        """Ends every worker and whatever it started. May be called again."""
        self._finalizer()

    def __enter__(self) -> "EnvPool":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise RuntimeError("the environment pool is closed")

    def _slot(self, index: int) -> _Slot:
        self._check_open()
        if not 0 <= index < len(self._slots):
            raise IndexError(f"no environment {index}; the pool has {len(self._slots)}")
        return self._slots[index]

    def _submit(self, index: int, request: dict[str, Any], limit_s: float) -> None:
        self._slots[index].state = "waiting"
        if self._host is not None:
            self._answered.append((self._host.handle(request), request["op"]))
            return
        worker = self._workers[index % len(self._workers)]
        if worker.process is None:
            self._start(worker)
        if not worker.requests:
            worker.head_since = time.monotonic()
        worker.requests.append((index, request["op"], limit_s))
        worker.process.send(request)

    def _start(self, worker: _Worker) -> None:
        worker.process = WorkerProcess(self._env_id, self._kwargs)
        self._num_starts += 1

    def _serve(self, worker: _Worker) -> None:
        """Takes in what a worker said, then looks whether it still lives and keeps its limits."""
        if worker.process is None:
            return
        worker.process.flush()
        messages, alive = worker.process.receive()
        now = time.monotonic()
        for message in messages:
            _, op, _ = worker.requests.popleft()
            worker.head_since = now
            self._take(message, op)
        if not alive:
            self._lose(worker, "its worker process died ({end})", timed_out=False)
        elif worker.requests and now - worker.head_since >= worker.requests[0][2]:
            index, op, limit = worker.requests[0]
            self._lose(worker, f"{op} of environment {index} took longer than {limit:g} s", timed_out=True)

    def _take(self, message: dict[str, Any], op: str) -> None:
        """Turns a worker's message into a reply."""
        index = message["index"]
        slot = self._slots[index]
        if "error" in message:
            if message["stage"] == "make" and not self._ever_made:
                self.close()
                raise EnvStartError(f"cannot make environment {self._env_id!r}: {message['error']}")
            slot.state, slot.idle_reason, slot.made = "idle", "it raised in its last turn", False
            self._ready.append(EnvReply(index, "error", error=f"{op} raised {message['error']}"))
            return
        reply = EnvReply(kind=op, **message)
        self._ever_made = slot.made = True
        slot.state = "ended" if reply.terminated or reply.truncated else "playing"
        self._ready.append(reply)

    def _lose(self, worker: _Worker, reason: str, *, timed_out: bool) -> None:
        """Kills a worker and tells everyone who waits for it; those who do not wait learn at their next step."""
        # A worker whose pipe has just closed needs a moment to end, and then says with what code.
        end = worker.process.kill(0.0 if timed_out else 0.5)
        worker.process = None
        reason = reason.format(end=end)
        number = self._workers.index(worker)
        for slot in self._slots[number :: len(self._workers)]:
            slot.state, slot.idle_reason, slot.made = "idle", reason, False
        for position, (index, _, _) in enumerate(worker.requests):
            # Only the request worked on has timed out; those behind it never had their turn.
            late = timed_out and position == 0
            self._ready.append(EnvReply(index, "error", error=reason, timed_out=late))
        worker.requests.clear()

    @staticmethod
    def _wait(busy: list[_Worker], timeout_s: float) -> None:
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.process.reading_from, selectors.EVENT_READ)
                if worker.process.writing_to is not None:
                    selector.register(worker.process.writing_to, selectors.EVENT_WRITE)
            selector.select(timeout_s)


def _close_all(owner: int, workers: list[_Worker], host: EnvHost | None) -> None:
    # A forked copy of this program must not end the workers of the original.
    if os.getpid() != owner:
        return
    if host is not None:
        host.close()
    running = [worker for worker in workers if worker.process is not None]
    for worker in running:
        worker.process.close_input()
    deadline = time.monotonic() + _CLOSE_GRACE_S
    for worker in running:
        # One that is in the middle of a request may never look at its input again.
        grace = 0.0 if worker.requests else max(deadline - time.monotonic(), 0.0)
        worker.process.kill(grace)
        worker.process = None
        worker.requests.clear()

"""The body of a worker process: `python -m envs.worker`.

Requests come on stdin, replies go to stdout, one JSON object a line, in order. JSON is written with every
character outside ASCII escaped, so no text (line separators, NUL, lone surrogates) can break a line.

| request | reply |
|---|---|
| `{"op": "reset", "index", "seed"}` | `{"index", "observation", "info", "instructions"}` |
| `{"op": "step", "index", "text"}` | `{"index", "observation", "reward", "terminated", "truncated", "info"}` |
| either, when it fails | `{"index", "error", "stage"}`; stage is "make", "reset" or "step" |

The first line is `{"env_id", "kwargs"}`; one worker hosts any number of environments of that kind, each made
at its first reset. An environment that raised is thrown away and made anew at its next reset. The worker
ends when stdin does, or when the process that started it is gone.
"""

import json
import math
import os
import sys
import threading
import time
import traceback
from typing import Any

from envs import registry
from envs.base import TextEnv


class EnvHost:
    """Environments by index, driven by requests. Also used without a process, for `num_workers=0`."""

    def __init__(self, env_id: str, kwargs: dict[str, Any]):
        self._env_id, self._kwargs = env_id, kwargs
        self._envs: dict[int, TextEnv] = {}

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answers one request; whatever the environment raises or returns amiss becomes an error reply."""
        index, op = request["index"], request["op"]
        stage = op
        try:
            if op == "reset":
                if index not in self._envs:
                    stage = "make"
                    self._envs[index] = registry.make(self._env_id, **self._kwargs)
                    stage = op
                return self._reset(index, request["seed"])
            return self._step(index, request["text"])
        except (Exception, SystemExit) as error:
            self._discard(index)
            return {"index": index, "error": _one_line(error), "stage": stage}

    def close(self) -> None:
        """Closes every environment."""
        for index in list(self._envs):
            self._discard(index)

    def _reset(self, index: int, seed: int) -> dict[str, Any]:
        env = self._envs[index]
        observation, info = env.reset(seed)
        reply = {"index": index, "observation": observation, "info": info, "instructions": env.instructions}
        _check_text("observation", observation)
        _check_text("instructions", env.instructions)
        return reply | {"info": _checked_info(info)}

    def _step(self, index: int, text: str) -> dict[str, Any]:
        observation, reward, terminated, truncated, info = self._envs[index].step(text)
        _check_text("observation", observation)
        reward = float(reward)
        if not math.isfinite(reward):
            raise ValueError(f"reward must be finite, got {reward}")
        return {
            "index": index,
            "observation": observation,
            "reward": reward,
            "terminated": bool(terminated),
            "truncated": bool(truncated),
            "info": _checked_info(info),
        }

    def _discard(self, index: int) -> None:
        env = self._envs.pop(index, None)
        if env is not None:
            try:
                env.close()
            except Exception as error:
                print(f"environment {index}: close() raised {_one_line(error)}", file=sys.stderr)


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, got {type(value).__name__}")


def _checked_info(info: Any) -> dict[str, Any]:
    """The info as JSON gives it back, so that in-process and worker runs see the same."""
    if not isinstance(info, dict):
        raise TypeError(f"info must be a dict, got {type(info).__name__}")
    return json.loads(json.dumps(info, default=_plain))


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return value.tolist()
    raise TypeError(f"info holds a {type(value).__name__}, which JSON does not know")


def _one_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    text = " ".join(str(error).split()) or "no message"
    # Errors of ours say all they have to; for others the place is half of the story.
    place = "" if isinstance(error, ValueError) or not frames else f" ({frames[-1].name}, line {frames[-1].lineno})"
    return f"{type(error).__name__}: {text[:500]}{place}"


def _exit_with_parent() -> None:
    """Ends the worker, also in the middle of a step, once the process that started it is gone."""
    parent = os.getppid()

    def watch():
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Serves requests until stdin ends."""
    # The protocol moves to private descriptors: what the environment prints goes to stderr, what it reads is empty.
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    _exit_with_parent()
    start = json.loads(requests.readline() or b"null")
    if start is None:
        return
    host = EnvHost(start["env_id"], start["kwargs"])
    try:
        for line in requests:
            reply = host.handle(json.loads(line))
            replies.write(json.dumps(reply).encode("ascii") + b"\n")
            replies.flush()
    except BrokenPipeError:
        pass  # nobody reads any more: end like at the end of stdin
    finally:
        host.close()


if __name__ == "__main__":
    main()

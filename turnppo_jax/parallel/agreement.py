"""How hosts stop together: what went wrong on one is known to all before any waits in a collective that never ends.

Work that only one host does, or that can fail on one alone, stands between two collectives. At its end every host
says how it stands, and all of them go on or none.
"""

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator

import jax

from turnppo_jax.parallel.exchange import exchange


class HostError(RuntimeError):
    """Another host failed; the message names the host and its error."""


class StopRequested(Exception):
    """The run shall stop here; raised on every host at the same point."""


def agree(error: Exception | None = None, *, stop: bool = False, payload: bytes = b"") -> list[bytes]:
    """Says how this host stands and hears how the others do. Every host calls it, whatever happened to it.

    Args:
      error: what went wrong here; StopRequested counts as `stop`.
      stop: this host shall stop.
      payload: for the others; not read where anyone fails or stops.

    Returns:
      The payloads by process index.

    Raises:
      Exception: `error` itself, on the host that has one.
      HostError: another host has one.
      StopRequested: any host shall stop, and none failed.
    """
    stop = stop or isinstance(error, StopRequested)
    failed = error is not None and not isinstance(error, StopRequested)
    line = None if not failed else " ".join(f"{type(error).__name__}: {error}".split())[:2000]
    status = json.dumps({"error": line, "stop": stop}).encode()
    messages = exchange(len(status).to_bytes(4, "little") + status + (b"" if failed or stop else payload))
    sizes = [int.from_bytes(message[:4], "little") for message in messages]
    everyone = [json.loads(message[4 : 4 + size]) for message, size in zip(messages, sizes)]
    if failed:
        raise known_to_all(error)
    for index, other in enumerate(everyone):
        if other["error"] is not None:
            raise known_to_all(HostError(f"host {index} failed: {other['error']}"))
    if any(other["stop"] for other in everyone):
        raise known_to_all(StopRequested())
    return [message[4 + size :] for message, size in zip(messages, sizes)]


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Local work without collectives: when it fails on any host, every host raises at its end; see `agree`."""
    try:
        yield
    except Exception as error:
        agree(error)
        raise  # not reached: agree raises the error that it is given
    agree()


@contextlib.contextmanager
def failing_fast() -> Iterator[None]:
    """Ends this process at once on an error that the other hosts do not know of.

    They may be waiting in a collective. Leaving as usual would first wait for them, minutes long; a process that is
    gone is noticed.
    """
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:
        if jax.process_count() == 1 or getattr(error, "known_to_all_hosts", False):
            raise
        traceback.print_exc()
        print(f"host {jax.process_index()} ends at once: the others do not know of this error", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def known_to_all(error: Exception) -> Exception:
    """Marks an error that every host raises at the same point."""
    error.known_to_all_hosts = True
    return error

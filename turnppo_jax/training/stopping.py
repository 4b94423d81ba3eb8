"""Stopping on SIGTERM: a preempted machine gives about half a minute."""

import signal
import threading

from turnppo_jax.parallel.agreement import StopRequested


class StopSignal:
    """Remembers a SIGTERM; a second one ends the process as usual. A context manager.

    Outside the main thread, where Python allows no signal handlers, it never fires.
    """

    def __init__(self):
        self.requested = False
        self._previous = None

    def raise_if_requested(self, *_) -> None:
        """Raises StopRequested after a SIGTERM here; takes and ignores the arguments of a progress callback."""
        if self.requested:
            raise StopRequested

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *_) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)

    def _handle(self, *_) -> None:
        print("SIGTERM: the last finished step is saved, then this process ends", flush=True)
        self.requested = True
        signal.signal(signal.SIGTERM, self._previous)

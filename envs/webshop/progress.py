"""A progress bar on stderr for what takes longer than a moment."""

import sys
import time

_SILENT_S = 2.0  # what ends sooner needs no bar
_TERMINAL_S = 0.2  # between two states of the bar
_FILE_S = 30.0  # between two lines where stderr is no terminal
_WIDTH = 30


class Progress:
    """Shows how far one thing after another is.

    Args:
      title: begins every line.
      shown: False keeps silent.
    """

    def __init__(self, title: str, shown: bool = True):
        self._title, self._shown = title, shown
        self._terminal = sys.stderr.isatty()
        self._started = time.monotonic()
        self._next = self._started + _SILENT_S
        self._drawn = 0

    def show(self, stage: str, share: float) -> None:
        """Says that `stage` is done to this share, 0 to 1."""
        now = time.monotonic()
        if not self._shown or now < self._next:
            return
        self._next = now + (_TERMINAL_S if self._terminal else _FILE_S)
        bar = "█" * int(share * _WIDTH)
        self._write(f"{self._title}: {stage} {bar:░<{_WIDTH}} {share:4.0%}, {now - self._started:.0f} s")

    def end(self, result: str) -> None:
        """Replaces the bar by the result, where a bar was shown."""
        if self._drawn:
            self._write(f"{self._title}: {result}, {time.monotonic() - self._started:.0f} s")
            if self._terminal:
                print(file=sys.stderr, flush=True)

    def _write(self, line: str) -> None:
        if self._terminal:
            print(f"\r{line:<{self._drawn}}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)
        self._drawn = len(line)

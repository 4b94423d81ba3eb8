"""Reads one large JSON array or object entry by entry, so that no more than an entry is held at a time."""

import contextlib
import gzip
import io
import json
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

_CHUNK = 1 << 20  # characters read at once
# An entry of a well-formed file is far below this; a file that is not JSON is given up on here instead of being read
# to its end.
_LONGEST_ENTRY = 1 << 26
_SPACE = re.compile(r"[ \t\r\n]*")
_NUMBER_TO_END = re.compile(r"[0-9.eE+-]*\Z")
_DECODER = json.JSONDecoder()


def read_array(path: pathlib.Path, progress: Callable[[float], None] = lambda _: None) -> Iterator[Any]:
    """The entries of the JSON array in a file (plain or gzip, told by its first bytes), one by one.

    Args:
      path: of the file.
      progress: told the share of the file that is read, time and again.

    Raises:
      ValueError: the file cannot be read, or is not one JSON array; one line that names it.
    """
    with _open(path) as file:
        reader = _Reader(path, file, "array", progress)
        reader.begin("[")
        while reader.more("]"):
            yield reader.value()[0]


def read_object(path: pathlib.Path) -> Iterator[tuple[str, str]]:
    """The names of the JSON object in a file, and the text of the value behind each, which has been checked.

    Raises:
      ValueError: the file cannot be read, or is not one JSON object; one line that names it.
    """
    with _open(path) as file:
        reader = _Reader(path, file, "object", lambda _: None)
        reader.begin("{")
        while reader.more("}"):
            name, _ = reader.value()
            if not isinstance(name, str):
                reader.fail(f"{name!r} stands where a name should")
            reader.skip(":")
            yield name, reader.value()[1]


@contextlib.contextmanager
def _open(path: pathlib.Path) -> Iterator[BinaryIO]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    with file:
        yield file


class _Reader:
    """A window of the text that moves forward; `at` is the place in it, `before` how many characters came before it."""

    def __init__(self, path: pathlib.Path, file: BinaryIO, kind: str, progress: Callable[[float], None]):
        self.path, self.kind, self.progress = path, kind, progress
        self.stored = file
        self.size = max(path.stat().st_size, 1)
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        self.file = io.TextIOWrapper(gzip.GzipFile(fileobj=file) if packed else file, encoding="utf-8")
        self.text, self.at, self.before, self.ended, self.first = "", 0, 0, False, True

    def fail(self, what: str, error: Exception | None = None) -> None:
        where = self.before + self.at
        raise ValueError(f"{self.path} is not a JSON {self.kind}: {what} at character {where}") from error

    def _read(self) -> None:
        try:
            chunk = self.file.read(_CHUNK)
        except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
            self.fail(f"cannot be decoded ({error})", error)
        self.progress(self.stored.tell() / self.size)
        self.ended = not chunk
        self.before += self.at
        self.text, self.at = self.text[self.at :] + chunk, 0

    def _next(self) -> str:
        """The next character that is not white space; "" at the end."""
        while True:
            self.at = _SPACE.match(self.text, self.at).end()
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self._read()

    def skip(self, wanted: str) -> None:
        found = self._next()
        if found != wanted:
            self.fail(f"expected {wanted!r}, found {found!r}" if found else f"it ends where {wanted!r} was expected")
        self.at += 1

    def begin(self, opening: str) -> None:
        self.skip(opening)

    def more(self, closing: str) -> bool:
        """Moves to the next entry; false once the closing bracket has been passed and nothing follows it."""
        if self._next() == closing:
            self.at += 1
            if self._next():
                self.fail(f"text after the closing {closing!r}")
            return False
        if not self.first:
            self.skip(",")
        self.first = False
        return True

    def value(self) -> tuple[Any, str]:
        """The next value, and its text."""
        self._next()
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, self.at)
            except (json.JSONDecodeError, RecursionError) as error:
                if self.ended or len(self.text) - self.at > _LONGEST_ENTRY:
                    self.fail(getattr(error, "msg", "nested too deep"), error)
                self._read()
                continue
            # A number may go on in the next chunk; "-0." at its end is read as 0.
            if not self.ended and _NUMBER_TO_END.match(self.text, end):
                self._read()
                continue
            text = self.text[self.at : end]
            self.at = end
            return value, text

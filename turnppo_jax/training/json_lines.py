"""JSON that any reader accepts, in files of one object a line that survive `kill -9`.

A file only grows by whole lines, each written through to the disk. What a killed process leaves behind
is at worst one unfinished last line, which `read_jsonl` and `truncate_jsonl` drop.
"""

import json
import math
import os
import pathlib
import tempfile
from collections.abc import Iterable
from typing import Any

import numpy as np


def clean_text(text: str | bytes) -> str:
    """Text that UTF-8 can hold: lone surrogates and bytes that are no UTF-8 become U+FFFD."""
    if isinstance(text, bytes):
        return text.decode("utf-8", "replace")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def jsonable(value: Any) -> Any:
    """The nearest JSON value: scalars of 0-d arrays, lists of arrays and tuples, null of NaN and ±inf.

    Args:
      value: nested dicts, lists, tuples, numbers, text, None, numpy or jax arrays; anything else becomes its `str`.

    Returns:
      Nested dicts, lists, str, int, finite float, bool and None.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)  # also of an IntEnum
    if isinstance(value, str | bytes):
        return clean_text(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {clean_text(key if isinstance(key, str | bytes) else str(key)): jsonable(v) for key, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(item) for item in value]
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        array = np.asarray(value)
        if array.dtype.kind not in "biufOSU":  # bfloat16 and its like, which tolist() leaves as numpy scalars
            array = array.astype(np.float32)
        return jsonable(array.tolist())
    return clean_text(str(value))


def dumps(value: Any) -> str:
    """One line of standard JSON in ASCII, so that no reader splits it at U+2028 or trips over an encoding."""
    return json.dumps(jsonable(value), ensure_ascii=True, allow_nan=False, separators=(", ", ": "))


def append_jsonl(path: str | os.PathLike, rows: Iterable[Any]) -> None:
    """Appends one line a row and returns when they are on the disk."""
    with open(path, "ab") as file:
        file.write("".join(dumps(row) + "\n" for row in rows).encode("ascii"))
        flush_to_disk(file)


def read_jsonl(path: str | os.PathLike) -> list[Any]:
    """All rows of a file, without an unfinished last line.

    Raises:
      ValueError: a line other than the last is no JSON; names file and line.
    """
    return [row for row, _ in _parse(pathlib.Path(path))]


def truncate_jsonl(path: str | os.PathLike, step: int) -> int:
    """Cuts a file back to a step: drops every row with a larger "step", and an unfinished last line.

    The file is replaced in one move, so that a process killed here leaves the old file or the new one.

    Args:
      path: a file of JSON objects with an integer "step"; nothing happens where there is none.
      step: the last step to keep; -1 drops all.

    Returns:
      How many lines were dropped.

    Raises:
      ValueError: a line other than the last is no JSON or has no "step"; names file and line.
    """
    path = pathlib.Path(path)
    if not path.exists():
        return 0
    kept = []
    for number, (row, line) in enumerate(_parse(path), start=1):
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise ValueError(f"{path}:{number}: a row needs an integer 'step' to be cut back by, got {line[:80]!r}")
        if row["step"] <= step:
            kept.append(line)
    data = b"".join(line + b"\n" for line in kept)
    old = path.read_bytes()
    if data == old:
        return 0
    write_atomically(path, data)
    return len([line for line in old.split(b"\n") if line.strip()]) - len(kept)


def write_atomically(path: str | os.PathLike, data: bytes) -> None:
    """Replaces a file's content in one move: readers and crashes see the old content or the new, never a part."""
    path = pathlib.Path(path)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            flush_to_disk(file)
        os.chmod(name, 0o644)  # mkstemp makes it private
        os.replace(name, path)
    except BaseException:
        pathlib.Path(name).unlink(missing_ok=True)
        raise


def flush_to_disk(file: Any) -> None:
    """Returns when everything written to an open file has reached the disk."""
    file.flush()
    os.fsync(file.fileno())


def _parse(path: pathlib.Path) -> list[tuple[Any, bytes]]:
    """(row, its line without the newline) of every whole line."""
    # Only b"\n" ends a line: str.splitlines would also break at U+2028 and U+0085 inside text.
    *lines, rest = path.read_bytes().split(b"\n")
    if rest and _is_json(rest):  # whole but for its newline
        lines.append(rest)
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append((json.loads(line), line))
        except ValueError as error:
            if number == len(lines):
                continue  # a block of zeros or half a line that the file system kept after a crash
            raise ValueError(f"{path}:{number}: not JSON ({error}): {line[:80]!r}") from None
    return rows


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True

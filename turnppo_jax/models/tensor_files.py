"""Safetensors files: parts of tensors in, whole files out, without a file's contents ever being in memory.

A file is read through a memory map, whose pages the system may drop at any time; only the slices that are asked for
become memory of the process.
"""

import json
import math
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Dtypes that are written, and what the format calls them.
WRITTEN_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_CODES = {WRITTEN_DTYPES["float32"]: "F32", WRITTEN_DTYPES["bfloat16"]: "BF16"}


class TensorFiles:
    """The safetensors files of a directory, open for reading, with every tensor in exactly one of them."""

    def __init__(self, directory: pathlib.Path):
        self.directory = directory
        single, index = directory / SINGLE_FILE, directory / INDEX_FILE
        if single.is_file() and index.is_file():
            raise ValueError(f"{directory}: both {SINGLE_FILE} and {INDEX_FILE} are there; keep one")
        if single.is_file():
            paths, self._index = [single], None
        elif index.is_file():
            self._index = read_json(index, unique="tensor").get("weight_map")
            if not isinstance(self._index, dict) or not self._index:
                raise ValueError(f"{index}: field weight_map is missing or empty")
            paths = [directory / name for name in sorted(set(self._index.values()))]
        else:
            raise ValueError(f"{directory}: no {SINGLE_FILE} and no {INDEX_FILE}")
        for path in paths:
            if not path.is_file():
                raise ValueError(f"{directory}: shard {path.name} is named by {INDEX_FILE} and is missing")
        self._paths = paths

    def __enter__(self) -> "TensorFiles":
        self._home: dict[str, Any] = {}
        self._open: list[Any] = []
        for path in self._paths:
            try:
                file = safe_open(path, framework="numpy").__enter__()
            except SafetensorError as error:
                raise ValueError(f"{path}: not a whole safetensors file: {error}") from error
            self._open.append(file)
            for name in file.keys():  # noqa: SIM118 - a file of tensors is not iterable
                if name in self._home:
                    raise ValueError(f"{self.directory}: tensor {name} is doubled, again in {path.name}")
                if self._index is not None and self._index.get(name) != path.name:
                    raise ValueError(
                        f"{self.directory}: tensor {name} stands in {path.name}, but {INDEX_FILE} says "
                        f"{self._index.get(name)}"
                    )
                self._home[name] = file
        for name in self._index or ():
            if name not in self._home:
                raise ValueError(f"{self.directory}: tensor {name} is missing from shard {self._index[name]}")
        return self

    def __exit__(self, *exception: Any) -> None:
        for file in self._open:
            file.__exit__(*exception)

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._home)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor; from the header, nothing else is read."""
        return tuple(self._home[name].get_slice(name).get_shape())

    def read(self, name: str, slices: tuple[slice, ...]) -> np.ndarray:
        """A part of one tensor, in the dtype of the file: `tensor[slices]`, a slice with bounds for each axis."""
        return self._home[name].get_slice(name)[slices]


def write_tensors(
    path: pathlib.Path, dtype: np.dtype, tensors: Sequence[tuple[str, tuple[int, ...]]], blocks: Iterable[np.ndarray]
) -> None:
    """Writes one file, block by block: the bytes that safetensors itself writes for tensors in the order of names.

    Args:
      path: of the file. It is renamed into place, so that a reader never meets half a file.
      dtype: of every tensor; one of `WRITTEN_DTYPES`.
      tensors: (name, shape), sorted by name.
      blocks: contents one after another; a tensor may come in several blocks of rows, each of the dtype.

    Raises:
      ValueError: blocks of another dtype, or of more or fewer bytes than the shapes need.
    """
    # The metadata is what transformers asks for.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8
    partial = path.with_name(path.name + ".partial")
    written = 0
    with open(partial, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for block in blocks:
            if block.dtype != dtype:
                raise ValueError(f"{path}: a block of {block.dtype}; allowed: {dtype}")
            written += file.write(np.ascontiguousarray(block).view(np.uint8).data)
            del block  # before the next one is made
    if written != end:
        raise ValueError(f"{path}: {written} bytes of tensors; the shapes need {end}")
    os.replace(partial, path)


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a text file, renamed into place."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text + "\n")
    os.replace(partial, path)


def read_json(path: pathlib.Path, unique: str | None = None) -> dict[str, Any]:
    """A JSON file's object; with `unique` (a noun for messages) a key that stands twice is refused.

    Raises:
      ValueError: not JSON, or a doubled key; names the file.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        seen = dict(items)
        if unique and len(seen) != len(items):
            doubled = next(key for key, _ in items if sum(key == other for other, _ in items) > 1)
            raise ValueError(f"{path}: {unique} {doubled} is doubled")
        return seen

    try:
        return json.loads(path.read_text(), object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error

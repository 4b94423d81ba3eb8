"""Reading safetensors: a single file or the shards of an index, every tensor in exactly one of them."""

import json
import pathlib
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


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

    def read(self, name: str) -> np.ndarray:
        """One tensor."""
        return self._home[name].get_tensor(name)


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

"""Products in a file: each packed on its own, decoded when it is wanted."""

import dataclasses
import json
import pathlib
import zlib

import numpy as np

from envs.webshop.product import HumanInstruction, Product
from envs.webshop.search import mapped, mapped_bytes

_FIELDS = tuple(field.name for field in dataclasses.fields(Product))
_TEXTS = ("bullets", "attributes", "instruction_attributes", "title_nouns")
_EFFORT = 3  # of packing; more makes the file a few per cent smaller


def encode(product: Product) -> bytes:
    """A packed JSON array of the fields, in their order."""
    values = [getattr(product, name) for name in _FIELDS]
    people = [[human.instruction, human.attributes, human.options] for human in product.human_instructions]
    values[_FIELDS.index("human_instructions")] = people
    return zlib.compress(json.dumps(values, separators=(",", ":")).encode(), _EFFORT)


def decode(packed: bytes) -> Product:
    """The product that `encode` packed.

    Raises:
      ValueError: it was not.
    """
    try:
        fields = dict(zip(_FIELDS, json.loads(zlib.decompress(packed)), strict=True))
    except zlib.error as error:
        raise ValueError(f"not a packed product ({error})") from error
    for name in _TEXTS:
        fields[name] = tuple(fields[name])
    fields["prices"] = tuple(fields["prices"])
    fields["options"] = {name: tuple(values) for name, values in fields["options"].items()}
    fields["human_instructions"] = tuple(
        HumanInstruction(instruction, tuple(attributes), tuple(options))
        for instruction, attributes, options in fields["human_instructions"]
    )
    return Product(**fields)


class ProductWriter:
    """Appends products to products.bin; `finish` writes where each begins to products_ends.npy [N + 1] int64.

    The file is open inside a `with` block.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._file = (folder / "products.bin").open("wb")
        self._ends = [0]

    def __enter__(self) -> "ProductWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def add(self, product: Product) -> None:
        """The next product."""
        self._ends.append(self._ends[-1] + self._file.write(encode(product)))

    def finish(self) -> None:
        """Ends the file."""
        self._file.close()
        np.save(self._folder / "products_ends.npy", np.array(self._ends, np.int64))


class ProductFile:
    """The products of a folder, mapped."""

    def __init__(self, folder: pathlib.Path):
        self._packed = mapped_bytes(folder / "products.bin")
        self._ends = mapped(folder / "products_ends.npy")

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> Product:
        return decode(self._packed[self._ends[number] : self._ends[number + 1]])

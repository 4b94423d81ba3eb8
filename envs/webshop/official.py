"""Reads the files of the original WebShop: products, attributes with instructions, human instructions, title nouns."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator

from envs.webshop.json_stream import read_array, read_object
from envs.webshop.product import Product
from envs.webshop.records import field, make_product

_LONGEST_ASIN = 10
# A file of products from this size on, and so many of its records, take minutes to make a catalogue of.
_LARGE_BYTES = 100 << 20
_MANY_PRODUCTS = 100_000


@dataclasses.dataclass(frozen=True)
class OfficialFiles:
    """Which files make a catalogue, each JSON or gzipped JSON.

    Attributes:
      items: items_shuffle*.json, an array of product records.
      attributes: items_ins_v2*.json, an object from asin to attributes and machine-written instruction.
      human: items_human_ins.json, an object from asin to human instructions; None for a catalogue without them.
      nouns: an object from asin to the nouns of its title; None has them guessed (`nouns.py`), as are those of products
        that it does not name.
      num_products: how many records of `items` are read, counted as the original does before it drops any; None for
        all.
    """

    items: pathlib.Path
    attributes: pathlib.Path
    human: pathlib.Path | None = None
    nouns: pathlib.Path | None = None
    num_products: int | None = None

    def __post_init__(self):
        if self.num_products is not None and self.num_products < 1:
            raise ValueError(f"num_products must be at least 1 or None, got {self.num_products!r}")

    @property
    def name(self) -> str:
        """Begins the names of what is made from these files."""
        return self.items.name.split(".")[0]

    @property
    def is_large(self) -> bool:
        """Whether making a catalogue of them takes longer than an environment may take to begin."""
        many = self.num_products is None or self.num_products > _MANY_PRODUCTS
        return many and self.items.stat().st_size >= _LARGE_BYTES

    def key(self) -> dict[str, object]:
        """Path, size and time of change of each file, and the number of products."""
        key: dict[str, object] = {"num_products": self.num_products}
        for role in ("items", "attributes", "human", "nouns"):
            path = getattr(self, role)
            if path is not None:
                try:
                    state = path.stat()
                except OSError as error:
                    raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
                key[role] = [str(path.resolve()), state.st_size, state.st_mtime_ns]
        return key

    def products(self, progress: Callable[[float], None] = lambda _: None) -> Iterator[Product]:
        """`read_products`."""
        return read_products(self, progress)


_NAMES = {
    "items": "items_shuffle*.json",
    "attributes": "items_ins_v2*.json",
    "human": "items_human_ins*.json",
    "nouns": "title_nouns*.json",
}


def find_official_files(folder: pathlib.Path, num_products: int | None = None) -> OfficialFiles:
    """The official files in a folder, by their names; those of human instructions and nouns may be absent.

    Raises:
      ValueError: a file is absent, or there are several of a kind; one line that names the folder and them.
    """
    if not folder.is_dir():
        raise ValueError(f"catalogue folder {folder} does not exist")
    found: dict[str, pathlib.Path] = {}
    for role, name in _NAMES.items():
        paths = sorted([*folder.glob(name), *folder.glob(f"{name}.gz")])
        if len(paths) > 1:
            names = ", ".join(path.name for path in paths)
            raise ValueError(f"catalogue folder {folder} has several {name}: {names}; allowed: one of them")
        if not paths and role in ("items", "attributes"):
            raise ValueError(f"catalogue folder {folder} has no {name} (or .json.gz) and is no built catalogue")
        if paths:
            found[role] = paths[0]
    return OfficialFiles(**found, num_products=num_products)


def read_products(files: OfficialFiles, progress: Callable[[float], None] = lambda _: None) -> Iterator[Product]:
    """The products in the order of the file of items.

    As in the original: a record whose asin is "nan" or longer than ten characters is passed over, and so is one whose
    asin came before. One record is held at a time, and the unparsed text of the other files' entries still to come.

    Args:
      files: which.
      progress: told the share of the items that is read.

    Raises:
      ValueError: a file that is missing or not JSON, or a record that lacks a field; one line that names the file, the
        record and what was expected.
    """
    paths = {"attributes": files.attributes, "human": files.human, "nouns": files.nouns}
    others = {
        role: {asin: text.encode("utf-8", "surrogatepass") for asin, text in read_object(path)} if path else {}
        for role, path in paths.items()
    }
    seen = set()
    for number, record in enumerate(read_array(files.items, progress)):
        if number == files.num_products:
            return
        where = f"{files.items}: record {number}"
        asin = field(where, record, "asin", str)
        if asin == "nan" or len(asin) > _LONGEST_ASIN or asin in seen:
            continue
        seen.add(asin)
        where = f"{where} ({asin})"
        entries = {}
        for role, waiting in others.items():
            text = waiting.pop(asin, None)
            entries[role] = None if text is None else json.loads(text)
        yield make_product(record, **entries, where=where, places={r: f"{p}: {asin}" for r, p in paths.items()})

"""The catalogue that every WebShop environment of a machine reads: products by number and asin, and search."""

import functools
import hashlib
import json
import operator
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from envs.webshop.cached_folder import MANIFEST, built_folder, default_cache, fault
from envs.webshop.index_build import IndexWriter
from envs.webshop.official import OfficialFiles, find_official_files
from envs.webshop.product import Product, searched_text
from envs.webshop.progress import Progress
from envs.webshop.search import Index, mapped
from envs.webshop.storage import ProductFile, ProductWriter

# Of the files below, of the terms and of what makes products out of sources.
FORMAT = 2
_MOST_HITS = 50
_KEPT_PRODUCTS = 512
_KEPT_SEARCHES = 256
_LONGEST_KEPT = 2000  # characters of a query; longer ones are answered anew each time


class Source(Protocol):
    """What a catalogue is made from."""

    name: str

    def key(self) -> dict[str, object]:
        """What names the content, fit for JSON: another content, another key."""

    def products(self, progress: Callable[[float], None]) -> Iterator[Product]:
        """The products in their order, telling which share of the source is read."""


class Catalogue:
    """Products and search, read from a folder that any number of processes map together.

    Args:
      folder: made by `build` or `Catalogue.open`.

    Raises:
      ValueError: the folder is no whole catalogue of this format.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        folder = pathlib.Path(folder)
        wrong = fault(folder, {"format": FORMAT})
        if wrong:
            raise ValueError(f"catalogue folder {folder} {wrong}")
        self.folder = folder
        self._products = ProductFile(folder)
        self._index = Index(folder)
        self._asins = mapped(folder / "asins.npy")
        self._order = mapped(folder / "order.npy")
        self._decoded = functools.lru_cache(_KEPT_PRODUCTS)(self._products.__getitem__)
        self._searched = functools.lru_cache(_KEPT_SEARCHES)(self._search)

    @classmethod
    def open(
        cls,
        source: "Source | str | os.PathLike[str]",
        *,
        cache: str | os.PathLike[str] | None = None,
        progress: bool = True,
    ) -> "Catalogue":
        """The catalogue of a source, built where it was not before.

        Args:
          source: `OfficialFiles`, `Builtin`, or a folder: of a built catalogue, or with official files under their
            official names.
          cache: folder in which built catalogues lie; None for the user's cache.
          progress: show a bar on stderr where building takes longer.

        Raises:
          ValueError: a file is missing or broken, or the cache cannot be written; one line that names it.
        """
        if isinstance(source, (str, os.PathLike)):
            folder = pathlib.Path(source)
            if (folder / MANIFEST).exists():
                return cls(folder)
            source = find_official_files(folder)
        target, about = _place(source, cache)
        return cls(built_folder(target, about, functools.partial(write_catalogue, source, progress=progress)))

    @staticmethod
    def is_built(source: Source, *, cache: str | os.PathLike[str] | None = None) -> bool:
        """Whether `open` finds the catalogue of a source whole; arguments and errors as there."""
        return fault(*_place(source, cache)) is None

    def __len__(self) -> int:
        return len(self._products)

    def product(self, number: int) -> Product:
        """The product at a place of the source, from 0.

        Raises:
          IndexError: there is none.
        """
        number = operator.index(number)
        if not 0 <= number < len(self):
            raise IndexError(f"product {number} of a catalogue of {len(self)}")
        return self._decoded(number)

    def index(self, asin: str) -> int:
        """The place of the product with this asin, in upper or lower case; of the first where case alone differs.

        Raises:
          KeyError: there is none.
        """
        key = _key(asin)
        # numpy pads with zero bytes, so that a key that ends in one would equal the key without.
        if len(key) > self._asins.itemsize or key.endswith(b"\0"):
            raise KeyError(asin)
        place = int(np.searchsorted(self._asins, key))
        if place == len(self._asins) or self._asins[place] != key:
            raise KeyError(asin)
        return int(self._order[place])

    def search(self, text: str) -> list[int]:
        """The places of at most 50 products, best first; none where the text has no known term."""
        return list(self._searched(text) if len(text) <= _LONGEST_KEPT else self._search(text))

    def _search(self, text: str) -> list[int]:
        return self._order[self._index.best(text, _MOST_HITS)].tolist()


def write_catalogue(source: Source, folder: pathlib.Path, *, progress: bool = True) -> None:
    """Fills an empty folder with the files of a catalogue, one product in memory at a time.

    Besides those of `ProductWriter` and `IndexWriter`, for N products: asins.npy, their asins in upper case and UTF-8,
    sorted, zero-padded bytes [N]; order.npy int32 [N], the place of each in the source. Documents of the index are in
    this order, in which ties are broken.
    """
    bar = Progress("webshop catalogue", progress)
    keys = []
    with ProductWriter(folder) as products, IndexWriter(folder) as index:
        for product in source.products(functools.partial(bar.show, "reading")):
            products.add(product)
            index.add(searched_text(product))
            keys.append(_key(product.asin))
        if not keys:
            raise ValueError(f"{source.name}: no products, a catalogue needs at least one")
        products.finish()
        asins = np.array(keys)
        order = np.argsort(asins, kind="stable")
        np.save(folder / "asins.npy", asins[order])
        np.save(folder / "order.npy", order.astype(np.int32))
        index.finish(order, functools.partial(bar.show, "indexing"))
    bar.end(f"{len(keys):,} products in {folder.parent}")


def _place(source: Source, cache: str | os.PathLike[str] | None) -> tuple[pathlib.Path, dict[str, object]]:
    """Where the catalogue of a source is kept, and what its manifest says."""
    about = {"format": FORMAT, "source": source.key()}
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    return pathlib.Path(cache or default_cache()) / f"{source.name}-{digest}", about


def _key(asin: str) -> bytes:
    return asin.upper().encode("utf-8", "surrogatepass")


__all__ = ["Catalogue", "OfficialFiles", "Source", "write_catalogue"]

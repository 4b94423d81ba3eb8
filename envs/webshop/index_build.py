"""Builds the inverted index that `search.py` reads, in memory far below its size.

Documents come one at a time. Their terms are written to a temporary file as they come; once the number of documents of
each term is known, and the order of the documents, every posting is put where it belongs.
"""

import array
import json
import pathlib
from collections.abc import Callable

import numpy as np

from envs.webshop import bm25
from envs.webshop.tokens import make_analyzer

# Occurrences are kept in a byte; this one says that the number stands in the table of large ones.
MANY = 255
_FLUSHED_TOKENS = 1 << 20
_PLACED_POSTINGS = 1 << 21
_ANALYZER_CACHE = 1 << 19


class IndexWriter:
    """Takes documents by `add`, then writes the index by `finish`; its files are open inside a `with` block.

    Files of the index, for D documents in the order of ties, V terms in the order of their UTF-8 bytes, P postings:

      terms.bin, terms_ends.npy [V + 1] int64: the terms one after the other; where each begins, and the end.
      postings_ends.npy [V + 1] int64: where the postings of each term begin, and the end.
      documents.npy [P] int32: ascending for each term.
      occurrences.npy [P] uint8: f, or 255 where it is in the table: large_at.npy int64, large.npy int32.
      largest.npy [V] float32: the largest f · u of the term.
      lengths.npy [D] uint8: lengths in one byte.
      index.json: number of documents that have a term, their mean length.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._analyze = make_analyzer(_ANALYZER_CACHE)
        self._vocabulary: dict[str, int] = {}
        self._pending: list[int] = []
        self._pending_lengths: list[int] = []
        self._lengths = array.array("q")
        self._distinct = array.array("q")
        self._frequencies = np.zeros(0, np.int64)
        self._forward = [folder / "forward_terms.tmp", folder / "forward_occurrences.tmp"]
        self._files = [path.open("wb") for path in self._forward]

    def __enter__(self) -> "IndexWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files:
            file.close()

    def add(self, text: str) -> None:
        """The next document."""
        number = self._vocabulary.setdefault
        terms = [number(term, len(self._vocabulary)) for term in self._analyze(text)]
        self._pending += terms
        self._pending_lengths.append(len(terms))
        if len(self._pending) >= _FLUSHED_TOKENS:
            self._flush()

    def _flush(self) -> None:
        lengths = np.array(self._pending_lengths, np.int64)
        documents = np.repeat(np.arange(len(lengths)), lengths)
        keys, occurrences = np.unique(documents << 32 | np.array(self._pending, np.int64), return_counts=True)
        terms = keys & 0xFFFFFFFF
        self._files[0].write(terms.astype(np.int32).tobytes())
        self._files[1].write(occurrences.astype(np.int32).tobytes())
        self._lengths.extend(self._pending_lengths)
        self._distinct.extend(np.bincount(keys >> 32, minlength=len(lengths)).tolist())
        frequencies = np.bincount(terms, minlength=len(self._vocabulary))
        frequencies[: len(self._frequencies)] += self._frequencies
        self._frequencies = frequencies
        self._pending, self._pending_lengths = [], []

    def finish(self, order: np.ndarray, progress: Callable[[float], None] = lambda _: None) -> None:
        """Writes the index.

        Args:
          order: number of the document, counted as added, at each place of the order of ties; [D] int.
          progress: told the share of the postings that are placed.
        """
        self._flush()
        for file in self._files:
            file.close()
        new_numbers = self._write_terms()
        frequencies = np.zeros_like(self._frequencies)
        frequencies[new_numbers] = self._frequencies
        starts = _ends(frequencies)
        np.save(self._folder / "postings_ends.npy", starts)
        lengths = np.frombuffer(self._lengths, np.int64) if len(self._lengths) else np.zeros(0, np.int64)
        norms = bm25.quantised_lengths(lengths[order])
        np.save(self._folder / "lengths.npy", norms)
        documents = int(np.count_nonzero(lengths))
        mean = float(lengths.sum()) / max(documents, 1)
        (self._folder / "index.json").write_text(json.dumps({"num_documents": documents, "mean_length": mean}))
        self._place(order, new_numbers, starts, bm25.inverse_norms(mean or 1.0)[norms], progress)
        for path in self._forward:
            path.unlink()

    def _write_terms(self) -> np.ndarray:
        """Writes the terms in their order; the place of each by its number, [V]."""
        # Code points in order are UTF-8 bytes in order.
        terms = sorted(self._vocabulary)
        places = np.empty(len(terms), np.int64)
        sizes = np.empty(len(terms), np.int64)
        with (self._folder / "terms.bin").open("wb") as file:
            for place, term in enumerate(terms):
                sizes[place] = file.write(term.encode("utf-8", "surrogatepass"))
                places[self._vocabulary[term]] = place
        np.save(self._folder / "terms_ends.npy", _ends(sizes))
        self._vocabulary = {}
        return places

    def _place(self, order, new_numbers, starts, inverse_norms, progress) -> None:
        """Puts every posting in its place: documents in their order, a batch at a time."""
        total = int(starts[-1])
        documents = _output(self._folder / "documents.npy", np.int32, total)
        occurrences = _output(self._folder / "occurrences.npy", np.uint8, total)
        forward = [_input(path) for path in self._forward]
        largest = np.zeros(len(starts) - 1, np.float32)
        large_at, large = [], []
        distinct = np.frombuffer(self._distinct, np.int64) if len(self._distinct) else np.zeros(0, np.int64)
        first = _ends(distinct)[:-1]
        cursor = starts[:-1].copy()
        ends = np.cumsum(distinct[order])
        begin = 0
        while begin < len(order):
            done = int(ends[begin - 1]) if begin else 0
            end = max(begin + 1, int(np.searchsorted(ends, done + _PLACED_POSTINGS, side="right")))
            batch = order[begin:end]
            counts = distinct[batch]
            at = _ranges(first[batch], counts)
            terms = new_numbers[forward[0][at]]
            by_term = np.argsort(terms, kind="stable")
            terms = terms[by_term]
            numbers = np.repeat(np.arange(begin, end, dtype=np.int32), counts)[by_term]
            found = forward[1][at][by_term]
            runs = np.flatnonzero(np.diff(terms, prepend=-1))
            sizes = np.diff(runs, append=len(terms))
            places = _ranges(cursor[terms[runs]], sizes)
            documents[places] = numbers
            occurrences[places] = np.minimum(found, MANY)
            cursor[terms[runs]] += sizes
            if len(runs):
                highest = np.maximum.reduceat(found.astype(np.float32) * inverse_norms[numbers], runs)
                largest[terms[runs]] = np.maximum(largest[terms[runs]], highest)
            many = np.flatnonzero(found >= MANY)
            large_at.append(places[many])
            large.append(found[many])
            progress(int(ends[end - 1]) / max(total, 1))
            begin = end
        np.save(self._folder / "largest.npy", largest)
        large_at, large = np.concatenate([*large_at, []]).astype(np.int64), np.concatenate([*large, []])
        by_place = np.argsort(large_at)
        np.save(self._folder / "large_at.npy", large_at[by_place])
        np.save(self._folder / "large.npy", large[by_place].astype(np.int32))


def _ends(sizes: np.ndarray) -> np.ndarray:
    """0 and the running sums of `sizes` [n]; int64 [n + 1]."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """start, start + 1, … for each of `starts` [n], as many as `sizes` [n] says, one after the other."""
    return np.arange(sizes.sum()) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)


def _output(path: pathlib.Path, dtype: type, size: int) -> np.ndarray:
    # An empty array cannot be mapped.
    if size == 0:
        np.save(path, np.zeros(0, dtype))
        return np.zeros(0, dtype)
    return np.lib.format.open_memmap(path, "w+", dtype, (size,))


def _input(path: pathlib.Path) -> np.ndarray:
    return np.memmap(path, np.int32, "r") if path.stat().st_size else np.zeros(0, np.int32)

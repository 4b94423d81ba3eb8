"""Finds the documents with the best BM25 scores in a memory-mapped index.

Terms are taken in the order of the most that each can add. Once the terms that are left cannot lift a document that has
none of the earlier ones among the best, only the documents found so far that may still get there are looked up in
them (MaxScore; Turtle and Flood 1995). The answer is exact.
"""

import bisect
import collections
import json
import mmap
import pathlib

import numpy as np

from envs.webshop import bm25
from envs.webshop.index_build import MANY
from envs.webshop.tokens import make_analyzer

# Scores are rounded to float32 at the end, where documents that differ less than this can become equal.
_ROUNDING = 1e-6
# Where more than this share of the documents is found, going through the scores of all is faster.
_DENSE = 0.12


class Index:
    """An index in a folder, as `IndexWriter` leaves it; read-only, shared between processes by the page cache."""

    def __init__(self, folder: pathlib.Path):
        about = json.loads((folder / "index.json").read_text())
        self._num_documents = about["num_documents"]
        self._norms = bm25.inverse_norms(about["mean_length"] or 1.0)
        self._lengths = mapped(folder / "lengths.npy")
        self._terms = _Terms(mapped_bytes(folder / "terms.bin"), mapped(folder / "terms_ends.npy"))
        self._ends = mapped(folder / "postings_ends.npy")
        self._documents = mapped(folder / "documents.npy")
        self._occurrences = mapped(folder / "occurrences.npy")
        self._largest = mapped(folder / "largest.npy")
        self._large_at = mapped(folder / "large_at.npy")
        self._large = mapped(folder / "large.npy")
        self._analyze = make_analyzer()
        # Arrays of a score a document, all 0, that no search is using: making one takes longer than most searches.
        self._idle: list[np.ndarray] = []

    def best(self, text: str, count: int) -> list[int]:
        """The documents that share a term with `text`, best first, equal ones in their order; at most `count`."""
        terms = self._query(text)
        if not terms:
            return []
        # What all terms from each place on can add at most.
        rests = np.cumsum([most for most, _, _ in terms][::-1])[::-1].tolist() + [0.0]
        scores = self._idle.pop() if self._idle else np.zeros(len(self._lengths))
        found, num_found, highest, used, threshold = [], 0, 0.0, 0, 0.0
        for _, weight, term in terms:
            documents, added = self._postings(term, weight)
            before = scores[documents]
            after = before + added
            scores[documents] = after
            new = before == 0  # every summand is positive
            found.append(documents[new])
            num_found += len(found[-1])
            highest = max(highest, float(after.max()))
            used += 1
            if num_found >= count and rests[used] < highest:
                # Any documents give a bound from below; those with several terms give one that is nearly as high as
                # all would, and are fewer.
                several = after[~new]
                bounding = several if len(several) >= count else after
                if len(bounding) >= count:
                    threshold = max(threshold, _kth_largest(bounding, count))
                if rests[used] < threshold * (1 - _ROUNDING):
                    break
        lowest = threshold * (1 - _ROUNDING) - rests[used]
        candidates, totals = self._at_least(lowest, scores, found, num_found)
        self._idle.append(scores)
        for place in range(used, len(terms)):
            candidates, totals = _may_rise(candidates, totals, rests[place], count)
            _, weight, term = terms[place]
            hit, added = self._look_up(term, weight, candidates)
            totals[hit] += added
        candidates, totals = _may_rise(candidates, totals, 0.0, count)
        rounded = totals.astype(np.float32)
        return candidates[np.lexsort((candidates, -rounded))[:count]].tolist()

    def _at_least(
        self, lowest: float, scores: np.ndarray, found: list[np.ndarray], num_found: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The documents found that score `lowest` or more, ascending, and their scores; sets `scores` back to 0."""
        # Ascending, so that look-ups move forward through memory.
        if num_found > len(scores) * _DENSE:
            candidates = np.flatnonzero(scores >= lowest) if lowest > 0 else np.flatnonzero(scores)
            totals = scores[candidates]
            scores[:] = 0
            return candidates.astype(np.int32), totals
        candidates = np.concatenate(found)
        totals = scores[candidates]
        scores[candidates] = 0
        candidates, totals = candidates[totals >= lowest], totals[totals >= lowest]
        by_number = np.argsort(candidates)
        return candidates[by_number], totals[by_number]

    def _query(self, text: str) -> list[tuple[float, np.float32, int]]:
        """For each known term: the most that it can add, its weight, its number; those that can add most come first."""
        terms = []
        for name, count in collections.Counter(self._analyze(text)).items():
            term = self._terms.find(name)
            if term is not None:
                frequency = int(self._ends[term + 1] - self._ends[term])
                weight = bm25.term_weight(count, frequency, self._num_documents)
                terms.append((float(bm25.term_scores(weight, self._largest[term])), weight, term))
        return sorted(terms, key=lambda term: (-term[0], term[2]))

    def _postings(self, term: int, weight: np.float32) -> tuple[np.ndarray, np.ndarray]:
        """The documents of a term and what it adds to each."""
        begin, end = int(self._ends[term]), int(self._ends[term + 1])
        documents = self._documents[begin:end]
        occurrences = self._occurrences[begin:end].astype(np.float32)
        first, last = np.searchsorted(self._large_at, (begin, end))
        if last > first:
            occurrences[self._large_at[first:last] - begin] = self._large[first:last]
        return documents, self._added(weight, occurrences, documents)

    def _look_up(self, term: int, weight: np.float32, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of the ascending `documents` have a term, by their places, and what it adds to each."""
        begin, end = int(self._ends[term]), int(self._ends[term + 1])
        postings = self._documents[begin:end]
        places = np.searchsorted(postings, documents)
        places[places == len(postings)] = 0
        hit = np.flatnonzero(postings[places] == documents)
        places = places[hit] + begin
        occurrences = self._occurrences[places].astype(np.float32)
        many = np.flatnonzero(occurrences == MANY)
        if len(many):
            occurrences[many] = self._large[np.searchsorted(self._large_at, places[many])]
        return hit, self._added(weight, occurrences, documents[hit])

    def _added(self, weight: np.float32, occurrences: np.ndarray, documents: np.ndarray) -> np.ndarray:
        return bm25.term_scores(weight, occurrences * self._norms[self._lengths[documents]])


def _kth_largest(values: np.ndarray, k: int) -> float:
    return float(np.partition(values, len(values) - k)[len(values) - k])


def _may_rise(candidates: np.ndarray, totals: np.ndarray, rest: float, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Those that can still be among the best `count` if every one may gain up to `rest`."""
    if len(candidates) <= count:
        return candidates, totals
    kept = totals + rest >= _kth_largest(totals, count) * (1 - _ROUNDING)
    return candidates[kept], totals[kept]


class _Terms:
    """A sorted list of terms, for a look-up."""

    def __init__(self, text: bytes | mmap.mmap, ends: np.ndarray):
        self._text = text
        self._ends = memoryview(ends)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, place: int) -> bytes:
        return self._text[self._ends[place] : self._ends[place + 1]]

    def find(self, term: str) -> int | None:
        name = term.encode("utf-8", "surrogatepass")
        place = bisect.bisect_left(self, name)
        return place if place < len(self) and self[place] == name else None


def mapped(path: pathlib.Path) -> np.ndarray:
    """The array in a .npy file, mapped."""
    # An empty array cannot be mapped; a plain view is faster than numpy's class for mapped ones.
    stored = np.load(path, mmap_mode="r") if path.stat().st_size > 128 else np.load(path)
    return stored.view(np.ndarray)


def mapped_bytes(path: pathlib.Path) -> bytes | mmap.mmap:
    """The content of a file, mapped."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""

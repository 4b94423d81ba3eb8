"""Which goal a seed gets: training and evaluation goals kept apart by product.

The original splits its shuffled goals by index. The goals of a product differ in an option or two, so that most
products of one side stand on the other as well, and ten of 415 products make two fifths of all goals. By default
products are held out instead, by a hash of their asin, which a larger catalogue does not change.

| split | goal of a seed |
|---|---|
| `train` | of a product that is not held out; drawn as `sampling` says |
| `eval` | of a held-out product: number seed mod n, each product (sentence) once before any comes again |
| `all` | number seed mod n in the original's order |
| `official-test`, `official-eval`, `official-train` | the same among goals 0 to 499, 500 to 1,499, from 1,500 |

What is left of an official range where a catalogue has fewer goals is taken; nothing left is an error.
"""

import functools
import hashlib
import random

import numpy as np

from envs.webshop.goals import GoalTable

OFFICIAL = {"official-test": (0, 500), "official-eval": (500, 1500), "official-train": (1500, None)}
SPLITS = ("train", "eval", "all", *OFFICIAL)
SAMPLINGS = ("product", "goal", "weight")


class Split:
    """The goals of a split.

    Args:
      table: of all goals.
      split: one of `SPLITS`.
      eval_fraction: expected share of products that are held out, in (0, 1); at least one is, and at least one not.
      sampling: how `train` draws: "product" (all products alike, then any of its goals), "goal" (all goals alike),
        "weight" (in proportion to the original's weights).

    Raises:
      ValueError: an argument out of range, or a split without goals; one line.
    """

    def __init__(self, table: GoalTable, split: str, eval_fraction: float, sampling: str):
        check(split, eval_fraction, sampling)
        self._table, self._split = table, split
        if split not in ("train", "eval"):
            begin, end = OFFICIAL.get(split, (0, None))
            end = len(table) if end is None else min(end, len(table))
            if end <= begin:
                raise ValueError(
                    f"split={split!r} is empty: it begins at goal {begin} and the catalogue has {len(table)}; "
                    "allowed: train, eval or all"
                )
            self._begin, self._size = begin, end - begin
            return
        held_out, by_hash = _held_out(table.numbers.asins.tolist(), eval_fraction)
        self._rows = by_hash[held_out[by_hash] == (split == "eval")]
        counts = table.numbers.counts[self._rows]
        self._size = int(counts.sum())
        # Goals that are given once every row has given so many.
        self._round_ends = np.cumsum(len(counts) - np.searchsorted(np.sort(counts), np.arange(counts.max()), "right"))
        self._cumulative = np.cumsum(_mass(table, self._rows, sampling))

    def __len__(self) -> int:
        """How many goals there are."""
        return self._size

    def place(self, seed: int) -> tuple[int, int]:
        """Row and number of the goal of a seed; any whole number is a seed."""
        if self._split == "train":
            draws = random.Random(_hash(f"train|{seed}"))
            at = np.searchsorted(self._cumulative, draws.random() * self._cumulative[-1], "right")
            row = int(self._rows[min(int(at), len(self._rows) - 1)])
            return row, int(draws.random() * self._table.numbers.counts[row])
        number = seed % self._size
        if self._split != "eval":
            return self._table.place(self._begin + number)
        turn = int(np.searchsorted(self._round_ends, number, "right"))
        number -= int(self._round_ends[turn - 1]) if turn else 0
        row = int(self._rows[self._table.numbers.counts[self._rows] > turn][number])
        return row, _scattered(row, int(self._table.numbers.counts[row]))[turn]


def check(split: str, eval_fraction: float, sampling: str) -> None:
    """Raises ValueError for an argument of `Split` that is out of range."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
    if not 0 < eval_fraction < 1:
        raise ValueError(f"eval_fraction must lie between 0 and 1, got {eval_fraction!r}")
    if sampling not in SAMPLINGS:
        raise ValueError(f"unknown sampling {sampling!r}; known: {', '.join(SAMPLINGS)}")


def _held_out(asins: list[str], eval_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Whether the product of each row is held out, and the rows in the order of their products' hashes."""
    hashes = np.array([_hash(asin.upper()) for asin in asins], np.uint64)
    distinct = np.unique(hashes)
    if len(distinct) < 2:
        raise ValueError("split: a single product has goals, which cannot be split; allowed: all")
    limit = int(eval_fraction * 2.0**64)
    # The neighbours of the limit move over where a side would be empty.
    limit = min(max(limit, int(distinct[0]) + 1), int(distinct[-1]))
    return hashes < np.uint64(limit), np.argsort(hashes, kind="stable")


def _mass(table: GoalTable, rows: np.ndarray, sampling: str) -> np.ndarray:
    """[R'] how often each row is drawn, up to a factor."""
    if sampling == "product":
        _, product, rows_of_product = np.unique(table.numbers.rows[rows], return_inverse=True, return_counts=True)
        return 1.0 / rows_of_product[product]
    mass = table.numbers.counts[rows].astype(float)
    return mass * table.numbers.weights[rows] if sampling == "weight" else mass


@functools.lru_cache(maxsize=1024)
def _scattered(row: int, count: int) -> list[int]:
    """The order in which a row gives its goals: each once, neighbours (which differ in one value) apart."""
    order = list(range(count))
    random.Random(_hash(f"eval|{row}")).shuffle(order)
    return order


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")

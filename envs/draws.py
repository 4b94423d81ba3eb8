"""Random numbers that are a function of what they are drawn for, the same in every process."""

import hashlib
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def draws_for(*parts: object) -> random.Random:
    """A generator of its own for each sequence of parts (text, whole numbers)."""
    digest = hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=16).digest()
    return random.Random(int.from_bytes(digest, "big"))


def choose(draws: random.Random, options: Sequence[T]) -> T:
    """One of the options, by a single `random()`: the other methods of `Random` may change with Python."""
    return options[int(draws.random() * len(options))]

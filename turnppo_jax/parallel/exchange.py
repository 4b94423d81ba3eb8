"""Bytes from every host to every host, by collectives whose number and shapes all hosts agree on.

How long the longest message is becomes known first, and all are padded to it, so that hosts with different amounts to
say run the same programs.
"""

import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

_LENGTH = 8  # bytes of the length in front of a message
_SHORT = 4096 - _LENGTH  # bytes of a message that go with its length, in one collective
_PIECE = 1 << 20  # bytes of a message in a later one; every device holds so many of every host


def exchange(message: bytes) -> list[bytes]:
    """The messages of all hosts, by process index. Every host calls it, in the same order as its other collectives."""
    if jax.process_count() == 1:
        return [message]
    head = _padded(len(message).to_bytes(_LENGTH, "little") + message[:_SHORT], _LENGTH + _SHORT)
    heads = multihost_utils.process_allgather(head)
    lengths = [int.from_bytes(row[:_LENGTH].tobytes(), "little") for row in heads]
    parts = [row[_LENGTH:].tobytes() for row in heads]
    longest = max(lengths) - _SHORT
    piece = min(_bucket(longest), _PIECE)
    for start in range(_SHORT, _SHORT + longest, piece):
        some = multihost_utils.process_allgather(_padded(message[start : start + piece], piece))
        parts = [part + row.tobytes() for part, row in zip(parts, some)]
    return [part[:length] for part, length in zip(parts, lengths)]


def exchange_json(value: Any) -> list[Any]:
    """The values of all hosts (JSON types), by process index; see `exchange`."""
    return [json.loads(message) for message in exchange(json.dumps(value).encode())]


def _padded(message: bytes, size: int) -> np.ndarray:
    out = np.zeros(size, np.uint8)
    out[: len(message)] = np.frombuffer(message, np.uint8)
    return out


def _bucket(length: int) -> int:
    """A power of two: each length is a program to compile, and a run meets a handful of powers."""
    return 1 << max(length - 1, _SHORT).bit_length()

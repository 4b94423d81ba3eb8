"""Conversations to imitate: encoded, packed into rows of fixed shape.

A row holds whole conversations one after another (first fit), each a segment of its own, so that what the
model sees of a conversation is what it would see of it alone.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from turnppo_jax.rollout.chat import Chat

# Rows that still take conversations while packing: beyond these the fullest is closed. It bounds the time.
_OPEN_ROWS = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DemonstrationBatch:
    """Conversations packed into `B` rows of `T` tokens with `A` imitated tokens at most."""

    tokens: Any  # [B, T] int32
    positions: Any  # [B, T] int32, restart at 0 with each conversation
    segment_ids: Any  # [B, T] int32, 1.. per row; 0 = padding
    sampled_positions: Any  # [B, A] int32, column of each imitated token in order (its log-prob is read before it); -1


@dataclasses.dataclass(frozen=True)
class Demonstration:
    """One encoded conversation.

    Attributes:
      ids: [n] int32.
      action_mask: [n] bool, True on the tokens to imitate.
    """

    ids: np.ndarray
    action_mask: np.ndarray


@dataclasses.dataclass(frozen=True)
class RowShape:
    """Shape of a batch.

    Attributes:
      rows: B.
      tokens: T.
      sampled: A.
    """

    rows: int
    tokens: int
    sampled: int

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name}={getattr(self, field.name)} of a batch of rows; allowed: at least 1")


def encode_demonstrations(chat: Chat, conversations: Iterable[Sequence[dict]]) -> list[Demonstration]:
    """Encodes conversations as rollouts would have built them; see `Chat.encode_messages`."""
    return [Demonstration(*chat.encode_messages(messages)) for messages in conversations]


def drop_long(demonstrations: Sequence[Demonstration], max_tokens: int) -> tuple[list[Demonstration], int]:
    """Those that fit a row of `max_tokens`, and how many do not. None is ever cut.

    Raises:
      ValueError: none fits (or there is none at all).
    """
    kept = [demonstration for demonstration in demonstrations if len(demonstration.ids) <= max_tokens]
    if not kept:
        longest = max((len(demonstration.ids) for demonstration in demonstrations), default=0)
        raise ValueError(
            f"none of {len(demonstrations)} demonstrations fits in row_tokens={max_tokens} (the longest has {longest})"
        )
    return kept, len(demonstrations) - len(kept)


def sampled_capacity(demonstrations: Sequence[Demonstration], row_tokens: int) -> int:
    """A good `RowShape.sampled`: what a full row of average demonstrations needs and a quarter, or the longest one."""
    imitated = [int(demonstration.action_mask.sum()) for demonstration in demonstrations]
    share = sum(imitated) / sum(len(demonstration.ids) for demonstration in demonstrations)
    return min(row_tokens, -(-max(*imitated, int(1.25 * share * row_tokens), 1) // 8) * 8)


def pack_rows(demonstrations: Iterable[Demonstration], shape: RowShape) -> Iterator[list[Demonstration]]:
    """First-fit packing into rows of at most `shape.tokens` tokens and `shape.sampled` imitated ones.

    Yields:
      The demonstrations of one row, all together each exactly once.

    Raises:
      ValueError: a demonstration fits no row, or imitates its first token (no token before it predicts it).
    """
    rows: list[list] = []  # [demonstrations, tokens, imitated tokens]
    for demonstration in demonstrations:
        tokens, sampled = len(demonstration.ids), int(demonstration.action_mask.sum())
        if tokens > shape.tokens or sampled > shape.sampled:
            raise ValueError(
                f"a demonstration of {tokens} tokens, {sampled} of them imitated, does not fit in a row of "
                f"{shape.tokens} and {shape.sampled}"
            )
        if tokens and demonstration.action_mask[0]:
            raise ValueError("a demonstration imitates its first token, but nothing before it predicts it")
        for row in rows:
            if row[1] + tokens <= shape.tokens and row[2] + sampled <= shape.sampled:
                break
        else:
            if len(rows) == _OPEN_ROWS:
                yield rows.pop(max(range(len(rows)), key=lambda index: rows[index][1]))[0]
            row = [[], 0, 0]
            rows.append(row)
        row[0].append(demonstration)
        row[1] += tokens
        row[2] += sampled
    for row, _, _ in rows:
        yield row


def make_batch(rows: Sequence[Sequence[Demonstration]], shape: RowShape, pad_id: int = 0) -> DemonstrationBatch:
    """Arrays of packed rows; rows that are missing are padding, which counts nothing.

    Raises:
      ValueError: more rows than the shape has.
    """
    if len(rows) > shape.rows:
        raise ValueError(f"{len(rows)} rows do not fit in a batch of {shape.rows}")
    tokens = np.full((shape.rows, shape.tokens), pad_id, np.int32)
    positions, segment_ids = np.zeros_like(tokens), np.zeros_like(tokens)
    sampled_positions = np.full((shape.rows, shape.sampled), -1, np.int32)
    for index, row in enumerate(rows):
        start, filled = 0, 0
        for segment, demonstration in enumerate(row, start=1):
            length = len(demonstration.ids)
            columns = slice(start, start + length)
            tokens[index, columns] = demonstration.ids
            positions[index, columns] = np.arange(length)
            segment_ids[index, columns] = segment
            sampled = start + np.flatnonzero(demonstration.action_mask)
            sampled_positions[index, filled : filled + len(sampled)] = sampled
            start, filled = start + length, filled + len(sampled)
    return DemonstrationBatch(tokens, positions, segment_ids, sampled_positions)


def endless_batches(
    demonstrations: Sequence[Demonstration], shape: RowShape, seed: int, pad_id: int = 0
) -> Iterator[DemonstrationBatch]:
    """Full batches without end, a new order in each pass; a pure function of the arguments.

    Rows left over at the end of a pass open the next pass, so that no demonstration is skipped.

    Raises:
      ValueError: there are no demonstrations, or one does not fit.
    """
    if not demonstrations:
        raise ValueError("there are no demonstrations to train on")
    rows: list[list[Demonstration]] = []
    for epoch in range(2**31):
        order = np.random.default_rng((seed, epoch)).permutation(len(demonstrations))
        for row in pack_rows((demonstrations[index] for index in order), shape):
            rows.append(row)
            if len(rows) == shape.rows:
                yield make_batch(rows, shape, pad_id)
                rows = []

"""The grid of the ragged attention kernel: which block of which slot each of its steps multiplies with which row.

It is no rectangle of rows and blocks but a list of live (row, block) pairs, made from the positions and as long as
there are such pairs: a short row costs no more than it holds, and a slot that rests reads nothing.

The list is cut into two halves of the rows, because v4 and v5p chips have two cores with half of the memory
bandwidth each; elsewhere the halves run one after the other.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

LANES = 128
# Queries of the same keys in a grid step: at 512 the multiplier, not the memory, is the limit of prefill, and the
# float32 scores of a block of 512 take 1 MiB of the 16 MiB of VMEM that every TPU since v4 grants.
_MOST_QUERIES_OF_KEYS = 512
# Of all heads: with heads of 128 their float32 sums, peaks and totals take 3 MiB.
_MOST_QUERIES = 2048
# Keys and values that a grid step is worth: fetching them takes .6 us at the 820 GB/s of a v5e, twice the .3 us that
# public measurements put on a step whatever it fetches.
_STEP_BYTES = 512 << 10
# Blocks of a slot at least: half of the last one is read for nothing on average, a sixteenth of a slot then.
_LEAST_BLOCKS = 8


class Schedule(NamedTuple):
    """The grid as a list of items, in halves of E / halves places; the scalars that the kernel reads.

    From here on a row is a tile: as many consecutive queries of a row as stay in the kernel together.

    Attributes:
      totals: [halves] items of each half.
      rows: [E] row of each item; places behind the last item repeat it.
      shift: [R] added to an item's place in its half gives the item's block of the slot.
      slots: [R] the slot that a row reads. A row without anything to read points at what the row before it read last,
        which the pipeline does not fetch again.
      first: [R] position of the first query.
      last: [R] position of the last query, -1 where there is none.
    """

    totals: jax.Array
    rows: jax.Array
    shift: jax.Array
    slots: jax.Array
    first: jax.Array
    last: jax.Array


def joined_heads(kv_heads: int, head_dim: int) -> int:
    """Key/value heads that share the 128 lanes of a row of memory: as many as fit and divide them evenly."""
    return max(count for count in range(1, max(1, LANES // head_dim) + 1) if kv_heads % count == 0)


def ragged_block(kv_heads: int, head_dim: int, capacity: int, dtype: jnp.dtype) -> int:
    """Positions of a block: 128 times the power of two that makes a grid step worth its cost, in slots long enough.

    Args:
      kv_heads: of the cache of one device, joined ones as one.
      head_dim: of the cache, a multiple of 128.
      capacity: positions of a slot.
      dtype: of the cache.
    """
    worth = _STEP_BYTES // (2 * kv_heads * head_dim * jnp.dtype(dtype).itemsize)
    most = min(worth, 512, capacity // _LEAST_BLOCKS) // LANES
    return LANES << max(0, most.bit_length() - 1)


def make_schedule(k: jax.Array, slots: jax.Array | None, positions: jax.Array, heads: int) -> Schedule:
    """What `ragged_attend` reads: blocks 0..last // P of every row in order, in two halves of an even number of rows.

    The same for all layers. A row with nothing to read has one item all the same, so that its output is written.

    Args:
      k: [L, C / P, S, Nkv / J, P, H] the cache's keys, of which the shape alone is used.
      slots: [R] int32; outside 0..S-1 (-1) is a dummy row; None: R = S and row r reads slot r.
      positions: [R, Q] int32; consecutive from the first of the row on, then -1 (padding) to the end.
      heads: N, query heads.
    """
    num_blocks, num_slots, stacks, block = k.shape[1:5]
    tile = queries_of_tile(positions.shape[1], heads, stacks)
    positions = jnp.pad(positions, ((0, 0), (0, -positions.shape[1] % tile)), constant_values=-1)
    slots = jnp.arange(positions.shape[0], dtype=jnp.int32) if slots is None else slots
    slots = jnp.repeat(slots, positions.shape[1] // tile)
    positions = positions.reshape(-1, tile)
    last = jnp.where((slots >= 0) & (slots < num_slots), jnp.max(positions, axis=1), -1)

    halves = 2 if slots.shape[0] % 2 == 0 else 1
    rows = slots.shape[0] // halves

    def by_half(x):
        # Even rows and odd ones: slots that rest often lie side by side, and the longer half sets the time.
        return x.reshape(rows, halves).T

    def by_row(x):
        return x.T.reshape(-1)

    ends = jnp.cumsum(by_half(jnp.maximum(last, 0) // block + 1), axis=1, dtype=jnp.int32)  # [halves, rows]
    starts = jnp.pad(ends, ((0, 0), (1, 0)))[:, :-1]
    place = jnp.arange(rows * num_blocks, dtype=jnp.int32)
    # The row of an item is the number of rows that end at or before it: comparisons alone, no search and no gather.
    row = jnp.sum(ends[:, None, :] <= place[None, :, None], axis=2, dtype=jnp.int32)
    row = jnp.minimum(row, rows - 1) * halves + jnp.arange(halves, dtype=jnp.int32)[:, None]
    index = by_half(jnp.arange(last.shape[0], dtype=jnp.int32))
    # The row itself, or the last one before it in its half that reads.
    before = by_row(jax.lax.cummax(jnp.where(by_half(last) >= 0, index, -1), axis=1))
    known = jnp.maximum(before, 0)
    return Schedule(
        totals=ends[:, -1],
        rows=row.reshape(-1),
        shift=jnp.where((last >= 0) | (before < 0), 0, last[known] // block) - by_row(starts),
        slots=jnp.where(before < 0, 0, slots[known]),
        first=positions[:, 0],
        last=last,
    )


def queries_of_tile(count: int, heads: int, stacks: int) -> int:
    """The largest power of two that fits a grid step, no more than there are.

    Args:
      count: Q, queries of a row.
      heads: N, query heads.
      stacks: keys that are multiplied together, Nkv / J of them.
    """
    fitting = max(1, min(_MOST_QUERIES // heads, _MOST_QUERIES_OF_KEYS * stacks // heads))
    return min(1 << (fitting.bit_length() - 1), 1 << (count - 1).bit_length())

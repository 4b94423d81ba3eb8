"""Point writes into a key/value cache on TPU, in place, at the price of the tiles that the positions lie in.

The compiler's scatter walks the updates one by one, with a round trip to memory for each. A Pallas kernel that owns
the cache (its outputs are its inputs) has all of them on the way at once. Memory moves in tiles of a few positions,
so a tile that is written in part is read first.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# VMEM for the merged keys of the rows of one grid step. With the values, and with both as float32 in the pipeline's two
# buffers, it is ten times as much, of the 16 MiB that every TPU since v4 grants.
_STEP_BYTES = 1 << 20


class Spans(NamedTuple):
    """The positions that each row writes; the same for all layers.

    Attributes:
      slots: [R] slot.
      first: [R] the first position.
      end: [R] one behind the last position; 0 where there is none.
    """

    slots: jax.Array
    first: jax.Array
    end: jax.Array


def make_spans(k: jax.Array, slots: jax.Array | None, positions: jax.Array) -> Spans:
    """What `ragged_write` writes.

    Args:
      k: [L, C / P, S, Nkv, P, H] the cache's keys.
      slots: [R] int32, different from one another; outside 0..S-1 (-1: dummy row) nothing is written; None: R = S and
        row r is slot r.
      positions: [R, Q] int32; consecutive from the first of the row on, then -1 (padding) to the end. What lies past
        the last block is not written.
    """
    num_blocks, num_slots, block = k.shape[1], k.shape[2], k.shape[4]
    slots = jnp.arange(positions.shape[0], dtype=jnp.int32) if slots is None else slots
    end = jnp.minimum(jnp.max(positions, axis=1) + 1, num_blocks * block)
    return Spans(
        slots=slots,
        first=jnp.maximum(positions[:, 0], 0),
        end=jnp.where((slots >= 0) & (slots < num_slots), end, 0),
    )


def ragged_write(
    k: jax.Array,
    v: jax.Array,
    layer: jax.Array,
    spans: Spans,
    new_k: jax.Array,
    new_v: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The cache with `new_k[r, q]`, `new_v[r, q]` at position `first[r] + q` of slot `slots[r]`.

    Args:
      k: [L, C / P, S, Nkv / J, P, H'] keys, P a multiple of 128: J heads side by side, then zeros.
      v: [L, C / P, S, Nkv / J, P, H'].
      layer: scalar int32.
      spans: from `make_spans` of the positions of the new keys.
      new_k: [R, Q, Nkv, H].
      new_v: [R, Q, Nkv, H].
      interpret: emulate the kernel, slowly, on any device.

    Returns:
      (k, v), in the memory of the arguments where these are donated or carried by a loop.
    """
    rows, count = new_k.shape[:2]
    kv_heads, _, lanes = k.shape[3:]
    tile = tile_positions(k.dtype)
    tiles = -(-(count - 1) // tile) + 1  # that so many positions can touch
    step = max(1, min(rows, _STEP_BYTES // (kv_heads * tiles * tile * lanes * k.dtype.itemsize)))
    dummies = -rows % step
    scalars = [jnp.pad(x, (0, dummies)) for x in spans]

    def fresh(x):
        """[R, Nkv / J, 1, H'], or float32 [R, Nkv / J, tile + Q + tile, H']: a tile may reach before and behind."""
        x = jnp.swapaxes(x.astype(k.dtype).reshape(rows, count, kv_heads, -1), 1, 2)
        x = jnp.pad(x, ((0, dummies), (0, 0), (0, 0), (0, lanes - x.shape[-1])))
        return x if count == 1 else jnp.pad(x.astype(jnp.float32), ((0, 0), (0, 0), (tile, tile), (0, 0)))

    new_k, new_v = fresh(new_k), fresh(new_v)
    new = pl.BlockSpec((step, *new_k.shape[1:]), lambda at, *_: (at, 0, 0, 0))
    whole = pl.BlockSpec(memory_space=pl.ANY)
    merged = pltpu.VMEM((step, kv_heads, tiles * tile, lanes), k.dtype)
    return pl.pallas_call(
        functools.partial(_kernel, tile=tile),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=((rows + dummies) // step,),
            in_specs=[new, new, whole, whole],
            out_specs=[whole, whole],
            scratch_shapes=[merged, merged, pltpu.SemaphoreType.DMA],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
        input_output_aliases={6: 0, 7: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        name="ragged_write",
        interpret=interpret,
    )(layer.reshape(1), *scalars, new_k, new_v, k, v)


def tile_positions(dtype: jnp.dtype) -> int:
    """Positions of a tile of memory: the rows of 128 lanes that a TPU keeps together, 8 of 4 bytes or 16 of 2."""
    return 32 // jnp.dtype(dtype).itemsize


def _kernel(
    layer_ref, slots_ref, first_ref, end_ref, new_k_ref, new_v_ref, _k, _v, k_ref, v_ref, merged_k_ref, merged_v_ref,
    semaphore, *, tile,
):  # fmt: skip
    """Merges the new positions of a few rows into their tiles; all copies of a direction are on the way together."""
    step, _, width, _ = merged_k_ref.shape
    block = k_ref.shape[4]
    tiles, base = width // tile, pl.program_id(0) * step

    def each_tile(visit):
        """`visit(row, first, end, start, pairs)` for the tiles that hold a new position.

        `start` is a tile's first position; pairs are (tile of the cache, place of the tile in VMEM, new positions).
        """

        @pl.loop(0, step * tiles)
        def _(index):
            local = jax.lax.div(index, tiles)
            row = base + local
            first, end = first_ref[row], end_ref[row]
            at = jax.lax.rem(index, tiles) * tile
            start = jax.lax.div(first, tile) * tile + at

            @pl.when(start < end)
            def _():
                offset = pl.ds(pl.multiple_of(jax.lax.rem(start, block), tile), tile)
                here = (local, slice(None), pl.ds(pl.multiple_of(at, tile), tile))
                # A single position is spread over the tile; of several, the tile's are loaded from wherever they
                # begin, which registers of 4-byte elements alone can do.
                rows = slice(None) if new_k_ref.shape[2] == 1 else pl.ds(tile + start - first, tile)
                new = (local, slice(None), rows)
                there = (layer_ref[0], jax.lax.div(start, block), slots_ref[row], slice(None), offset)
                visit(
                    first,
                    end,
                    start,
                    [
                        (k_ref.at[there], merged_k_ref.at[here], new_k_ref.at[new]),
                        (v_ref.at[there], merged_v_ref.at[here], new_v_ref.at[new]),
                    ],
                )

    def when_partial(first, end, start, action):
        pl.when((start < first) | (start + tile > end))(action)

    def read(first, end, start, pairs):
        @functools.partial(when_partial, first, end, start)
        def _():
            for cached, merged, _ in pairs:
                pltpu.make_async_copy(cached, merged, semaphore).start()

    def wait_read(first, end, start, pairs):
        @functools.partial(when_partial, first, end, start)
        def _():
            for cached, merged, _ in pairs:
                pltpu.make_async_copy(cached, merged, semaphore).wait()

    def merge(first, end, start, pairs):
        for cached, merged, new in pairs:
            position = start + jax.lax.broadcasted_iota(jnp.int32, merged.shape, 1)
            merged[...] = jnp.where((position >= first) & (position < end), new[...].astype(merged.dtype), merged[...])
            pltpu.make_async_copy(merged, cached, semaphore).start()

    def wait_written(first, end, start, pairs):
        for cached, merged, _ in pairs:
            pltpu.make_async_copy(merged, cached, semaphore).wait()

    # One semaphore counts bytes, not copies: only when all have arrived is it known that a certain one has.
    for visit in (read, wait_read, merge, wait_written):
        each_tile(visit)

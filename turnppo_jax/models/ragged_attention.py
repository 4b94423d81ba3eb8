"""Attention of new queries to a key/value cache on TPU, reading the live blocks of each row's slot and no others.

One Pallas kernel serves decoding (a query a row) and continued prefill (up to a piece of the prompt a row, at an
offset of its own). The pipeline of its grid (`ragged_schedule`) fetches the next block, of the next row too, while one
is multiplied; all query heads of a key/value head, and several queries of a row, are one matrix.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from turnppo_jax.models.precision import matmul_precision
from turnppo_jax.models.ragged_schedule import LANES, Schedule, queries_of_tile

_SUBLANES = 8


def ragged_attend(
    k: jax.Array,
    v: jax.Array,
    layer: jax.Array,
    schedule: Schedule,
    q: jax.Array,
    kv_heads: int,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Attention of the queries of each row to positions 0..their own of the row's slot.

    Args:
      k: [L, C / P, S, Nkv / J, P, H'] rotated keys, P and H' multiples of 128: J heads side by side, then zeros. What
        lies beyond a row's positions may be anything.
      v: [L, C / P, S, Nkv / J, P, H'].
      layer: scalar int32.
      schedule: from `ragged_schedule.make_schedule` of the positions of `q`.
      q: [R, Q, N, H] rotated queries; head n reads key/value head n // (N / Nkv).
      kv_heads: Nkv.
      interpret: emulate the kernel, slowly, on any device.

    Returns:
      [R, Q, N, H] in the dtype of q. Zeros in dummy rows; padding behind a query is finite and means nothing.

    Raises:
      ValueError: P or H' is no multiple of 128.
    """
    rows, count, heads, head_dim = q.shape
    stacks, block, lanes = k.shape[3:]  # a stack: keys that are multiplied together
    for name, size in (("block", block), ("head size", lanes)):
        if size % LANES:
            raise ValueError(f"cache {name}={size}; allowed with attention='ragged': a multiple of {LANES}")
    joined, group, tile = kv_heads // stacks, heads // stacks, queries_of_tile(count, heads, stacks)
    q = _spread(q, kv_heads, joined)
    q = jnp.pad(q, ((0, 0), (0, -count % tile), (0, 0), (0, lanes - q.shape[-1])))
    tiles = q.shape[1] // tile
    out = _call(schedule, layer, _group(q, stacks, tile), k, v, tile=tile, scale=head_dim**-0.5, interpret=interpret)
    out = out[:, :, : group * tile].reshape(rows, tiles, stacks, group, tile, lanes).transpose(0, 1, 4, 2, 3, 5)
    out = out.reshape(rows, tiles * tile, heads, lanes)[:, :count]
    return _own_part(out[..., : joined * head_dim], kv_heads, joined)


def _spread(q: jax.Array, kv_heads: int, joined: int) -> jax.Array:
    """[..., N, H] -> [..., N, J * H]: a query where its head's keys stand, zeros against those beside them."""
    if joined == 1:
        return q
    parts = jnp.where(_part(q.shape[-2], kv_heads, joined), q[..., None, :], 0)  # [..., N, J, H]
    return parts.reshape(*q.shape[:-1], joined * q.shape[-1])


def _own_part(out: jax.Array, kv_heads: int, joined: int) -> jax.Array:
    """[..., N, J * H] -> [..., N, H]: of what joined values gave, that of the head's own."""
    if joined == 1:
        return out
    parts = out.reshape(*out.shape[:-1], joined, out.shape[-1] // joined)
    return jnp.sum(jnp.where(_part(out.shape[-2], kv_heads, joined), parts, 0), axis=-2)


def _part(heads: int, kv_heads: int, joined: int) -> jax.Array:
    """[N, J, 1] bool: which of the joined key/value heads a query head reads."""
    own = jnp.arange(heads) // (heads // kv_heads) % joined
    return (own[:, None] == jnp.arange(joined))[..., None]


def _group(q: jax.Array, stacks: int, tile: int) -> jax.Array:
    """[R, tiles * tile, N, H] -> [R * tiles, stacks, M, H]: the queries of the same keys are one matrix.

    Query p of head g of the group is row g * tile + p of M, which is filled up to whole registers.
    """
    rows, length, heads, head_dim = q.shape
    group, tiles = heads // stacks, length // tile
    q = q.reshape(rows, tiles, tile, stacks, group, head_dim).transpose(0, 1, 3, 4, 2, 5)
    q = q.reshape(rows * tiles, stacks, group * tile, head_dim)
    return jnp.pad(q, ((0, 0), (0, 0), (0, -q.shape[2] % _SUBLANES), (0, 0)))


def _call(schedule, layer, q, k, v, *, tile, scale, interpret):
    """The kernel over queries [R, stacks, M, H]; returns their attention, of the same shape."""
    stacks, matrix, head_dim = q.shape[1:]
    halves, block = schedule.totals.shape[0], k.shape[4]
    width = schedule.rows.shape[0] // halves
    num_scalars = len(schedule) + 1

    def of_row(half, item, totals, rows, *_):
        row, _ = _item(half, item, totals, rows, width)
        return row, 0, 0, 0

    def of_block(half, item, totals, rows, shift, slots, first, last, layer):
        row, place = _item(half, item, totals, rows, width)
        return layer[0], place + shift[row], slots[row], 0, 0, 0

    cache_spec = pl.BlockSpec((None, None, None, stacks, block, head_dim), of_block)
    row_spec = pl.BlockSpec((None, stacks, matrix, head_dim), of_row)
    column = pltpu.VMEM((stacks, matrix, 1), jnp.float32)
    return pl.pallas_call(
        functools.partial(_kernel, tile=tile, width=width, scale=scale),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=num_scalars,
            grid=(halves, jnp.max(schedule.totals)),
            in_specs=[row_spec, cache_spec, cache_spec],
            out_specs=row_spec,
            scratch_shapes=[column, column, pltpu.VMEM((stacks, matrix, head_dim), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="ragged_attention",
        interpret=interpret,
    )(*schedule, layer.reshape(1), q, k, v)


def _item(half, item, totals, rows, width):
    """(row, place in the half) of a grid step; steps behind the last item stay on it, so that they fetch nothing."""
    place = jnp.minimum(item, totals[half] - 1)
    return rows[half * width + place], place


def _kernel(
    totals_ref, rows_ref, shift_ref, slots_ref, first_ref, last_ref, layer_ref, q_ref, k_ref, v_ref, out_ref,
    peak_ref, total_ref, sum_ref, *, tile, width, scale,
):  # fmt: skip
    """One block of one row: a step of an online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867)."""
    del slots_ref, layer_ref
    half, item = pl.program_id(0), pl.program_id(1)
    row, place = _item(half, item, totals_ref, rows_ref, width)
    first, last = first_ref[row], last_ref[row]
    index = place + shift_ref[row]
    listed = item < totals_ref[half]
    stacks, matrix, _ = q_ref.shape
    block = k_ref.shape[1]
    precision = matmul_precision(q_ref.dtype)

    @pl.when(listed & (last < 0))
    def _():
        out_ref[...] = jnp.zeros_like(out_ref)

    @pl.when(listed & (last >= 0) & (index == 0))
    def _():
        peak_ref[...] = jnp.full_like(peak_ref, jnp.finfo(jnp.float32).min)
        total_ref[...] = jnp.zeros_like(total_ref)
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(listed & (last >= 0))
    def _():
        seen = index * block + jax.lax.broadcasted_iota(jnp.int32, (matrix, block), 1)
        query = jax.lax.broadcasted_iota(jnp.int32, (matrix, block), 0) & (tile - 1)
        visible = seen <= jnp.minimum(first + query, last)
        # A weight of 0 does not take away what an unwritten position holds: 0 * NaN is NaN.
        written = index * block + jax.lax.broadcasted_iota(jnp.int32, v_ref.shape[1:], 0) <= last
        for stack in range(stacks):
            q, keys, values = q_ref[stack], k_ref[stack].astype(q_ref.dtype), v_ref[stack].astype(q_ref.dtype)
            scores = jax.lax.dot_general(
                q, keys, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
            )
            scores = jnp.where(visible, scores * scale, -jnp.inf)
            # Position 0 is seen by every query, so the first block makes the peak finite.
            peak = jnp.maximum(peak_ref[stack], jnp.max(scores, axis=1, keepdims=True))
            shrink = jnp.exp(peak_ref[stack] - peak)
            weights = jnp.exp(scores - peak)
            mixed = jnp.dot(
                weights.astype(q.dtype),
                jnp.where(written, values, 0).astype(q.dtype),
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            peak_ref[stack] = peak
            total_ref[stack] = total_ref[stack] * shrink + jnp.sum(weights, axis=1, keepdims=True)
            sum_ref[stack] = sum_ref[stack] * shrink + mixed

    # A divisor of floor division would bring in instructions that the compiler asks the chip for.
    @pl.when(listed & (last >= 0) & (index == jax.lax.div(last, block)))
    def _():
        out_ref[...] = (sum_ref[...] / total_ref[...]).astype(out_ref.dtype)

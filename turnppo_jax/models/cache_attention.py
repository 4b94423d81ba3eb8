"""What one device does with its part of a key/value cache: implementations looked up by name, each with its layout.

An implementation is four functions of local arrays that know no mesh; `R` rows of `Q` new tokens belong to slots:

    layout(kv_heads, head_dim, capacity, dtype)   how a slot's positions lie in memory
    prepare(k, slots, positions, heads) -> rows   what the other two need to know of the rows, the same for all layers
    write(k, v, layer, rows, new_k, new_v) -> (k, v)
    attend(k, v, layer, rows, q, kv_heads) -> out

    k          [L, C / P, S, Nkv, P, H] rotated keys, as the layout says
    v          [L, C / P, S, Nkv, P, H]
    slots      [R] int32, different from one another, -1: a dummy row; None: R = S and row r is slot r
    positions  [R, Q] int32, consecutive from the first of a row on, then -1 (padding): written, and the last one seen
    rows       a tree of arrays with a leading axis that devices with other slots can be lined up along
    layer      scalar int32
    new_k      [R, Q, Nkv, H] rotated keys; new_v alike
    q          [R, Q, N, H] rotated queries; head n reads key/value head n // (N / Nkv)
    out        [R, Q, N, H] in the dtype of q; means nothing at padding and in dummy rows

Neither other rows nor what a slot holds beyond a row's positions may change a bit of a row's result.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from turnppo_jax.models.precision import matmul_precision
from turnppo_jax.models.ragged_attention import ragged_attend
from turnppo_jax.models.ragged_schedule import LANES, joined_heads, make_schedule, ragged_block
from turnppo_jax.models.ragged_write import make_spans, ragged_write, tile_positions

# Positions that "blocks" reads at a time: smaller blocks read less beyond the longest context, larger ones make
# fewer loop iterations. Of 16 to 256 the fastest for 16 slots on a CPU core; a multiple of a vector's lanes.
_BLOCK = 64


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the positions of a slot lie in memory.

    Attributes:
      block: P, positions of a block.
      head_dim: of the arrays: `joined` heads side by side, then zeros.
      joined: J, key/value heads that the arrays hold as one.
      keys_transposed: a block of keys is [H, P], not [P, H].
    """

    block: int
    head_dim: int
    joined: int = 1
    keys_transposed: bool = False


@dataclasses.dataclass(frozen=True)
class CacheAttention:
    """One implementation; see the head of this file.

    Attributes:
      layout, prepare, write, attend: its functions.
      blocks_read: (lengths [S], block) -> blocks that `attend` reads when the query of each slot sees so many
        positions, 0 where a slot rests.
      rewritten: (dtype) -> positions that `write` reads and writes again around a new one.
    """

    layout: Callable[[int, int, int, jnp.dtype], Layout]
    prepare: Callable[..., Any]
    write: Callable[..., tuple[jax.Array, jax.Array]]
    attend: Callable[..., jax.Array]
    blocks_read: Callable[[Sequence[int], int], int]
    rewritten: Callable[[jnp.dtype], int]


def blocks_layout(kv_heads: int, head_dim: int, capacity: int, dtype: jnp.dtype) -> Layout:
    """Small blocks, keys transposed: neither product of `attend_blocks` then needs another order of axes."""
    del kv_heads, dtype
    return Layout(block=min(_BLOCK, capacity), head_dim=head_dim, keys_transposed=True)


def prepare_blocks(k: jax.Array, slots: jax.Array | None, positions: jax.Array, heads: int) -> Any:
    """The rows as they are."""
    del k, heads
    return slots, positions


def write_blocks(
    k: jax.Array, v: jax.Array, layer: jax.Array, rows: Any, new_k: jax.Array, new_v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """A scatter."""
    slots, positions = rows
    if slots is None:
        slots = jnp.arange(k.shape[2], dtype=jnp.int32)
    num_blocks, block = k.shape[1], k.shape[-1]
    # What must not be written goes past the last block, where "drop" drops it; negative indices would count
    # from the end.
    real = (positions >= 0) & (slots >= 0)[:, None]
    index = jnp.where(real, positions // block, num_blocks)
    slots, offset = slots[:, None], positions % block
    return (
        k.at[layer, index, slots, :, :, offset].set(new_k.astype(k.dtype), mode="drop"),
        v.at[layer, index, slots, :, offset].set(new_v.astype(v.dtype), mode="drop"),
    )


def attend_blocks(k: jax.Array, v: jax.Array, layer: jax.Array, rows: Any, q: jax.Array, kv_heads: int) -> jax.Array:
    """Plain jax: the softmax runs online over blocks of positions, as many as the largest of `positions` needs.

    A block that a row sees nothing of multiplies its sums by exp(0) = 1 and adds 0. Padding counts as position 0.
    """
    slots, positions = rows
    rows, count, heads, head_dim = q.shape
    num_slots, block = k.shape[2], k.shape[-1]
    groups = heads // kv_heads
    precision = matmul_precision(q.dtype)
    # [R, Nkv, M = G * Q, H]: the queries that share a key/value head are one matrix.
    q = q.reshape(rows, count, kv_heads, groups, head_dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(rows, kv_heads, groups * count, head_dim) * jnp.asarray(head_dim**-0.5, q.dtype)
    last_seen = jnp.maximum(positions, 0)
    columns = jnp.tile(last_seen, (1, groups))[:, None, :, None]  # [R, 1, M, 1]
    if slots is not None:
        slots = jnp.clip(slots, 0, num_slots - 1)

    def body(index, carry):
        peak, total, out = carry
        keys, values = k[layer, index], v[layer, index]
        if slots is not None:
            keys, values = keys[slots], values[slots]
        scores = jnp.einsum(
            "rkmh,rkhc->rkmc", q, keys.astype(q.dtype), precision=precision, preferred_element_type=jnp.float32
        )
        scores = jnp.where(index * block + jnp.arange(block) <= columns, scores, -jnp.inf)
        new_peak = jnp.maximum(peak, scores.max(axis=-1))
        scale = jnp.exp(peak - new_peak)
        weights = jnp.exp(scores - new_peak[..., None])
        mixed = jnp.einsum("rkmc,rkch->rkmh", weights.astype(q.dtype), values.astype(q.dtype), precision=precision)
        return new_peak, total * scale + weights.sum(axis=-1), out * scale[..., None] + mixed

    # Position 0 is seen by every row, so the first block makes the peak finite.
    start = (
        jnp.full(q.shape[:3], jnp.finfo(jnp.float32).min),
        jnp.zeros(q.shape[:3], jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    _, total, out = jax.lax.fori_loop(0, jnp.max(last_seen) // block + 1, body, start)
    out = (out / total[..., None]).astype(q.dtype)
    out = out.reshape(rows, kv_heads, groups, count, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(rows, count, heads, head_dim)


def ragged_layout(kv_heads: int, head_dim: int, capacity: int, dtype: jnp.dtype) -> Layout:
    """Blocks worth a grid step of the kernel. Lanes of a TPU's memory hold heads, or take their place empty."""
    joined = joined_heads(kv_heads, head_dim)
    lanes = -(-joined * head_dim // LANES) * LANES
    return Layout(ragged_block(kv_heads // joined, lanes, capacity, dtype), lanes, joined)


def prepare_ragged(k: jax.Array, slots: jax.Array | None, positions: jax.Array, heads: int) -> Any:
    """What each of the two kernels reads ahead."""
    return make_spans(k, slots, positions), make_schedule(k, slots, positions, heads)


def write_ragged(k, v, layer, rows, new_k, new_v, *, interpret: bool = False):
    """See `ragged_write`."""
    return ragged_write(k, v, layer, rows[0], new_k, new_v, interpret=interpret)


def attend_ragged(k, v, layer, rows, q, kv_heads, *, interpret: bool = False):
    """See `ragged_attend`."""
    return ragged_attend(k, v, layer, rows[1], q, kv_heads, interpret=interpret)


CACHE_ATTENTION: dict[str, CacheAttention] = {
    "blocks": CacheAttention(  # any device
        blocks_layout,
        prepare_blocks,
        write_blocks,
        attend_blocks,
        blocks_read=lambda lengths, block: len(lengths) * max(1, -(-max(lengths) // block)),
        rewritten=lambda dtype: 0,
    ),
    "ragged": CacheAttention(  # TPU
        ragged_layout,
        prepare_ragged,
        write_ragged,
        attend_ragged,
        blocks_read=lambda lengths, block: sum(-(-length // block) for length in lengths),
        rewritten=tile_positions,
    ),
}


def cache_attention_by_name(name: str) -> CacheAttention:
    """Entry of `CACHE_ATTENTION`.

    Raises:
      ValueError: unknown name; the known ones are listed.
    """
    if name not in CACHE_ATTENTION:
        raise ValueError(f"unknown cache attention {name!r}; known: {', '.join(CACHE_ATTENTION)}")
    return CACHE_ATTENTION[name]

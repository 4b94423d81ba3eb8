"""Key/value cache of the sampler: `S` slots, each with `C` positions of its own.

Models reach it through `write` and `attend`, the rollout through `init_cache`, `copy_prefix` and
`truncate`; the layout behind them is private. Position p of a slot holds token p of its context.
"""

import dataclasses

import jax
import jax.numpy as jnp

from turnppo_jax.models.precision import matmul_precision
from turnppo_jax.models.sizes import ModelSizes

# Positions that `attend` reads at a time: smaller blocks read less beyond the longest context, larger ones make
# fewer loop iterations. Of 16 to 256 the fastest for 16 slots on a CPU core; a multiple of a vector's lanes.
BLOCK = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of `S` slots.

    The stretch of a slot is cut into blocks of `P` positions, and the blocks stand before the slots: what the
    longest context needs is one contiguous piece of each layer, and nothing behind it is ever read. Keys are
    stored transposed, so that neither product of `attend` needs another order of axes.

    Attributes:
      k: [L, C / P, S, Nkv, H, P], rotated keys.
      v: [L, C / P, S, Nkv, P, H].
      lengths: [S] int32, tokens that each slot holds; positions from there up hold anything finite.
      capacity: C, positions of one slot (the last block may have more, which stay unused).
    """

    k: jax.Array
    v: jax.Array
    lengths: jax.Array
    capacity: int = dataclasses.field(metadata={"static": True})

    @property
    def num_slots(self) -> int:
        """Slots, S."""
        return self.lengths.shape[0]


def init_cache(sizes: ModelSizes, num_slots: int, capacity: int, dtype: jnp.dtype = jnp.float32) -> Cache:
    """An empty cache of `num_slots` slots with `capacity` positions each."""
    block = min(BLOCK, capacity)
    stack = (sizes.num_layers, -(-capacity // block), num_slots, sizes.num_kv_heads)
    return Cache(
        k=jnp.zeros((*stack, sizes.head_dim, block), dtype),
        v=jnp.zeros((*stack, block, sizes.head_dim), dtype),
        lengths=jnp.zeros(num_slots, jnp.int32),
        capacity=capacity,
    )


def write(cache: Cache, layer: jax.Array, slots: jax.Array, positions: jax.Array, k: jax.Array, v: jax.Array) -> Cache:
    """Point writes of one layer's keys and values; `lengths` stay as they are.

    Args:
      cache: the cache.
      layer: scalar int32.
      slots: [R] int32; a slot outside 0..S-1 (-1: dummy row) writes nothing.
      positions: [R, P] int32; a position outside 0..C-1 (-1: padding) writes nothing.
      k: [R, P, Nkv, H] rotated keys.
      v: [R, P, Nkv, H].

    Returns:
      The cache with `k[r, p]` at position `positions[r, p]` of slot `slots[r]`.
    """
    num_blocks, block = cache.k.shape[1], cache.k.shape[-1]
    # What must not be written goes past the last block, where "drop" drops it; negative indices would count
    # from the end.
    real = (positions >= 0) & (positions < cache.capacity) & (slots >= 0)[:, None]
    index = jnp.where(real, positions // block, num_blocks)
    slots, offset = slots[:, None], positions % block
    return dataclasses.replace(
        cache,
        k=cache.k.at[layer, index, slots, :, :, offset].set(k.astype(cache.k.dtype), mode="drop"),
        v=cache.v.at[layer, index, slots, :, offset].set(v.astype(cache.v.dtype), mode="drop"),
    )


def attend(cache: Cache, layer: jax.Array, slots: jax.Array | None, positions: jax.Array, q: jax.Array) -> jax.Array:
    """Attention of new queries to what their slots hold, the queries' own positions included.

    The softmax runs online over blocks of positions, as many as the largest of `positions` needs. A block that
    a row sees nothing of multiplies its sums by exp(0) = 1 and adds 0: neither other rows nor the capacity
    change a bit of a row's result.

    Args:
      cache: the cache, already written at `positions`.
      layer: scalar int32.
      slots: [R] int32, clamped into 0..S-1 (a dummy row reads something and means nothing); None: R = S,
        row r is slot r.
      positions: [R, P] int32; a query sees positions 0..its own. Below 0 (padding) counts as 0.
      q: [R, P, N, H] rotated queries.

    Returns:
      [R, P, N, H] in the dtype of q.
    """
    rows, count, heads, head_dim = q.shape
    kv_heads, block = cache.k.shape[3], cache.k.shape[-1]
    groups = heads // kv_heads
    precision = matmul_precision(q.dtype)
    # [R, Nkv, M = G * P, H]: the queries that share a key/value head are one matrix.
    q = q.reshape(rows, count, kv_heads, groups, head_dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(rows, kv_heads, groups * count, head_dim) * jnp.asarray(head_dim**-0.5, q.dtype)
    last_seen = jnp.maximum(positions, 0)
    columns = jnp.tile(last_seen, (1, groups))[:, None, :, None]  # [R, 1, M, 1]
    if slots is not None:
        slots = jnp.clip(slots, 0, cache.num_slots - 1)

    def body(index, carry):
        peak, total, out = carry
        k, v = cache.k[layer, index], cache.v[layer, index]
        if slots is not None:
            k, v = k[slots], v[slots]
        scores = jnp.einsum(
            "rkmh,rkhc->rkmc", q, k.astype(q.dtype), precision=precision, preferred_element_type=jnp.float32
        )
        scores = jnp.where(index * block + jnp.arange(block) <= columns, scores, -jnp.inf)
        new_peak = jnp.maximum(peak, scores.max(axis=-1))
        scale = jnp.exp(peak - new_peak)
        weights = jnp.exp(scores - new_peak[..., None])
        mixed = jnp.einsum("rkmc,rkch->rkmh", weights.astype(q.dtype), v.astype(q.dtype), precision=precision)
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


def copy_prefix(cache: Cache, source: jax.Array, target: jax.Array, length: jax.Array) -> Cache:
    """Slot `target` becomes a copy of the first `length` tokens of slot `source`.

    Args:
      cache: the cache.
      source: scalar int32 slot.
      target: scalar int32 slot.
      length: scalar int32; more than the source holds counts as what it holds.

    Returns:
      The cache with `lengths[target] = min(length, lengths[source])`.
    """
    length = jnp.clip(length, 0, cache.lengths[source])
    return dataclasses.replace(
        cache,
        k=cache.k.at[:, :, target].set(cache.k[:, :, source]),
        v=cache.v.at[:, :, target].set(cache.v[:, :, source]),
        lengths=cache.lengths.at[target].set(length),
    )


def truncate(cache: Cache, lengths: jax.Array) -> Cache:
    """Each slot keeps at most its first `lengths[s]` tokens (0 empties it); never makes a slot longer.

    Args:
      cache: the cache.
      lengths: [S] int32; below 0 counts as 0.
    """
    return dataclasses.replace(cache, lengths=jnp.minimum(cache.lengths, jnp.maximum(lengths, 0)).astype(jnp.int32))

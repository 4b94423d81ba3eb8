"""Key/value cache of the sampler: `S` slots, each with a stretch of `C` positions of its own.

Models reach it through `write` and `attend`, the rollout through `init_cache`, `copy_prefix` and
`truncate`; the layout behind them is private. Position p of a slot holds token p of its context.
"""

import dataclasses

import jax
import jax.numpy as jnp

from turnppo_jax.models.precision import matmul_precision
from turnppo_jax.models.sizes import ModelSizes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of `S` slots.

    Attributes:
      k: [L, S, Nkv, C, H], rotated keys. Heads stand before positions, so that each (slot, head) is one
        contiguous matrix for the batched products of `attend`.
      v: [L, S, Nkv, C, H].
      lengths: [S] int32, tokens that each slot holds; positions from there up hold anything finite.
    """

    k: jax.Array
    v: jax.Array
    lengths: jax.Array

    @property
    def capacity(self) -> int:
        """Positions of one slot, C."""
        return self.k.shape[3]

    @property
    def num_slots(self) -> int:
        """Slots, S."""
        return self.k.shape[1]


def init_cache(sizes: ModelSizes, num_slots: int, capacity: int, dtype: jnp.dtype = jnp.float32) -> Cache:
    """An empty cache of `num_slots` slots with `capacity` positions each."""
    shape = (sizes.num_layers, num_slots, sizes.num_kv_heads, capacity, sizes.head_dim)
    return Cache(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype), lengths=jnp.zeros(num_slots, jnp.int32))


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
      The cache with `k[:, r, p]` at position `positions[r, p]` of slot `slots[r]`.
    """
    num_slots, capacity = cache.num_slots, cache.capacity
    # Negative numbers would count from the end: send them past it, where "drop" drops them.
    slots = jnp.where(slots < 0, num_slots, slots)[:, None]
    positions = jnp.where(positions < 0, capacity, positions)
    at = (layer, slots, slice(None), positions)
    return dataclasses.replace(
        cache,
        k=cache.k.at[at].set(k.astype(cache.k.dtype), mode="drop"),
        v=cache.v.at[at].set(v.astype(cache.v.dtype), mode="drop"),
    )


def attend(cache: Cache, layer: jax.Array, slots: jax.Array | None, positions: jax.Array, q: jax.Array) -> jax.Array:
    """Attention of new queries to what their slots hold, the queries' own positions included.

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
    k, v = cache.k[layer], cache.v[layer]  # [S, Nkv, C, H]
    if slots is not None:
        slots = jnp.clip(slots, 0, cache.num_slots - 1)
        k, v = k[slots], v[slots]
    kv_heads = k.shape[1]
    precision = matmul_precision(q.dtype)
    q5 = q.reshape(rows, count, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum(
        "rpkgh,rkch->rkgpc", q5, k.astype(q.dtype), precision=precision, preferred_element_type=jnp.float32
    )
    visible = jnp.arange(cache.capacity) <= jnp.maximum(positions, 0)[..., None]  # [R, P, C]
    scores = jnp.where(visible[:, None, None], scores * head_dim**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    out = jnp.einsum(
        "rkgpc,rkch->rpkgh", weights, v.astype(q.dtype), precision=precision, preferred_element_type=jnp.float32
    )
    return out.reshape(q.shape).astype(q.dtype)


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
    return Cache(
        k=cache.k.at[:, target].set(cache.k[:, source]),
        v=cache.v.at[:, target].set(cache.v[:, source]),
        lengths=cache.lengths.at[target].set(length),
    )


def truncate(cache: Cache, lengths: jax.Array) -> Cache:
    """Each slot keeps at most its first `lengths[s]` tokens (0 empties it); never makes a slot longer.

    Args:
      cache: the cache.
      lengths: [S] int32; below 0 counts as 0.
    """
    return dataclasses.replace(cache, lengths=jnp.minimum(cache.lengths, jnp.maximum(lengths, 0)).astype(jnp.int32))

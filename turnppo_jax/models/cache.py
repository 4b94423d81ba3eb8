"""Key/value cache of the sampler: `S` slots, each with `C` positions of its own.

Models reach it through `prepare`, `write` and `attend`, the rollout through `init_cache`, `copy_prefix` and
`truncate`; the layout behind them is private. Position p of a slot holds token p of its context.

On a mesh the slots are split over the data axes and the key/value heads over tensor, and every device works on its
own part alone (`jax.shard_map`): slot s lies on data shard s // (S / shards), and row r of a call on data shard
r // (R / shards). A row must stand on the shard of its slot; a row of another shard's slot does nothing.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from turnppo_jax.models.cache_attention import cache_attention_by_name
from turnppo_jax.models.sizes import ModelSizes
from turnppo_jax.parallel.sharding import kv_head_copies, mesh_axes, parts_of, shardings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of `S` slots.

    The stretch of a slot is cut into blocks of `P` positions, and the blocks stand before the slots: what the
    longest context needs is one contiguous piece of each layer, and nothing behind it is ever read. How long a block
    is, and in what order it keeps its keys, is the implementation's (`cache_attention.Layout`).

    Attributes:
      k: [L, C / P, S, Nkv, P, H], rotated keys, or as the layout changes it. Where tensor has more parts than there are
        key/value heads, each head is repeated (`sharding.kv_head_copies`), so that every part has those that its
        queries read.
      v: [L, C / P, S, Nkv, P, H].
      lengths: [S] int32, tokens that each slot holds; positions from there up hold anything finite.
      capacity: C, positions of one slot (the last block may have more, which stay unused).
      kv_heads: key/value heads that it holds, copies counted.
      attention: key of `cache_attention.CACHE_ATTENTION`.
    """

    k: jax.Array
    v: jax.Array
    lengths: jax.Array
    capacity: int = dataclasses.field(metadata={"static": True})
    kv_heads: int = dataclasses.field(metadata={"static": True})
    attention: str = dataclasses.field(metadata={"static": True})

    @property
    def num_slots(self) -> int:
        """Slots, S."""
        return self.lengths.shape[0]

    @property
    def block(self) -> int:
        """Positions of a block, P."""
        return self.v.shape[4]


def init_cache(
    sizes: ModelSizes,
    num_slots: int,
    capacity: int,
    dtype: jnp.dtype = jnp.float32,
    mesh: Mesh | None = None,
    attention: str = "blocks",
) -> Cache:
    """An empty cache of `num_slots` slots with `capacity` positions each.

    With a mesh its key/value heads are repeated as that mesh needs; `cache_shardings` says where it lies there.

    Raises:
      ValueError: unknown attention; the known ones are listed.
    """
    kv_heads = sizes.num_kv_heads * kv_head_copies(mesh, sizes.num_heads, sizes.num_kv_heads)
    local_heads = kv_heads // parts_of(mesh, "heads", sizes.num_heads)
    layout = cache_attention_by_name(attention).layout(local_heads, sizes.head_dim, capacity, dtype)
    stack = (sizes.num_layers, -(-capacity // layout.block), num_slots, kv_heads // layout.joined)
    block = (layout.block, layout.head_dim)
    return Cache(
        k=jnp.zeros((*stack, *(reversed(block) if layout.keys_transposed else block)), dtype),
        v=jnp.zeros((*stack, *block), dtype),
        lengths=jnp.zeros(num_slots, jnp.int32),
        capacity=capacity,
        kv_heads=kv_heads,
        attention=attention,
    )


def cache_shardings(mesh: Mesh, cache: Cache) -> Cache:
    """The tree of a cache (arrays or shapes) with the NamedSharding of each array."""
    return shardings(mesh, {"cache": cache})["cache"]


def prepare(cache: Cache, slots: jax.Array | None, positions: jax.Array, heads: int, mesh: Mesh | None = None) -> Any:
    """What `write` and `attend` read of the rows of a call: the same for all layers, so made once before them.

    Args:
      cache: the cache.
      slots: [R] int32, different from one another; a slot outside 0..S-1 (-1: dummy row) writes nothing; None: R = S,
        row r is slot r.
      positions: [R, Q] int32, consecutive from the first of a row on, then -1 (padding) to the end. A position outside
        0..C-1 writes nothing.
      heads: N, query heads.
      mesh: where the cache lies.

    Returns:
      A tree of arrays, each device's own.

    Raises:
      ValueError: rows that the data shards of the cache do not divide.
    """
    attention = cache_attention_by_name(cache.attention)
    positions = jnp.where(positions < cache.capacity, positions, -1)
    if mesh is None or mesh.size == 1:
        return attention.prepare(cache.k, slots, positions, heads)
    over, _ = _split(cache, mesh)
    shape = cache_shardings(mesh, cache).k.shard_shape(cache.k.shape)
    if positions.shape[0] % (shards := cache.num_slots // shape[2]):
        raise ValueError(f"rows={positions.shape[0]}; allowed: a multiple of the {shards} data shards of the cache")
    local_heads = heads // parts_of(mesh, "heads", heads)

    def local(slots, positions):
        if slots is not None and over:
            slots = slots - jax.lax.axis_index(over) * shape[2]
            # Slots of other shards write nothing.
            slots = jnp.where((slots >= 0) & (slots < shape[2]), slots, -1)
        return attention.prepare(jax.ShapeDtypeStruct(shape, cache.k.dtype), slots, positions, local_heads)

    return jax.shard_map(local, mesh=mesh, in_specs=P(over), out_specs=P(over), check_vma=False)(slots, positions)


def write(cache: Cache, layer: jax.Array, rows: Any, k: jax.Array, v: jax.Array, mesh: Mesh | None = None) -> Cache:
    """Point writes of one layer's keys and values; `lengths` stay as they are.

    Args:
      cache: the cache.
      layer: scalar int32.
      rows: from `prepare`.
      k: [R, Q, Nkv, H] rotated keys.
      v: [R, Q, Nkv, H].
      mesh: where the cache lies.

    Returns:
      The cache with `k[r, q]` at position `positions[r, q]` of slot `slots[r]`.
    """
    copies = cache.kv_heads // k.shape[2]
    if copies > 1:
        k, v = jnp.repeat(k, copies, axis=2), jnp.repeat(v, copies, axis=2)
    local = cache_attention_by_name(cache.attention).write
    keys, values = _on_own_slots(local, mesh, cache, layer, rows, (k, v), writes=True)
    return dataclasses.replace(cache, k=keys, v=values)


def attend(cache: Cache, layer: jax.Array, rows: Any, q: jax.Array, mesh: Mesh | None = None) -> jax.Array:
    """Attention of new queries to what their slots hold, the queries' own positions included.

    Args:
      cache: the cache, already written at the positions of the rows.
      layer: scalar int32.
      rows: from `prepare`.
      q: [R, Q, N, H] rotated queries; a query sees positions 0..its own.
      mesh: where the cache lies.

    Returns:
      [R, Q, N, H] in the dtype of q; means nothing at padding and in dummy rows.
    """
    kv_heads = cache.kv_heads // parts_of(mesh, "heads", q.shape[2])
    local = functools.partial(cache_attention_by_name(cache.attention).attend, kv_heads=kv_heads)
    return _on_own_slots(local, mesh, cache, layer, rows, (q,), writes=False)


def copy_prefix(
    cache: Cache, source: jax.Array, target: jax.Array, length: jax.Array, mesh: Mesh | None = None
) -> Cache:
    """Slot `target` becomes a copy of the first `length` tokens of slot `source`.

    Args:
      cache: the cache.
      source: scalar int32 slot.
      target: scalar int32 slot.
      length: scalar int32; more than the source holds counts as what it holds.
      mesh: where the cache lies; the slot alone moves between its devices.

    Returns:
      The cache with `lengths[target] = min(length, lengths[source])`.
    """
    axes = () if mesh is None else mesh_axes(mesh, "slots", cache.num_slots)

    def copy(x, source, target):
        slot, first = jax.lax.dynamic_index_in_dim(x, source, axis=2, keepdims=False), 0
        if axes:
            first = jax.lax.axis_index(axes) * x.shape[2]
            mine = (source >= first) & (source < first + x.shape[2])
            slot = x[:, :, jnp.clip(source - first, 0, x.shape[2] - 1)]
            slot = jax.lax.psum(jnp.where(mine, slot, 0), axes)
        # Negative indices would count from the end; what lies past it is dropped.
        at = jnp.where(target >= first, target - first, x.shape[2])
        return x.at[:, :, at].set(slot, mode="drop")

    if axes:
        places = cache_shardings(mesh, cache)

        def on_mesh(x, place):
            copy_there = jax.shard_map(
                copy, mesh=mesh, in_specs=(place.spec, P(), P()), out_specs=place.spec, check_vma=False
            )
            return copy_there(x, jnp.int32(source), jnp.int32(target))

        k, v = on_mesh(cache.k, places.k), on_mesh(cache.v, places.v)
    else:
        k, v = copy(cache.k, source, target), copy(cache.v, source, target)
    length = jnp.clip(length, 0, cache.lengths[source])
    return dataclasses.replace(cache, k=k, v=v, lengths=cache.lengths.at[target].set(length))


def truncate(cache: Cache, lengths: jax.Array) -> Cache:
    """Each slot keeps at most its first `lengths[s]` tokens (0 empties it); never makes a slot longer.

    Args:
      cache: the cache.
      lengths: [S] int32; below 0 counts as 0.
    """
    return dataclasses.replace(cache, lengths=jnp.minimum(cache.lengths, jnp.maximum(lengths, 0)).astype(jnp.int32))


def _split(cache: Cache, mesh: Mesh) -> tuple[tuple[str, ...] | None, Any]:
    """The mesh axes of the cache's slots and of its key/value heads, None where there are none."""
    spec = cache_shardings(mesh, cache).v.spec
    return mesh_axes(mesh, "slots", cache.num_slots) or None, spec[3] if len(spec) > 3 else None


def _on_own_slots(
    local: Callable, mesh: Mesh | None, cache: Cache, layer: jax.Array, rows: Any, arrays: tuple, *, writes: bool
) -> Any:
    """`local(k, v, layer, rows, *arrays)`, on a mesh with each device's own slots, rows and heads.

    Args:
      local: a function of the arrays of one device.
      mesh: None runs it on the arrays as they are.
      cache: the cache.
      layer: scalar int32.
      rows: from `prepare`.
      arrays: [R, Q, heads, H] each.
      writes: whether it returns the cache's two arrays, or one like the first of `arrays`.
    """
    if mesh is None or mesh.size == 1:
        return local(cache.k, cache.v, layer, rows, *arrays)
    places = cache_shardings(mesh, cache)
    over, heads = _split(cache, mesh)
    row_heads = P(over, None, heads)
    # Each device's own shapes and trip counts: nothing is exchanged.
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(places.k.spec, places.v.spec, P(), P(over), *[row_heads] * len(arrays)),
        out_specs=(places.k.spec, places.v.spec) if writes else row_heads,
        check_vma=False,
    )(cache.k, cache.v, layer, rows, *arrays)

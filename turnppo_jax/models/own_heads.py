"""Attention over whole rows on a mesh: each device computes its own rows and heads, and nothing is exchanged."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from turnppo_jax.parallel.sharding import kv_head_copies, manual_spec


def on_own_heads(
    attention: Callable, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, mesh: Mesh | None
) -> jax.Array:
    """`attention(q, k, v, segment_ids)` on the parts that each device of the mesh holds.

    Rows are split over the data axes and heads over tensor. Where there are fewer key/value heads than parts, each is
    repeated so that every part has those of its queries; where tensor does not divide the query heads, every device
    of a tensor group computes all of them (the rules of `parallel/sharding.py`, which say so).

    Args:
      attention: a function of arrays of one device; head n of q reads key/value head n // (N / Nkv).
      q: [B, T, N, H].
      k: [B, T, Nkv, H].
      v: [B, T, Nkv, H].
      segment_ids: [B, T] int32.
      mesh: None runs it on the arrays as they are.

    Returns:
      [B, T, N, H], split like q.
    """
    if mesh is None or mesh.size == 1:
        return attention(q, k, v, segment_ids)
    copies = kv_head_copies(mesh, q.shape[2], k.shape[2])
    if copies > 1:
        k, v = jnp.repeat(k, copies, axis=2), jnp.repeat(v, copies, axis=2)
    queries = manual_spec(mesh, ("rows", "columns", "heads"), q.shape)
    keys = manual_spec(mesh, ("rows", "columns", "kv_heads"), k.shape)
    rows = manual_spec(mesh, ("rows", "columns"), segment_ids.shape)
    return jax.shard_map(attention, mesh=mesh, in_specs=(queries, keys, keys, rows), out_specs=queries)(
        q, k, v, segment_ids
    )

"""Rows of the embedding table, whose vocabulary and width lie in parts on the devices of a mesh.

A device looks its part of the table up for every row that the devices of its fsdp group have, and these exchange
activations: the table, which is larger by far, never moves. Its gradient is summed in float32 where it lies.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from turnppo_jax.parallel.collectives import first_index, gather, sum_over
from turnppo_jax.parallel.sharding import mesh_axes


def embed_tokens(table: jax.Array, tokens: jax.Array, dtype: jnp.dtype, mesh: Mesh | None = None) -> jax.Array:
    """Embeddings of tokens.

    Args:
      table: [V, D].
      tokens: [B, T] int32, clamped into 0..V-1.
      dtype: of the result.
      mesh: the one that the table lies on.

    Returns:
      [B, T, D]; on a mesh split by rows.
    """
    if mesh is None or mesh.size == 1:
        return jnp.take(table, tokens, axis=0, mode="clip").astype(dtype)
    return _embed(table, jnp.clip(tokens, 0, table.shape[0] - 1), jnp.dtype(dtype), mesh)


def _names(table_shape, tokens_shape, mesh):
    """Mesh axes of (vocabulary, width, rows), and those of the width over which rows and width change places."""
    vocab, width = mesh_axes(mesh, "vocab", table_shape[0]), mesh_axes(mesh, "embed", table_shape[1])
    rows = mesh_axes(mesh, "rows", tokens_shape[0])
    # Rows come back in their order only if the axes that split both are the innermost of the rows.
    swapped = width if rows[len(rows) - len(width) :] == width else ()
    return vocab, width, rows, swapped


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _embed(table, tokens, dtype, mesh):
    vocab, width, rows, swapped = _names(table.shape, tokens.shape, mesh)

    def local(table, tokens):
        tokens = gather(tokens, 0, swapped) - first_index(table.shape[0], vocab)
        mine = (tokens >= 0) & (tokens < table.shape[0])
        found = jnp.take(table, tokens, axis=0, mode="clip").astype(dtype)
        x = sum_over(jnp.where(mine[..., None], found, 0), vocab)  # one term is not zero
        if swapped:
            return jax.lax.all_to_all(x, swapped, split_axis=0, concat_axis=2, tiled=True)
        return gather(x, 2, width)

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(vocab or None, width or None), PartitionSpec(rows or None)),
        out_specs=PartitionSpec(rows or None),
        check_vma=False,
    )(table, tokens)


def _embed_forward(table, tokens, dtype, mesh):
    return _embed(table, tokens, dtype, mesh), (table, tokens)


def _embed_backward(dtype, mesh, saved, cotangent):
    table, tokens = saved
    vocab, width, rows, swapped = _names(table.shape, tokens.shape, mesh)
    shape = jax.sharding.NamedSharding(mesh, PartitionSpec(vocab or None, width or None)).shard_shape(table.shape)

    def local(tokens, dx):
        tokens = gather(tokens, 0, swapped) - first_index(shape[0], vocab)
        if swapped:
            dx = jax.lax.all_to_all(dx, swapped, split_axis=2, concat_axis=0, tiled=True)
        elif width:
            dx = jax.lax.dynamic_slice_in_dim(dx, first_index(shape[1], width), shape[1], axis=2)
        # Negative indices would count from the end; what lies past it is dropped.
        tokens = jnp.where(tokens >= 0, tokens, shape[0])
        gradient = jnp.zeros(shape, jnp.float32).at[tokens].add(dx.astype(jnp.float32), mode="drop")
        return sum_over(gradient, tuple(name for name in rows if name not in swapped))

    gradient = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(rows or None), PartitionSpec(rows or None)),
        out_specs=PartitionSpec(vocab or None, width or None),
        check_vma=False,
    )(tokens, cotangent)
    return gradient.astype(table.dtype), None


_embed.defvjp(_embed_forward, _embed_backward)

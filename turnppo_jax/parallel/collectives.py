"""What the devices of a mesh exchange inside `jax.shard_map`; over no mesh axis at all nothing happens.

`names` are mesh axes, outermost first, as `sharding.mesh_axes` gives them.
"""

import jax


def gather(x: jax.Array, axis: int, names: tuple[str, ...]) -> jax.Array:
    """The whole of an array that is split over `names` along `axis`."""
    return jax.lax.all_gather(x, names, axis=axis, tiled=True) if names else x


def sum_over(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Sum of every device's array."""
    return jax.lax.psum(x, names) if names else x


def max_over(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Largest of every device's array, entry by entry."""
    return jax.lax.pmax(x, names) if names else x


def first_index(size: int, names: tuple[str, ...]) -> jax.Array | int:
    """Where this device's part of an axis begins, if every part has `size` entries."""
    return jax.lax.axis_index(names) * size if names else 0


def sum_to_parts(x: jax.Array, names: tuple[str, ...], parts: tuple[tuple[str, ...], ...]) -> jax.Array:
    """This device's part of a sum of every device's whole array.

    Each device receives the part that it keeps and no more, before anything else is summed.

    Args:
      x: this device's term, whole.
      names: the mesh axes that are summed over.
      parts: for each axis of x the mesh axes that split the result along it; over those outside `names` the
        terms are equal, and the part is cut out.
    """
    for axis, split in enumerate(parts):
        for name in split:
            if name in names:
                x = jax.lax.psum_scatter(x, name, scatter_dimension=axis, tiled=True)
            else:
                size = x.shape[axis] // jax.lax.axis_size(name)
                x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(name) * size, size, axis=axis)
    return sum_over(x, tuple(name for name in names if not any(name in split for split in parts)))

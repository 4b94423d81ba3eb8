"""The one table of sharding rules: logical axis -> mesh axes."""

import functools
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from turnppo_jax.models.logical_axes import axes_of, path_name

RULES: dict[str, tuple[str, ...]] = {
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "layers": (),  # scanned: every device holds its part of every layer
    "head_dim": (),
    "norm": (),  # a few kilobytes, read by every device
    "rows": ("data", "fsdp"),
    "columns": ("sequence",),
    "hidden": (),  # of activations between blocks
    "slots": ("data", "fsdp"),
    "draws": ("data", "fsdp", "tensor"),  # rows of logits while a token is drawn from each
    "cache_blocks": (),
    "cache_row": (),
    "cache_column": (),
}

_FALLBACKS = {
    "kv_heads": "key/value heads are replicated over it",
    "heads": "attention is not split over it and runs on the data axes alone",
}


def mesh_axes(mesh: Mesh, axis: str, size: int) -> tuple[str, ...]:
    """The mesh axes above 1 that split an axis of this logical name and size.

    Where their product does not divide the size, the leading ones that do; a line says so once.

    Args:
      mesh: from `make_mesh`.
      axis: a key of `RULES`.
      size: entries of the axis.

    Raises:
      ValueError: a logical axis without a rule; the known ones are listed.
    """
    if axis not in RULES:
        raise ValueError(f"logical axis {axis!r} has no rule; known: {', '.join(RULES)}")
    wanted = tuple(name for name in RULES[axis] if mesh.shape[name] > 1)
    used = wanted
    while size % _parts(mesh, used):
        used = used[:-1]
    if used != wanted:
        instead = f"that axis is split over {'*'.join(used)} alone" if used else "that axis is replicated over it"
        say_once(
            f"sharding: {'*'.join(wanted)}={_parts(mesh, wanted)} does not divide {axis}={size}: "
            + _FALLBACKS.get(axis, instead)
        )
    return used


def partition_spec(mesh: Mesh, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
    """How the table splits an array whose axes have these logical names; see `named_sharding`."""
    entries: list[str | tuple[str, ...] | None] = []
    for axis, size in zip(axes, shape, strict=False):
        used = () if axis is None else mesh_axes(mesh, axis, size)
        entries.append(None if not used else used[0] if len(used) == 1 else used)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def manual_spec(mesh: Mesh, axes: tuple[str, ...], shape: tuple[int, ...]) -> PartitionSpec:
    """`partition_spec` that names mesh axes of size 1 too, for a `shard_map` that is differentiated.

    The gradient of an argument is summed over every mesh axis that its spec does not name. Over one of size 1 that
    changes nothing, and still is a collective of the argument's size.
    """
    entries = []
    for axis, size in zip(axes, shape, strict=False):
        used = mesh_axes(mesh, axis, size)
        entries.append(tuple(name for name in RULES[axis] if name in used or mesh.shape[name] == 1) or None)
    return PartitionSpec(*entries)


def named_sharding(mesh: Mesh, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> NamedSharding:
    """Sharding of an array whose axes have these logical names.

    Args:
      mesh: from `make_mesh`.
      axes: a key of `RULES` per axis, None for a replicated one; fewer than `shape` has leave the rest replicated.
      shape: of the array.

    Raises:
      ValueError: a logical axis without a rule; the known ones are listed.
    """
    return NamedSharding(mesh, partition_spec(mesh, axes, shape))


def constrain(x: jax.Array, axes: tuple[str | None, ...], mesh: Mesh | None) -> jax.Array:
    """`x`, inside jit, split as `named_sharding` says; without a mesh, or on one device, as it is."""
    if mesh is None or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, named_sharding(mesh, axes, x.shape))


def parts_of(mesh: Mesh | None, axis: str, size: int) -> int:
    """Into how many parts the table splits an axis of this logical name and size."""
    return 1 if mesh is None else _parts(mesh, mesh_axes(mesh, axis, size))


def kv_head_copies(mesh: Mesh | None, heads: int, kv_heads: int) -> int:
    """How often each key/value head is repeated so that every part of the query heads has its own beside it.

    With n parts there are then lcm(kv_heads, n) heads, which n divides and which divide the query heads.
    """
    return math.lcm(kv_heads, parts_of(mesh, "heads", heads)) // kv_heads


def shardings(mesh: Mesh, params: Any) -> Any:
    """The tree of `params` with a NamedSharding for each leaf, by the two tables.

    Args:
      mesh: from `make_mesh`.
      params: arrays or shapes: whatever `models.logical_axes.logical_axes` takes.

    Raises:
      ValueError: a parameter path or a logical axis that its table does not know.
    """

    def place(path: Any, leaf: Any) -> NamedSharding:
        shape = tuple(leaf.shape)
        return named_sharding(mesh, axes_of(path_name(path), len(shape)), shape)

    return jax.tree.map_with_path(place, params)


def shard(mesh: Mesh, params: Any) -> Any:
    """`params` placed by `shardings(mesh, params)`; see `place`."""
    return place(params, shardings(mesh, params))


def place(tree: Any, placed: Any) -> Any:
    """The arrays of `tree` on the devices of their shardings, which may be those of several hosts.

    Args:
      tree: numpy or jax arrays; where the devices are of several hosts, every host gives the same values.
      placed: a sharding for all of them, or a tree of shardings.
    """
    if isinstance(placed, jax.sharding.Sharding):
        placed = jax.tree.map(lambda _: placed, tree)
    if all(sharding.is_fully_addressable for sharding in jax.tree.leaves(placed)):
        return jax.device_put(tree, placed)
    return jax.tree.map(_place_on_hosts, tree, placed)


def _place_on_hosts(x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.device_put(x, sharding)
    # device_put would first send the values round to compare them.
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def _parts(mesh: Mesh, names: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[name] for name in names)


@functools.cache
def say_once(line: str) -> None:
    """Prints a line, the first time only: every leaf and every program would repeat it."""
    print(line, flush=True)

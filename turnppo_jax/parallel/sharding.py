"""The one table of sharding rules: logical axis -> mesh axes."""

import functools
import math
from typing import Any

import jax
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
    "slots": ("data", "fsdp"),
    "cache_blocks": (),
    "cache_row": (),
    "cache_column": (),
}

_FALLBACKS = {
    "kv_heads": "key/value heads are replicated over it",
    "heads": "attention is not split over it and runs on the data axes alone",
}


def named_sharding(mesh: Mesh, axes: tuple[str, ...], shape: tuple[int, ...]) -> NamedSharding:
    """Sharding of an array whose axes have these logical names.

    An axis whose size the mesh axes do not divide is replicated, and a line says so once.

    Args:
      mesh: from `make_mesh`.
      axes: a logical name per axis, keys of `RULES`; fewer than `shape` has leave the rest replicated.
      shape: of the array.

    Raises:
      ValueError: a logical axis without a rule; the known ones are listed.
    """
    entries: list[str | tuple[str, ...] | None] = []
    for axis, size in zip(axes, shape, strict=False):
        if axis not in RULES:
            raise ValueError(f"logical axis {axis!r} has no rule; known: {', '.join(RULES)}")
        used = tuple(name for name in RULES[axis] if mesh.shape[name] > 1)
        parts = math.prod(mesh.shape[name] for name in used)
        if size % parts:
            _say(
                f"sharding: {'*'.join(used)}={parts} does not divide {axis}={size}: "
                + _FALLBACKS.get(axis, "that axis is replicated over it")
            )
            used = ()
        entries.append(None if not used else used[0] if len(used) == 1 else used)
    while entries and entries[-1] is None:
        entries.pop()
    return NamedSharding(mesh, PartitionSpec(*entries))


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
    """`params` placed by `shardings(mesh, params)`."""
    return jax.device_put(params, shardings(mesh, params))


@functools.cache
def _say(line: str) -> None:
    """Prints a line, the first time only: every leaf and every program would repeat it."""
    print(line, flush=True)

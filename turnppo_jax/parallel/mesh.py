"""The mesh of devices: four axes from the first day, sizes may be 1."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

# Outermost first. `data` may cross slices or hosts; tensor and sequence stay on fast links.
MESH_AXES = ("data", "fsdp", "tensor", "sequence")


def make_mesh(
    data: int = 1, fsdp: int = 1, tensor: int = 1, sequence: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh of `data * fsdp * tensor * sequence` devices with automatic partitioning on every axis.

    Args:
      data: copies of the parameters, each on other rows.
      fsdp: parts of the parameters, each on other rows.
      tensor: parts of heads, feed-forward width and vocabulary.
      sequence: parts of a row.
      devices: in order, as many as the product; default the first so many of `jax.devices()`.

    Raises:
      ValueError: an axis below 1, or a product that differs from the devices there are.
    """
    sizes = dict(zip(MESH_AXES, (data, fsdp, tensor, sequence), strict=True))
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"mesh axis {name}={size}; allowed: at least 1")
    needed = data * fsdp * tensor * sequence
    available = jax.devices() if devices is None else list(devices)
    if needed > len(available) or (devices is not None and needed < len(available)):
        shape = " * ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"mesh {shape} needs {needed} devices, there are {len(available)}")
    grid = np.asarray(available[:needed], dtype=object).reshape(tuple(sizes.values()))
    # Auto: the compiler propagates shardings; jax.make_mesh would make them part of every array's type.
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))

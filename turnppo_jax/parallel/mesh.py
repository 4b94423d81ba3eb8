"""Meshes of devices: four axes from the first day, sizes may be 1.

Training and sampling may use two meshes; both are reshapes of one list of devices, host after host, so that arrays
move between them inside one jitted program.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

# Outermost first. `data` may cross slices or hosts; tensor and sequence stay on fast links.
MESH_AXES = ("data", "fsdp", "tensor", "sequence")


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """`config.mesh`: the devices that train.

    Attributes:
      data: copies of the parameters, each on other rows.
      fsdp: parts of the parameters, each on other rows.
      tensor: parts of heads, feed-forward width and vocabulary.
      sequence: parts of a row; only 1.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1

    def __post_init__(self):
        _check_axes(dataclasses.asdict(self), "mesh.")

    def make(self) -> Mesh:
        """The mesh, of the first devices of `jax.devices()`."""
        return make_mesh(**dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class RolloutMeshSettings:
    """`config.rollout_mesh`: how the devices that train share the work of sampling.

    The weights that sample are split over tensor alone and repeated over data; slots are split over data. A small
    tensor makes tokens cheap; a larger one lets larger weights fit.

    Attributes:
      data: groups of devices, each with a whole copy of the weights; 0: as many as `tensor` leaves.
      tensor: parts of the weights; 0: as in `config.mesh`, where they are known to fit.
    """

    data: int = 0
    tensor: int = 0

    def __post_init__(self):
        for name, size in dataclasses.asdict(self).items():
            if size < 0:
                raise ValueError(f"rollout_mesh.{name}={size}; allowed: at least 1, or 0 to choose")

    def make(self, training_mesh: Mesh) -> Mesh:
        """The mesh, of the devices of `training_mesh`; see `rollout_mesh`."""
        return rollout_mesh(training_mesh, data=self.data, tensor=self.tensor)


def make_mesh(
    data: int = 1, fsdp: int = 1, tensor: int = 1, sequence: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh of `data * fsdp * tensor * sequence` devices with automatic partitioning on every axis.

    Args:
      data: copies of the parameters, each on other rows.
      fsdp: parts of the parameters, each on other rows.
      tensor: parts of heads, feed-forward width and vocabulary.
      sequence: parts of a row; only 1.
      devices: in order, as many as the product; default the first so many of `host_major(jax.devices())`, with several
        hosts all of them.

    Raises:
      ValueError: an axis below 1, sequence above 1, or a product that differs from the devices there are.
    """
    sizes = dict(zip(MESH_AXES, (data, fsdp, tensor, sequence), strict=True))
    _check_axes(sizes, "mesh axis ")
    needed = math.prod(sizes.values())
    available = host_major(jax.devices()) if devices is None else list(devices)
    # A host without a device in the mesh would take no part in collectives that wait for it.
    all_of_them = devices is not None or jax.process_count() > 1
    if needed > len(available) or (all_of_them and needed < len(available)):
        shape = " * ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"mesh {shape} needs {needed} devices, there are {len(available)}")
    grid = np.asarray(available[:needed], dtype=object).reshape(tuple(sizes.values()))
    # Auto: the compiler propagates shardings; jax.make_mesh would make them part of every array's type.
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def platform(mesh: Mesh) -> str:
    """What the devices of a mesh are: "cpu", "gpu" or "tpu"; of devices that are only described, too."""
    return mesh.devices.flat[0].platform


def rollout_mesh(training_mesh: Mesh, *, data: int = 0, tensor: int = 0) -> Mesh:
    """The devices of a training mesh, in the same order, as `data * tensor` for sampling.

    Args:
      training_mesh: from `make_mesh`.
      data: groups of devices; 0: all devices / `tensor`.
      tensor: devices of a group, which share one copy of the weights; 0: as in the training mesh.

    Raises:
      ValueError: a product that is not the number of devices.
    """
    devices = training_mesh.devices.flatten().tolist()
    tensor = tensor or (training_mesh.shape["tensor"] if not data else len(devices) // data)
    data = data or len(devices) // tensor
    if data * tensor != len(devices):
        raise ValueError(
            f"rollout_mesh.data={data} * rollout_mesh.tensor={tensor}; allowed: a product of {len(devices)}, "
            "the devices of the mesh that trains"
        )
    return make_mesh(data=data, tensor=tensor, devices=devices)


def host_major(devices: Iterable[jax.Device]) -> list[jax.Device]:
    """Devices slice after slice and host after host, by id within a host.

    Where hosts own blocks of a torus, `jax.devices()` may go back and forth between them.
    """
    return sorted(devices, key=lambda d: (getattr(d, "slice_index", None) or 0, d.process_index, d.id))


def _check_axes(sizes: dict[str, int], prefix: str) -> None:
    for axis, size in sizes.items():
        if size < 1:
            raise ValueError(f"{prefix}{axis}={size}; allowed: at least 1")
    if sizes["sequence"] > 1:
        raise ValueError(f"{prefix}sequence={sizes['sequence']}; allowed: 1 (a row is not split)")

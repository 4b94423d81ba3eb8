"""Several hosts: how they find each other, whose work is whose, and the part of a mesh that is a host's own.

A host is one process of jax with devices of its own. Which one it is says `jax.process_index()` alone: on TPUs that
is not the rank that a launcher counts.
"""

import os
import pathlib
import secrets
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from turnppo_jax.parallel.agreement import known_to_all, together
from turnppo_jax.parallel.exchange import exchange_json

# NFS looks again at a directory that it has read after at most a minute, by default.
SHARED_WITHIN_S = 60.0


def start(
    multihost: bool = False,
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Joins this process to the other hosts; call it before anything that uses a device.

    Args:
      multihost: find the others by what the machine says (TPU pod slices, GKE, Slurm).
      coordinator: "HOST:PORT" of process 0, in place of `multihost`; then the two below are needed too.
      num_processes: hosts in all.
      process_id: of this one, 0..num_processes-1.

    Raises:
      ValueError: an argument that is missing or out of range, or a process that is one of several although nothing
        says so.
    """
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    # It would catch SIGTERM, which ends a process or stops a run.
    jax.config.update("jax_enable_preemption_service", False)
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        raise ValueError(f"--{missing[0]} is missing; allowed: all of --{', --'.join(given)}, or none")
    if not missing:
        name, _, port = coordinator.rpartition(":")
        if not name or not port.isdigit():
            raise ValueError(f"--coordinator={coordinator}; allowed: HOST:PORT of process 0")
        if num_processes < 1:
            raise ValueError(f"--num_processes={num_processes}; allowed: at least 1")
        if not 0 <= process_id < num_processes:
            raise ValueError(f"--process_id={process_id}; allowed: 0 to {num_processes - 1} (num_processes - 1)")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(coordinator, num_processes, process_id, cluster_detection_method="deactivate")
    elif multihost:
        jax.distributed.initialize()
    elif jax.process_count() > 1:
        raise ValueError(
            f"this process is number {jax.process_index()} of {jax.process_count()} hosts and was started alone; "
            "start the command on every host with --multihost"
        )


def is_first() -> bool:
    """Whether this host writes the files that a run has once."""
    return jax.process_index() == 0


def share_of(num: int, index: int, count: int) -> range:
    """Which of `num` pieces of work host `index` of `count` takes: neighbours, and equal numbers up to one."""
    if not 0 <= index < count:
        raise ValueError(f"index={index}; allowed: 0 to {count - 1} (count - 1)")
    return range(num * index // count, num * (index + 1) // count)


def own_share(num: int) -> range:
    """`share_of` this host."""
    return share_of(num, jax.process_index(), jax.process_count())


def check_inside_hosts(mesh: Mesh, name: str) -> None:
    """Refuses a mesh whose axes `tensor` or `sequence` reach from one host to another.

    Two such hosts own the same rows and slots, and have to take the same decisions about them: `rollout.lockstep`.

    Args:
      mesh: of all hosts.
      name: of the config's section, for the message.

    Raises:
      ValueError: naming axis, its size, and the devices of a host.
    """
    owners = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
    for axis in ("tensor", "sequence"):
        along = np.moveaxis(owners, mesh.axis_names.index(axis), -1)
        if np.any(along != along[..., :1]):
            # Counted in the mesh, which may be that of a slice that is only planned.
            devices = np.unique(owners, return_counts=True)[1].max()
            raise ValueError(
                f"{name}.{axis}={mesh.shape[axis]} reaches across hosts, which have {devices} devices each; allowed: "
                "an axis inside a host, or rollout.lockstep=True"
            )


def host_mesh(mesh: Mesh, *, lockstep: bool) -> Mesh:
    """The mesh that this host samples on: its own part of the rollout mesh, in lockstep the whole of it.

    Raises:
      ValueError: outside lockstep, a tensor axis that reaches across hosts.
    """
    if lockstep:
        return mesh
    check_inside_hosts(mesh, "rollout_mesh")
    return local_mesh(mesh)


def local_mesh(mesh: Mesh) -> Mesh:
    """The part of a mesh of all hosts that this host's devices form; the mesh itself where there is one host.

    Raises:
      ValueError: they form no part of their own.
    """
    local = np.vectorize(lambda device: device.process_index == jax.process_index(), otypes=[bool])(mesh.devices)
    if local.all():
        return mesh
    at = np.argwhere(local)
    box = tuple(slice(low, high + 1) for low, high in zip(at.min(axis=0), at.max(axis=0))) if len(at) else ()
    if not len(at) or not local[box].all():
        sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
        raise ValueError(f"mesh {sizes}: the devices of host {jax.process_index()} form no part of their own in it")
    return Mesh(mesh.devices[box], mesh.axis_names, axis_types=mesh.axis_types)


def local_view(tree: Any, mesh: Mesh) -> Any:
    """This host's part of arrays that every host holds whole, as arrays on its own devices.

    The view holds the very buffers of `tree`: nothing is copied, and neither may be donated while the other is used.

    Args:
      tree: arrays on a mesh of all hosts, replicated over the axes that reach across hosts.
      mesh: `local_mesh` of that mesh, or, to get the arrays themselves, that mesh.

    Raises:
      ValueError: an array that this host does not hold whole.
    """

    def view(x: jax.Array) -> jax.Array:
        if len(x.sharding.device_set) == mesh.size:
            return x
        sharding = NamedSharding(mesh, x.sharding.spec)
        shards = {shard.device: shard.data for shard in x.addressable_shards}
        want = sharding.shard_shape(x.shape)
        for device in mesh.devices.flat:
            if device not in shards or shards[device].shape != want:
                raise ValueError(
                    f"an array {list(x.shape)} split as {x.sharding.spec} is not whole on host {jax.process_index()}"
                )
        return jax.make_array_from_single_device_arrays(
            x.shape, sharding, [shards[device] for device in mesh.devices.flat]
        )

    return jax.tree.map(view, tree)


def check_same(name: str, value: Mapping[str, Any]) -> None:
    """Refuses to go on where the hosts hold different values; every host raises.

    Args:
      name: of the value, for the message.
      value: JSON types.

    Raises:
      ValueError: naming the first field that differs, and who has which value.
    """
    everyone = exchange_json(value)
    for index, other in enumerate(everyone):
        if other != everyone[0]:
            field, first, second = _difference(everyone[0], other, name)
            raise known_to_all(
                ValueError(f"{field} is {first!r} on host 0 and {second!r} on host {index}; allowed: the same on all")
            )


def check_shared(directory: pathlib.Path) -> None:
    """Makes a directory and sees that every host means the same one; every host raises.

    Checkpoints are written by all hosts, and each must find what the others wrote.

    Raises:
      ValueError: a host does not see what host 0 writes there.
      HostError: the directory cannot be made.
    """
    if jax.process_count() == 1:
        directory.mkdir(parents=True, exist_ok=True)
        return
    probe = ""
    with together():
        if is_first():
            directory.mkdir(parents=True, exist_ok=True)
            probe = f".hosts-{secrets.token_hex(8)}"
            (directory / probe).touch()
    probe = exchange_json(probe)[0]
    missing = [index for index, sees in enumerate(exchange_json(_appears(directory, probe))) if not sees]
    if is_first():
        (directory / probe).unlink()
    if missing:
        raise known_to_all(
            ValueError(
                f"workdir {directory} of host {missing[0]} is not that of host 0; allowed: a directory that all share"
            )
        )


def _appears(directory: pathlib.Path, name: str) -> bool:
    """Whether a file that another host has made is seen here, for which network file systems may need a moment."""
    deadline = time.monotonic() + SHARED_WITHIN_S
    while True:
        # Listed rather than asked for by name: file systems remember that a name was not there.
        if directory.is_dir() and name in os.listdir(directory):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)


def _difference(one: Any, other: Any, name: str) -> tuple[str, Any, Any]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            if one.get(key) != other.get(key):
                return _difference(one.get(key), other.get(key), f"{name}.{key}")
    return name, one, other

"""TPU topologies by name, and what is known of their chips."""

import dataclasses
import math
import re
from typing import Any

from jax.experimental import topologies

from turnppo_jax.command_line import UserError
from turnppo_jax.planning import environment

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device as jax counts them: a chip, but for tpu7x, whose chips are two devices each.

    Attributes:
      dimensions: axes of the topology, 2 or 3.
      flops: peak bfloat16 FLOP/s.
      hbm_bytes: what the compiler lets a program use; the data sheet's size less what the runtime keeps.
      hbm_bandwidth: bytes/s.
      link_bandwidth: bytes/s that one link to a neighbour carries one way.
      host: chips of one host along each axis, in a topology of several hosts.
      whole_hosts: topologies that are one host of their own.
      wraps_at: the ring closes along an axis of a multiple of so many chips.
      wraps_whole: it closes only if it does so along all axes.
      devices: of one chip.
      options: of `get_topology_desc`.
    """

    dimensions: int
    flops: float
    hbm_bytes: float
    hbm_bandwidth: float
    link_bandwidth: float
    host: tuple[int, ...]
    whole_hosts: tuple[tuple[int, ...], ...]
    wraps_at: int
    wraps_whole: bool
    devices: int = 1
    options: tuple[tuple[str, Any], ...] = ()


# FLOP/s, HBM bandwidth and links: docs.cloud.google.com/tpu/docs, pages v4, v5e, v5p, v6e and tpu7x. They print the
# interconnect of a chip in both directions together, 400 GB/s (v5e), 800 (v6e), 600 (v4), 1,200 (v5p, tpu7x), over 4
# ports (2D) or 6 (3D): 50 or 100 GB/s a port and direction. Of that, 90 % reaches a program, as "How to Scale Your
# Model" (jax-ml.github.io/scaling-book, chapter 2) tabulates. HBM bytes: the compiler's own limit in its refusals.
CHIPS: dict[str, Chip] = {
    "v4": Chip(
        3, 275e12, 30.75 * GIB, 1228e9, 45e9, (2, 2, 1), ((2, 2, 1),), 4, True,
        options=(("chip_config_name", "megacore"),),
    ),
    "v5e": Chip(2, 197e12, 15.75 * GIB, 819e9, 45e9, (2, 2), ((1, 1), (2, 2), (2, 4)), 16, False),
    "v5p": Chip(3, 459e12, 95.74 * GIB, 2765e9, 90e9, (2, 2, 1), ((2, 2, 1),), 4, True),
    "v6e": Chip(2, 918e12, 31.25 * GIB, 1638e9, 90e9, (2, 2), ((1, 1), (2, 2), (2, 4)), 16, False),
    # Halves of a chip: 2,307 TFLOP/s, 7,380 GB/s.
    "tpu7x": Chip(3, 1153.5e12, 94.75 * GIB, 3690e9, 90e9, (2, 2, 1), ((2, 2, 1),), 4, True, devices=2),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice of TPU chips.

    Attributes:
      name: as given, "v5e:4x4".
      kind: key of `CHIPS`.
      shape: chips along each axis.
    """

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def chip(self) -> Chip:
        """What is known of its chips."""
        return CHIPS[self.kind]

    @property
    def host_shape(self) -> tuple[int, ...]:
        """Chips of one host along each axis."""
        return self.shape if self.shape in self.chip.whole_hosts else self.chip.host

    @property
    def num_devices(self) -> int:
        """Devices of the whole slice."""
        return math.prod(self.shape) * self.chip.devices

    @property
    def num_hosts(self) -> int:
        """Hosts of the whole slice."""
        return math.prod(self.shape) // math.prod(self.host_shape)

    @property
    def host(self) -> "Topology":
        """One host alone: where rollout programs run."""
        return Topology(f"{self.kind}:{'x'.join(map(str, self.host_shape))}", self.kind, self.host_shape)

    @property
    def wraps(self) -> tuple[bool, ...]:
        """For each axis whether its last chip is linked to its first."""
        closed = [size % self.chip.wraps_at == 0 for size in self.shape]
        return tuple(all(closed) if self.chip.wraps_whole else one for one in closed)

    def devices(self) -> list[Any]:
        """The devices in the order that jax lists them on such a slice.

        Raises:
          UserError: libtpu is not installed, or it knows no such topology.
        """
        environment.prepare()
        depth = 3 - len(self.shape)
        options = dict(self.chip.options)
        options["chips_per_host_bounds"] = self.host_shape + (1,) * depth
        if any(self.wraps):
            options["wrap"] = self.wraps + (False,) * depth
        try:
            found = topologies.get_topology_desc(platform="tpu", topology_name=self.name, **options).devices
        except Exception as error:
            raise UserError(f"topology={self.name!r}: libtpu knows no such slice ({_first_line(error)})") from None
        return list(found)


def parse(name: str) -> Topology:
    """The topology of a name "TYPE:XxY" or "TYPE:XxYxZ".

    Raises:
      UserError: another form, an unknown type, or a number of axes that the type does not have; says what is allowed.
    """
    match = re.fullmatch(r"([a-z0-9]+):(\d+(?:x\d+)+)", name)
    if match is None or match[1] not in CHIPS:
        raise UserError(
            f"topology={name!r}; allowed: TYPE:XxY with TYPE {', '.join(_kinds(2))}, or TYPE:XxYxZ with TYPE "
            f"{', '.join(_kinds(3))}; for example v5e:4x4 (16 chips), v5p:2x2x4 (16 chips)"
        )
    shape = tuple(int(size) for size in match[2].split("x"))
    chip = CHIPS[match[1]]
    if len(shape) != chip.dimensions:
        form = "x".join("XYZ"[: chip.dimensions])
        raise UserError(f"topology={name!r}: {match[1]} has {chip.dimensions} axes; allowed: {match[1]}:{form}")
    topology = Topology(name, match[1], shape)
    if any(size < 1 or size % part for size, part in zip(shape, topology.host_shape, strict=True)):
        host = "x".join(map(str, chip.host))
        alone = ", ".join("x".join(map(str, shape)) for shape in chip.whole_hosts)
        raise UserError(f"topology={name!r}: not made of whole hosts of {host} chips; allowed: multiples, or {alone}")
    return topology


def _kinds(dimensions: int) -> list[str]:
    return [name for name, chip in CHIPS.items() if chip.dimensions == dimensions]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

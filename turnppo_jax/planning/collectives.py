"""Collectives of a compiled program: which, how many bytes, and how long they take over the links of the slice."""

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np

from turnppo_jax.planning import hlo, loops
from turnppo_jax.planning.hlo import Instruction, Module
from turnppo_jax.planning.topology import Topology

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
# A fusion of this name is how the TPU compiler writes a reduce-scatter: an all-reduce and the slice that is kept. One
# that it leaves apart, over all chips of a slice, is an all-reduce and moves twice as much.
_SCATTERED = "all-reduce-scatter"
# Fusions of other work with a collective that is under way, and what ends it.
_HIDING = "async_collective_fusion"
_ENDS = '"AsyncCollectiveDone"'
# Numbers from 0 on in an array, axes in another order: [2,4]T(1,0).
_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the program, over all the times it runs.

    Attributes:
      kind: one of `KINDS`.
      times: how often it runs.
      payload: bytes of one run on one chip: the whole of what is gathered, reduced, exchanged or sent.
      received: bytes that one run brings to one chip over its links.
      group: numbers of the devices that take part with device 0 of the first group; of a permute (source, target).
      where: the operation of the program that it comes from.
    """

    kind: str
    times: float
    payload: float
    received: float
    group: tuple[int, ...]
    where: str


def collectives(module: Module, dynamic_trips: Sequence[float] = (), branch: int = 0) -> list[Collective]:
    """The collectives of a program, largest traffic first.

    An asynchronous collective stands in the text several times: where it begins, in every fusion that hides a part of
    it, and where it ends. It counts where it begins. (Channels do not tell: those of `shard_map` all have the same.)

    Args:
      module: from `hlo.parse`.
      dynamic_trips: see `loops.visits`.
      branch: see `loops.visits`.
    """
    found = []
    for visit in loops.visits(module, dynamic_trips, branch):
        instructions = module.computations[visit.computation].instructions.values()
        if visit.computation.startswith(_HIDING) or any(_ENDS in one.attributes for one in instructions):
            continue
        for instruction in instructions:
            kind = instruction.opcode.removesuffix("-start")
            if kind in KINDS:
                if kind == "all-reduce" and visit.computation.startswith(_SCATTERED):
                    kind = "reduce-scatter"
                found.append(_collective(module, visit.computation, instruction, kind, visit.times))
    return sorted(found, key=lambda one: -one.times * one.received)


def seconds(collective: Collective, topology: Topology, coordinates: Sequence[Sequence[int]]) -> float:
    """Time of all runs of a collective, one after the other, on links that carry nothing else.

    Args:
      collective: from `collectives`.
      topology: gives the links.
      coordinates: [devices, axes] place of each device of the program in the slice, in the program's order.
    """
    chip = topology.chip
    link = chip.link_bandwidth / chip.devices
    places = np.asarray([coordinates[device] for device in collective.group])[:, : len(topology.shape)]
    total = collective.times * collective.received
    if total == 0:
        return 0.0
    spread = [axis for axis in range(places.shape[1]) if len(set(places[:, axis])) > 1]
    if not spread:  # the devices of one chip
        return total / (6 * chip.link_bandwidth)
    if collective.kind == "collective-permute":
        hops = 0
        for axis in spread:
            distance = abs(int(places[0, axis]) - int(places[1, axis]))
            hops += min(distance, topology.shape[axis] - distance) if topology.wraps[axis] else distance
        return total * hops / link
    if collective.kind == "all-to-all":
        # Half of what each chip sends crosses the middle of the longest axis, over one link a row of chips.
        longest = max(spread, key=lambda axis: len(set(places[:, axis])))
        ways = 2 if topology.wraps[longest] else 1
        return total * len(set(places[:, longest])) / (4 * ways * link)
    return total / (link * sum(_links(places[:, axis], topology, axis) for axis in spread))


def by_kind(found: Sequence[Collective]) -> dict[str, dict[str, float]]:
    """For each kind its number of places in the program, of runs, and the payload and received bytes of all runs."""
    out: dict[str, dict[str, float]] = {}
    for one in found:
        total = out.setdefault(one.kind, {"sites": 0, "runs": 0.0, "payload_bytes": 0.0, "received_bytes": 0.0})
        total["sites"] += 1
        total["runs"] += one.times
        total["payload_bytes"] += one.times * one.payload
        total["received_bytes"] += one.times * one.received
    return out


def groups(attributes: str) -> list[tuple[int, ...]]:
    """The groups of `replica_groups=...`: listed, as an array of numbers, or as axes of a mesh.

    Raises:
      ValueError: another form.
    """
    text = attributes[attributes.index("replica_groups=") + len("replica_groups=") :]
    listed = re.match(r"\{(\{[\d,{} ]*\})\}", text)
    if listed:
        return [tuple(int(x) for x in part.split(",")) for part in re.findall(r"\{([\d, ]+)\}", listed[1])]
    iota = re.match(rf"\[([\d,]+)\]<={_IOTA}", text)
    if iota:
        return _rows(_iota(iota[2], iota[3]).reshape([int(x) for x in iota[1].split(",")]))
    mesh = re.match(rf"mesh\[([^\]]*)\](?:, device_ids=\({_IOTA}\))?\s*\{{([^}}:]*)\}}", text)
    if mesh:
        axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        devices = _iota(mesh[2] or str(math.prod(axes.values())), mesh[3]).reshape(tuple(axes.values()))
        within = [name for name in axes if f"'{name}'" in mesh[4]]
        order = [list(axes).index(name) for name in [*(name for name in axes if name not in within), *within]]
        return _rows(devices.transpose(order).reshape(-1, math.prod(axes[name] for name in within)))
    raise ValueError(f"replica_groups={text[:60]!r}; allowed: {{{{0,1}}}}, [2,8]<=[16] or mesh['a'=2] {{'a'}}")


def _iota(shape: str, order: str | None) -> np.ndarray:
    """The numbers from 0 on in an array of a shape "2,4", its axes in an order "1,0"."""
    sizes = [int(x) for x in shape.split(",")]
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    return devices.transpose([int(x) for x in order.split(",")]) if order else devices


def _rows(devices: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(int(x) for x in row) for row in devices]


def _collective(module: Module, computation: str, instruction: Instruction, kind: str, times: float) -> Collective:
    where = re.search(r'op_name="([^"]*)"', instruction.attributes)
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{([\d,{} ]*)\}", instruction.attributes)
        group = tuple(int(x) for x in re.search(r"(\d+),(\d+)", pairs[1]).groups())
        payload = received = max((size for size, _ in hlo.arrays(instruction.shape)), default=0.0)
    else:
        group = groups(instruction.attributes)[0]
        names = module.computations[computation].instructions
        given = sum(hlo.num_bytes(names[name].shape) for name in instruction.operands)
        size = len(group)
        others = (size - 1) / size
        payload = given * size if kind == "all-gather" else given
        received = payload * others * (2 if kind == "all-reduce" else 1)
    return Collective(kind, times, payload, received, group, where[1] if where else "")


def _links(coordinates: np.ndarray, topology: Topology, axis: int) -> float:
    """Links along an axis that bring data to a chip of the group, less what they carry for interleaved groups."""
    values = sorted({int(x) for x in coordinates})
    closed = topology.wraps[axis] and len(values) == topology.shape[axis]
    return (2 if closed else 1) * len(values) / (values[-1] - values[0] + 1)

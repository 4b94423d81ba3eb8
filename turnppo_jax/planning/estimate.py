"""What one compiled program does and how long that takes at best: FLOPs, memory, links, and a roofline over the three.

    T(overlap) = max(FLOPs / peak, bytes / bandwidth of the memory) + (1 - overlap) · time of the collectives

    MFU = FLOPs that a perfect program would need / (chips · peak · T)

No program is run: launch times, latencies and imperfect kernels are not in it. It is a bound.
"""

import dataclasses

from turnppo_jax.planning import collectives, flops, hlo, kernel_costs, traffic
from turnppo_jax.planning.compiling import Compiled
from turnppo_jax.planning.programs import Program

OVERLAPS = (0.0, 0.5, 1.0)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """One run of one program on one chip.

    Attributes:
      flops: executed, padding and recomputation included.
      recomputed: of those, made again for the backward pass.
      repeated: of those, work that another chip does too.
      memory_bytes: through the chip's main memory.
      collectives: by kind, see `collectives.by_kind`.
      largest: the collectives with the most traffic.
      compute_s, memory_s, link_s: seconds of each at its peak.
      needed_flops: of a perfect program on real tokens; 0 where that means nothing.
      peak_flops: of the chip.
    """

    flops: float
    recomputed: float
    repeated: float
    memory_bytes: float
    collectives: dict[str, dict[str, float]]
    largest: tuple[collectives.Collective, ...]
    compute_s: float
    memory_s: float
    link_s: float
    needed_flops: float
    peak_flops: float

    def seconds(self, overlap: float) -> float:
        """Time of one run when this share of the collectives is hidden behind other work."""
        return max(self.compute_s, self.memory_s) + (1 - overlap) * self.link_s

    def mfu(self, overlap: float) -> float:
        """Model FLOPs utilisation at that time."""
        return self.needed_flops / (self.peak_flops * self.seconds(overlap)) if self.seconds(overlap) else 0.0

    @property
    def bound(self) -> str:
        """What takes longest: "compute", "memory" or "links"."""
        times = {"compute": self.compute_s, "memory": self.memory_s, "links": self.link_s}
        return max(times, key=times.__getitem__)


def estimate(program: Program, compiled: Compiled, *, needed_flops: float = 0.0, live_tokens: float = 0.0) -> Estimate:
    """Reads a compiled program.

    Args:
      program: which one.
      compiled: what the compiler made of it.
      needed_flops: of a perfect program over all chips.
      live_tokens: that each slot of the cache holds.
    """
    chips, chip = program.mesh.size, program.topology.chip
    module = hlo.parse(compiled.text)
    loops = {"dynamic_trips": program.dynamic, "branch": program.branch}
    found = collectives.collectives(module, **loops)
    places = [device.coords for device in program.mesh.devices.flat]
    link_s = sum(collectives.seconds(one, program.topology, places) for one in found)

    def traced(function):
        jaxpr = function.trace(*program.arguments).jaxpr
        return flops.traced_flops(jaxpr, program.loops, kernel_costs.costs(live_tokens)) * (1 / chips)

    whole = traced(program.function)
    recomputed = whole.total - traced(program.plain).total if program.plain is not None else 0.0
    executed = flops.partitioned_flops(hlo.parse(compiled.partitioned), **loops) + whole.kernels
    moved = traffic.memory_bytes(module, **loops) + whole.kernel_bytes
    return Estimate(
        flops=executed,
        recomputed=max(0.0, recomputed),
        repeated=max(0.0, executed - whole.total),
        memory_bytes=moved,
        collectives=collectives.by_kind(found),
        largest=tuple(found[:5]),
        compute_s=executed / chip.flops,
        memory_s=moved / chip.hbm_bandwidth,
        link_s=link_s,
        needed_flops=needed_flops / chips,
        peak_flops=chip.flops,
    )

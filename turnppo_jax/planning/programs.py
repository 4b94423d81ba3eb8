"""One program of a run as `plan` sees it: what makes it, what it is called with, and how often."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from turnppo_jax.planning.topology import Topology


@dataclasses.dataclass(frozen=True)
class Program:
    """One program and where it runs.

    Attributes:
      name: as printed.
      phase: "rollout" or "learn".
      topology: that it is compiled for.
      mesh: of its devices.
      function: jitted.
      arguments: of the function, shapes with shardings.
      holds: names of the residents that are among the arguments.
      params: parameters of the model that it computes; None where it computes none.
      runs: how often a training step runs it.
      loops: iterations of its `while` loops, outermost first.
      dynamic: of those, the loops whose number of iterations the compiled program does not hold.
      branch: of its conditionals, the one that runs; 0 is that for false.
      plain: the same function without recomputation in the backward pass; None where there is none.
    """

    name: str
    phase: str
    topology: Topology
    mesh: Mesh
    function: Callable
    arguments: tuple[Any, ...]
    holds: tuple[str, ...]
    runs: float
    params: Any = None
    loops: tuple[float, ...] = ()
    dynamic: tuple[float, ...] = ()
    branch: int = 0
    plain: Callable | None = None

    @property
    def parameters(self) -> int:
        """Parameters of its model."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.params))

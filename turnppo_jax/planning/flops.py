"""Floating-point operations of a program, loops counted in full.

Counted twice, from two sides: in the program as it was traced (a jaxpr), where every product stands as it was written,
what is computed again for the backward pass included; and in the partitioned program, where the products of one chip
stand with its part of the shapes, so that work which all chips repeat shows.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

from turnppo_jax.planning import hlo, loops
from turnppo_jax.planning.hlo import Module

# Of one call of a kernel, by its equation: (grid points that compute, bytes of main memory).
KernelCosts = Callable[[Any], tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs over all chips.

    Attributes:
      products: of dot products and convolutions.
      kernels: of kernels.
      kernel_bytes: that the kernels move through main memory.
    """

    products: float = 0.0
    kernels: float = 0.0
    kernel_bytes: float = 0.0

    @property
    def total(self) -> float:
        """FLOPs of products and kernels."""
        return self.products + self.kernels

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(
            self.products + other.products, self.kernels + other.kernels, self.kernel_bytes + other.kernel_bytes
        )

    def __mul__(self, times: float) -> "Flops":
        return Flops(times * self.products, times * self.kernels, times * self.kernel_bytes)


def traced_flops(jaxpr: Any, loop_trips: Sequence[float] = (), kernel_costs: KernelCosts | None = None) -> Flops:
    """FLOPs of a traced program.

    Args:
      jaxpr: a Jaxpr or ClosedJaxpr.
      loop_trips: iterations of `while` loops, which a jaxpr does not hold: the first for the outermost, the next for
        those inside it. Scans have their length.
      kernel_costs: of a pallas_call; None counts the products of its body once a grid point, and no bytes.

    Raises:
      ValueError: a while loop with products in it and no entry for it.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    total = Flops()
    for equation in jaxpr.eqns:
        total += _equation(equation, tuple(loop_trips), kernel_costs)
    return total


def partitioned_flops(module: Module, dynamic_trips: Sequence[float] = (), branch: int = 0) -> float:
    """FLOPs of the dot products of one chip, kernels left out.

    Args:
      module: of the partitioned program before products are fused (`hlo.parse` of the compiler's dump).
      dynamic_trips: see `loops.visits`.
      branch: see `loops.visits`.
    """
    total = 0.0
    for visit in loops.visits(module, dynamic_trips, branch):
        instructions = module.computations[visit.computation].instructions
        for instruction in instructions.values():
            if instruction.opcode == "dot":
                left = hlo.dimensions(instructions[instruction.operands[0]].shape)
                contracted = math.prod(left[axis] for axis in _axes(instruction.attributes, "lhs_contracting_dims"))
                total += visit.times * 2 * math.prod(hlo.dimensions(instruction.shape)) * contracted
            elif instruction.opcode == "convolution":
                kernel = hlo.dimensions(instructions[instruction.operands[1]].shape)
                labels = instruction.attributes.split("dim_labels=")[1].split("->")[0].split("_")[1]
                outputs = math.prod(hlo.dimensions(instruction.shape))
                total += visit.times * 2 * outputs * math.prod(kernel) / kernel[labels.index("o")]
    return total


def _equation(equation: Any, loop_trips: tuple[float, ...], kernel_costs: KernelCosts | None) -> Flops:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return Flops(products=_dot(equation))
    if name == "conv_general_dilated":
        return Flops(products=_convolution(equation))
    if name == "pallas_call":
        return _kernel(equation, loop_trips, kernel_costs)
    if name == "while":
        body = traced_flops(params["body_jaxpr"], loop_trips[1:], kernel_costs)
        if body.total and not loop_trips:
            raise ValueError("a while loop holds products and loop_trips has no entry for it; allowed: one a level")
        return body * loop_trips[0] if loop_trips else body
    if name == "cond":
        return max((traced_flops(b, loop_trips, kernel_costs) for b in params["branches"]), key=lambda f: f.total)
    inner = Flops()
    for value in params.values():
        for jaxpr in value if isinstance(value, tuple | list) else (value,):
            if isinstance(jaxpr, core.Jaxpr | core.ClosedJaxpr):
                inner += traced_flops(jaxpr, loop_trips, kernel_costs)
    if name == "scan":
        return inner * params["length"]
    if name == "shard_map":  # the body is that of one shard
        return inner * math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    return inner


def _kernel(equation: Any, loop_trips: tuple[float, ...], kernel_costs: KernelCosts | None) -> Flops:
    """The products of the body, for every grid point that computes."""
    body = traced_flops(equation.params["jaxpr"], loop_trips)
    if kernel_costs is None:
        return Flops(kernels=body.total * math.prod(equation.params["grid_mapping"].grid))
    points, moved = kernel_costs(equation)
    return Flops(kernels=body.total * points, kernel_bytes=moved)


def _dot(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)


def _convolution(equation: Any) -> float:
    kernel = equation.invars[1].aval.shape
    outputs_axis = equation.params["dimension_numbers"].rhs_spec[0]
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) / kernel[outputs_axis]


def _axes(attributes: str, name: str) -> list[int]:
    inside = attributes.split(f"{name}={{")[1].split("}")[0] if f"{name}={{" in attributes else ""
    return [int(axis) for axis in inside.split(",") if axis]

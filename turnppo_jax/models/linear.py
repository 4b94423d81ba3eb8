"""Linear layers, one or several on the same input, with weights that lie in parts on the devices of a mesh.

    y_i = x . kernel_i + bias_i

On a mesh (`jax.shard_map`, the axes from the table of rules):
  forward   gather over fsdp what a device lacks of the kernels, in their own dtype; multiply its own rows; where the
            contracted axis is split (tensor), sum the products
  backward  the same gather again (nothing whole is kept); the gradient of x summed once for all kernels; that of
            each kernel reduced straight to the part that a device holds, never whole
What crosses devices has the dtype of the operands; what is summed on a device is summed in float32.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from turnppo_jax.models.precision import matmul_precision
from turnppo_jax.parallel.collectives import gather, sum_over, sum_to_parts
from turnppo_jax.parallel.sharding import mesh_axes

# What checkpoint policies call the results of linear layers on a mesh.
PRODUCT = "product"

# An activation's axis beside a kernel's axis of another name.
_OF_ACTIVATIONS = {"embed": "hidden"}


class Linear(nnx.Module):
    """Kernel and bias of a layer that contracts the last `inputs` axes of its input.

    Args:
      params: {"kernel", "bias" or none}.
      axes: logical axes of the kernel.
      inputs: how many of them, from the first, are contracted.
    """

    def __init__(self, params: Mapping[str, Any], axes: tuple[str, ...], inputs: int = 1):
        self.kernel = nnx.Param(params["kernel"])
        self.bias = nnx.Param(params["bias"]) if "bias" in params else None
        self.axes = axes
        self.inputs = inputs


def project(x: jax.Array, layers: Sequence[Linear], mesh: Mesh | None = None) -> list[jax.Array]:
    """Outputs [B, T, ...] of linear layers on one input [B, T, ...], in its dtype."""
    kernels = tuple(layer.kernel[...] for layer in layers)
    if mesh is None or mesh.size == 1:
        products = [_dot(x, kernel, layer.inputs) for kernel, layer in zip(kernels, layers)]
    else:
        products = _products(x, kernels, _Plan(mesh, tuple(layer.axes for layer in layers), layers[0].inputs))
        # A policy of what to keep for the backward pass cannot look inside and sees the name.
        products = [checkpoint_name(y, PRODUCT) for y in products]
    return [y if layer.bias is None else y + layer.bias[...] for y, layer in zip(products, layers)]


def _dot(x: jax.Array, kernel: jax.Array, inputs: int) -> jax.Array:
    rows, outputs = x.shape[: x.ndim - inputs], kernel.shape[inputs:]
    width = math.prod(kernel.shape[:inputs])
    # One product of two matrices: with more axes XLA's CPU compiler makes the weight gradient from transposed
    # copies, at three times the cost.
    y = jnp.dot(x.reshape(-1, width), kernel.reshape(width, -1), precision=matmul_precision(x.dtype))
    return y.reshape(*rows, *outputs)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Where the arrays of some layers lie on a mesh.

    Attributes:
      mesh: the mesh.
      axes: logical axes of each kernel.
      inputs: contracted axes of each.
    """

    mesh: Mesh
    axes: tuple[tuple[str, ...], ...]
    inputs: int

    def names(self, axes: Sequence[str], shape: Sequence[int]) -> tuple[tuple[str, ...], ...]:
        """Mesh axes of each axis."""
        return tuple(mesh_axes(self.mesh, axis, size) for axis, size in zip(axes, shape, strict=True))

    def kernel(self, index: int, shape: Sequence[int]) -> tuple[tuple[str, ...], ...]:
        """Mesh axes that split a kernel."""
        return self.names(self.axes[index], shape)

    def as_activation(self, index: int, shape: Sequence[int]) -> tuple[tuple[str, ...], ...]:
        """Mesh axes that split the activations along the axes of a kernel."""
        return self.names([_OF_ACTIVATIONS.get(axis, axis) for axis in self.axes[index]], shape)

    def lacking(self, index: int, shape: Sequence[int]) -> tuple[tuple[str, ...], ...]:
        """Mesh axes over which a kernel is gathered before it meets the activations."""
        pairs = zip(self.kernel(index, shape), self.as_activation(index, shape))
        return tuple(tuple(name for name in split if name not in met) for split, met in pairs)

    def rows(self, shape: Sequence[int]) -> tuple[tuple[str, ...], ...]:
        """Mesh axes of the first two axes of activations [B, T, ...]."""
        return self.names(("rows", "columns"), shape[:2])


def _spec(names: Sequence[tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(split or None for split in names))


def _flat(names: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(name for split in names for name in split)


def _specs(plan: _Plan, x_shape, shapes):
    """(of x, of each kernel, of each output)."""
    rows = plan.rows(x_shape)
    acts = [plan.as_activation(index, shape) for index, shape in enumerate(shapes)]
    return (
        _spec(rows + acts[0][: plan.inputs]),
        tuple(_spec(plan.kernel(index, shape)) for index, shape in enumerate(shapes)),
        tuple(_spec(rows + act[plan.inputs :]) for act in acts),
    )


def _gathered(kernels, shapes, plan: _Plan):
    """Of each kernel the part that meets the device's activations."""
    out = []
    for index, (kernel, shape) in enumerate(zip(kernels, shapes)):
        for axis, names in enumerate(plan.lacking(index, shape)):
            kernel = gather(kernel, axis, names)
        out.append(kernel)
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _products(x, kernels, plan: _Plan):
    shapes = tuple(kernel.shape for kernel in kernels)
    contracted = _flat(plan.as_activation(0, shapes[0])[: plan.inputs])

    def local(x, kernels):
        products = (_dot(x, kernel, plan.inputs) for kernel in _gathered(kernels, shapes, plan))
        return tuple(sum_over(y, contracted) for y in products)

    x_spec, kernel_specs, out_specs = _specs(plan, x.shape, shapes)
    run = jax.shard_map(local, mesh=plan.mesh, in_specs=(x_spec, kernel_specs), out_specs=out_specs, check_vma=False)
    return run(x, kernels)


def _products_forward(x, kernels, plan):
    return _products(x, kernels, plan), (x, kernels)


def _products_backward(plan, saved, cotangents):
    x, kernels = saved
    shapes = tuple(kernel.shape for kernel in kernels)
    rows = _flat(plan.rows(x.shape))
    acts = [plan.as_activation(index, shape) for index, shape in enumerate(shapes)]
    precision = matmul_precision(x.dtype)

    def local(x, kernels, cotangents):
        width = math.prod(x.shape[2:])
        flat_x = x.reshape(-1, width)
        partial, kernel_gradients = {}, []
        for index, (kernel, dy) in enumerate(zip(_gathered(kernels, shapes, plan), cotangents)):
            dy = dy.reshape(flat_x.shape[0], -1)
            dx = jnp.dot(dy, kernel.reshape(width, -1).T, precision=precision, preferred_element_type=jnp.float32)
            # Outputs that are split over the same mesh axes share one sum over them.
            over = _flat(acts[index][plan.inputs :])
            partial[over] = partial[over] + dx if over in partial else dx
            gradient = jnp.dot(flat_x.T, dy, precision=precision).reshape(kernel.shape)
            kernel_gradients.append(sum_to_parts(gradient, rows, plan.lacking(index, shapes[index])))
        dx = sum(sum_over(term.astype(x.dtype), over) for over, term in partial.items())
        return dx.reshape(x.shape), tuple(kernel_gradients)

    x_spec, kernel_specs, out_specs = _specs(plan, x.shape, shapes)
    run = jax.shard_map(
        local,
        mesh=plan.mesh,
        in_specs=(x_spec, kernel_specs, out_specs),
        out_specs=(x_spec, kernel_specs),
        check_vma=False,
    )
    return run(x, kernels, tuple(cotangents))


_products.defvjp(_products_forward, _products_backward)

"""Which tensor of a Hugging Face checkpoint holds which part of which parameter, and how its axes lie there."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from turnppo_jax.models.parameters import decoder_shapes
from turnppo_jax.models.sizes import ModelSizes

# The axes of a parameter that each axis of its tensor runs over. Projections are [out, in] in the files and [in, out]
# here, heads split: a pair (a, b) is one axis of the tensor, b the faster.
_Axes = tuple[tuple[int, ...], ...]
_TOP: dict[str, tuple[str, _Axes]] = {
    "embed/embedding": ("model.embed_tokens.weight", ((0,), (1,))),
    "final_norm/scale": ("model.norm.weight", ((0,),)),
    "lm_head/kernel": ("lm_head.weight", ((0,), (1,))),
}
# Below "layers" and below "model.layers.<index>."; the axes are those of one layer.
_LAYER: dict[str, tuple[str, _Axes]] = {
    "attention_norm/scale": ("input_layernorm.weight", ((0,),)),
    "attention/q/kernel": ("self_attn.q_proj.weight", ((1, 2), (0,))),
    "attention/q/bias": ("self_attn.q_proj.bias", ((0, 1),)),
    "attention/k/kernel": ("self_attn.k_proj.weight", ((1, 2), (0,))),
    "attention/k/bias": ("self_attn.k_proj.bias", ((0, 1),)),
    "attention/v/kernel": ("self_attn.v_proj.weight", ((1, 2), (0,))),
    "attention/v/bias": ("self_attn.v_proj.bias", ((0, 1),)),
    "attention/o/kernel": ("self_attn.o_proj.weight", ((2,), (0, 1))),
    "attention/q_norm/scale": ("self_attn.q_norm.weight", ((0,),)),
    "attention/k_norm/scale": ("self_attn.k_norm.weight", ((0,),)),
    "mlp_norm/scale": ("post_attention_layernorm.weight", ((0,),)),
    "mlp/gate/kernel": ("mlp.gate_proj.weight", ((1,), (0,))),
    "mlp/up/kernel": ("mlp.up_proj.weight", ((1,), (0,))),
    "mlp/down/kernel": ("mlp.down_proj.weight", ((1,), (0,))),
}
# Tables of rotary frequencies that old checkpoints carry; they are computed, not loaded.
COMPUTED_SUFFIX = "rotary_emb.inv_freq"

_BLOCK_ELEMENTS = 1 << 26


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint and the parameter, or the layer of a parameter, that it holds.

    Attributes:
      name: in the files.
      path: of the parameter, "layers/mlp/up/kernel".
      layer: index into the parameter's leading axis; None where it has no such axis.
      part_shape: of the parameter, or of one layer of it.
      axes: for each axis of the tensor the axes of `part_shape` that it runs over.
    """

    name: str
    path: str
    layer: int | None
    part_shape: tuple[int, ...]
    axes: _Axes

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor in the files."""
        return tuple(math.prod(self.part_shape[axis] for axis in group) for group in self.axes)

    def slices(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """What to read of the tensor for `part[index]`; of split heads whole heads are read.

        Args:
          index: a slice with bounds for each axis of `part_shape`.
        """
        out = []
        for first, *faster in self.axes:
            width = math.prod(self.part_shape[axis] for axis in faster)
            out.append(slice(index[first].start * width, index[first].stop * width))
        return tuple(out)

    def to_part(self, piece: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
        """`part[index]` out of what `slices(index)` has read; a view."""
        order = [axis for group in self.axes for axis in group]
        faster = {axis for group in self.axes for axis in group[1:]}
        whole = [self.part_shape[axis] if axis in faster else index[axis].stop - index[axis].start for axis in order]
        part = piece.reshape(whole).transpose(np.argsort(order))
        return part[tuple(index[axis] if axis in faster else slice(None) for axis in range(part.ndim))]

    def from_part(self, part: np.ndarray) -> np.ndarray:
        """The tensor, or its first rows where `part` is the first rows of an embedding or a head."""
        order = [axis for group in self.axes for axis in group]
        shape = [math.prod(part.shape[axis] for axis in group) for group in self.axes]
        return part.transpose(order).reshape(shape)


def tensors_of(sizes: ModelSizes) -> list[Tensor]:
    """Every tensor of a checkpoint of these sizes: embedding first, layer by layer, head last."""
    shapes = paths_of(decoder_shapes(sizes))

    def top(path):
        name, axes = _TOP[path]
        return Tensor(name, path, None, shapes[path].shape, axes)

    out = [top("embed/embedding")]
    for layer in range(sizes.num_layers):
        for path, (name, axes) in _LAYER.items():
            leaf = shapes.get(f"layers/{path}")
            if leaf is not None:
                out.append(Tensor(f"model.layers.{layer}.{name}", f"layers/{path}", layer, leaf.shape[1:], axes))
    return out + [top(path) for path in ("final_norm/scale", "lm_head/kernel") if path in shapes]


def paths_of(tree: Any) -> dict[str, Any]:
    """The leaves of nested dicts by path, "layers/mlp/up/kernel"."""
    return {"/".join(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def tensor_names(sizes: ModelSizes) -> list[str]:
    """Names of the tensors of a checkpoint of these sizes, in the order of the layers."""
    return [tensor.name for tensor in tensors_of(sizes)]


def row_blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    """The rows of a matrix or a vector in blocks that are small beside a model (at most 256 MB as float32)."""
    rows = max(1, _BLOCK_ELEMENTS // math.prod(shape[1:]))
    for start in range(0, shape[0], rows):
        yield slice(start, min(start + rows, shape[0]))

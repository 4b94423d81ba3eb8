"""What each axis of each parameter means, in one table by parameter path.

`parallel/sharding.py` holds the second table, from these names to the axes of a mesh. Metadata on parameters
would tie them to a module system; a path is all that optimizer moments and checkpoints keep.
"""

import re
from typing import Any

import jax

# The path must end so; what stands before it (backbone/, actor/params/, an optimizer's mu/) does not matter.
LOGICAL_AXES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"embed/embedding", ("vocab", "embed")),
    (r"lm_head/kernel", ("vocab", "embed")),
    (r"layers/attention/q/kernel", ("layers", "embed", "heads", "head_dim")),
    (r"layers/attention/q/bias", ("layers", "heads", "head_dim")),
    (r"layers/attention/[kv]/kernel", ("layers", "embed", "kv_heads", "head_dim")),
    (r"layers/attention/[kv]/bias", ("layers", "kv_heads", "head_dim")),
    (r"layers/attention/o/kernel", ("layers", "heads", "head_dim", "embed")),
    (r"layers/attention/[qk]_norm/scale", ("layers", "head_dim")),
    (r"layers/mlp/(gate|up)/kernel", ("layers", "embed", "mlp")),
    (r"layers/mlp/down/kernel", ("layers", "mlp", "embed")),
    (r"layers/(attention|mlp)_norm/scale", ("layers", "norm")),
    (r"final_norm/scale", ("norm",)),
    (r"value_head/kernel", ("norm",)),
    (r"cache/[kv]", ("layers", "cache_blocks", "slots", "kv_heads", "cache_row", "cache_column")),
    (r"cache/lengths", ("slots",)),
)
_COMPILED = tuple((re.compile(rf"(^|/){pattern}$"), axes) for pattern, axes in LOGICAL_AXES)


def logical_axes(params: Any) -> Any:
    """The tree of `params` with a tuple of axis names for each leaf; `()` for scalars.

    Args:
      params: arrays or shapes: a decoder, a critic, an optimizer's state over them, `{"cache": Cache}`.

    Raises:
      ValueError: a path that the table does not know, or whose entry has another number of axes.
    """
    return jax.tree.map_with_path(lambda path, leaf: axes_of(path_name(path), len(leaf.shape)), params)


def axes_of(path: str, ndim: int) -> tuple[str, ...]:
    """Axis names of one leaf; see `logical_axes`."""
    if ndim == 0:
        return ()
    for pattern, axes in _COMPILED:
        if pattern.search(path):
            if len(axes) != ndim:
                raise ValueError(f"parameter {path} has {ndim} axes, its entry in LOGICAL_AXES {len(axes)}: {axes}")
            return axes
    raise ValueError(f"parameter {path} has no entry in LOGICAL_AXES; add one to models/logical_axes.py")


def path_name(path: tuple[Any, ...]) -> str:
    """A tree path as "layers/mlp/up/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")

"""Checks that the kernels make before they compute: shapes and names."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def check_shapes(function: str, reference: str, shape: tuple[int, ...], **arrays: Any) -> None:
    """Raises ValueError unless every given array (None is passed over) has `shape`, that of `reference`."""
    for name, array in arrays.items():
        if array is not None and np.shape(array) != shape:
            raise ValueError(f"{function}: {name} has shape {np.shape(array)}, but {reference} asks for {shape}")


def check_choice(function: str, name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raises ValueError, listing what is known, unless `value` is one of `allowed`."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(f"{function}: {name}={value!r} is not known; choose one of {', '.join(map(repr, allowed))}")


def as_float(x: Any) -> jax.Array:
    """`x` in float32, or in its own type where that is wider (float64): integers and bfloat16 are widened."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def as_mask(mask: Any) -> jax.Array:
    """`mask` as booleans, so that a mask of integers can never act as an index."""
    return jnp.asarray(mask).astype(bool)

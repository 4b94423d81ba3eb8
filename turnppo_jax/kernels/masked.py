"""Sums, means and whitening over the entries that a mask lets in.

Everywhere: entries outside the mask are selected away before any arithmetic, so they may hold NaN or
infinity; an empty mask gives 0, never a division by zero.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turnppo_jax.kernels.checks import as_float, as_mask, check_shapes

# Spreads below max(_ABSOLUTE_FLOOR, _RELATIVE_FLOOR * max|x|) are float32 rounding, not signal: equal numbers
# of size s have a computed deviation of about 1e-7 s.
_ABSOLUTE_FLOOR = 1e-8
_RELATIVE_FLOOR = 1e-6


def masked_sum(x: Any, mask: Any, axis: int | tuple[int, ...] | None = None) -> jax.Array:
    """Sum of the entries of `x` where `mask` is set; 0 where there is none.

    Args:
      x: [...] numbers; anything outside the mask.
      mask: [...] same shape, bool or 0/1.
      axis: as in `jnp.sum`.
    """
    check_shapes("masked_sum", "x", np.shape(x), mask=mask)
    return jnp.sum(jnp.where(as_mask(mask), as_float(x), 0.0), axis=axis)


def masked_mean(x: Any, mask: Any, axis: int | tuple[int, ...] | None = None) -> jax.Array:
    """Mean of the entries of `x` where `mask` is set; 0 where there is none. Arguments as in `masked_sum`."""
    total = masked_sum(x, mask, axis)
    return total / jnp.maximum(jnp.sum(as_mask(mask), axis=axis), 1).astype(total.dtype)


def whiten(x: Any, mask: Any) -> jax.Array:
    """Centres and scales the masked-in entries, all together, to mean 0 and sample variance 1.

        y = (x − mean) / sqrt( Σ (x − mean)² / (n − 1) )

    One entry, or entries whose spread is no more than rounding (1e-8, or 1e-6 of the largest magnitude),
    come back as they are: there is nothing to measure them by.

    Args:
      x: [...] numbers; anything outside the mask.
      mask: [...] same shape, bool or 0/1. All entries count as one sample, whatever the axes mean.

    Returns:
      [...] float32; 0 outside the mask.

    Raises:
      ValueError: the shapes differ.
    """
    check_shapes("whiten", "x", np.shape(x), mask=mask)
    mask = as_mask(mask)
    x = jnp.where(mask, as_float(x), 0.0)
    count = jnp.sum(mask)
    centred = jnp.where(mask, x - masked_mean(x, mask), 0.0)
    variance = jnp.sum(jnp.square(centred)) / jnp.maximum(count - 1, 1).astype(x.dtype)
    floor = jnp.maximum(_ABSOLUTE_FLOOR, _RELATIVE_FLOOR * jnp.max(jnp.abs(x), initial=0.0))
    usable = (count > 1) & (variance > jnp.square(floor))
    return jnp.where(usable, centred * jax.lax.rsqrt(jnp.where(usable, variance, 1.0)), x)

"""Losses of the critic as weighted sums: squared error, and cross-entropy of a value that is a probability."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turnppo_jax.kernels.checks import as_float, check_shapes
from turnppo_jax.kernels.masked import masked_mean

VALUE_LOSSES = ("squared", "cross_entropy")


def value_loss(
    values: Any, old_values: Any, returns: Any, weights: Any, *, clip: float | None = None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Squared error of the critic, optionally with the value clip of PPO.

        loss = Σ_j w_j · 1/2 (V_j − R_j)²
        with clip c:  Σ_j w_j · 1/2 max((V_j − R_j)², (V'_j − R_j)²),  V' = old + clamp(V − old, −c, c)

    Args:
      values: [...] of the critic now.
      old_values: [...] of the critic before the first epoch; read with a clip only.
      returns: [...] targets.
      weights: [...], from `loss_weights`; where 0, the others may hold anything.
      clip: c, or None.

    Returns:
      (loss, metrics): float32 scalars; over the entries with weight (`num_entries`): clip_fraction (the clip cuts the
      gradient), error_mean (V − R), error_square_mean.

    Raises:
      ValueError: the shapes differ or clip is not above 0.
    """
    check_shapes("value_loss", "values", np.shape(values), old_values=old_values, returns=returns, weights=weights)
    if clip is not None and not clip > 0.0:
        raise ValueError(f"value_loss: clip={clip} must be above 0, or None for none")
    weights = as_float(weights)
    active = weights != 0
    values = jnp.where(active, as_float(values), 0.0)
    returns = jnp.where(active, as_float(returns), 0.0)
    error = values - returns
    squares = jnp.square(error)
    cut = jnp.zeros(active.shape, bool)
    if clip is not None:
        old_values = jnp.where(active, as_float(old_values), 0.0)
        near = jnp.square(old_values + jnp.clip(values - old_values, -clip, clip) - returns)
        cut = near > squares
        squares = jnp.maximum(squares, near)
    loss = 0.5 * jnp.sum(jnp.where(active, weights, 0.0) * squares)
    metrics = {
        "num_entries": jnp.sum(active).astype(jnp.float32),
        "clip_fraction": masked_mean(cut, active),
        "error_mean": masked_mean(error, active),
        "error_square_mean": masked_mean(jnp.square(error), active),
    }
    return loss, metrics


def value_cross_entropy(logits: Any, targets: Any, weights: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Cross-entropy of a critic that says a probability, as the solvability head of SPPO (arXiv 2604.08865).

        V_j = σ(x_j)        loss = −Σ_j w_j · (R_j log V_j + (1 − R_j) log(1 − V_j)),  R clamped to [0, 1]

    computed as softplus(x) − R x, which stays finite for every x. The gradient by x is w (V − R): that of the squared
    error by V, without the factor V (1 − V) that would stop it where V is wrong and sure. Targets between 0 and 1
    (discounted successes) have their minimum at V = R too.

    Args:
      logits: [...] x of the critic now.
      targets: [...] returns in units of the largest one; from 0 to 1, what lies beyond is clamped.
      weights: [...], from `loss_weights`; where 0, the others may hold anything.

    Returns:
      (loss, metrics): float32 scalars as of `value_loss`; the errors are V − R, clip_fraction is 0.

    Raises:
      ValueError: the shapes differ.
    """
    check_shapes("value_cross_entropy", "logits", np.shape(logits), targets=targets, weights=weights)
    weights = as_float(weights)
    active = weights != 0
    logits = jnp.where(active, as_float(logits), 0.0)
    targets = jnp.clip(jnp.where(active, as_float(targets), 0.0), 0.0, 1.0)
    losses = jax.nn.softplus(logits) - targets * logits
    error = jax.nn.sigmoid(logits) - targets
    metrics = {
        "num_entries": jnp.sum(active).astype(jnp.float32),
        "clip_fraction": jnp.zeros((), jnp.float32),
        "error_mean": masked_mean(error, active),
        "error_square_mean": masked_mean(jnp.square(error), active),
    }
    return jnp.sum(jnp.where(active, weights, 0.0) * losses), metrics

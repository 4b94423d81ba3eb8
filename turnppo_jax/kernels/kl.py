"""Estimates of the divergence between two policies from sampled tokens."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turnppo_jax.kernels.checks import as_float, as_mask, check_choice, check_shapes
from turnppo_jax.kernels.segments import LOG_RATIO_LIMIT

KL_KINDS = ("k1", "k2", "k3")


def kl_penalty(
    logprobs: Any, ref_logprobs: Any, action_mask: Any, *, kind: str = "k3", straight_through: bool = False
) -> jax.Array:
    """Per-token estimate of KL(policy ‖ reference) from tokens that the policy sampled.

        d = logprob − ref_logprob, clamped to ±20
        k1 = d            k2 = d² / 2            k3 = exp(−d) − 1 + d

    k3 is never negative and has k1's expectation (Schulman, "Approximating KL divergence", 2020). As terms of a loss
    over tokens that the policy sampled, only k2 has the gradient of the divergence in expectation: k1's is 0, k3's
    that of KL(reference ‖ policy). With `straight_through` the value is that of the kind and the gradient k2's,
    d · ∇logprob (the "k1+" and "k3+" of verl).

    Args:
      logprobs: [B, T] nats; anything outside the mask.
      ref_logprobs: [B, T] nats, of the reference; anything outside the mask.
      action_mask: [B, T], bool or 0/1, set on sampled tokens.
      kind: "k1" | "k2" | "k3".
      straight_through: take the gradient of k2.

    Returns:
      [B, T] float32 nats; 0 outside the mask.

    Raises:
      ValueError: the shapes differ or the kind is unknown.
    """
    check_choice("kl_penalty", "kind", kind, KL_KINDS)
    check_shapes("kl_penalty", "logprobs", np.shape(logprobs), ref_logprobs=ref_logprobs, action_mask=action_mask)
    mask = as_mask(action_mask)
    difference = jnp.where(mask, as_float(logprobs), 0.0) - jnp.where(mask, as_float(ref_logprobs), 0.0)
    difference = jnp.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    square = 0.5 * jnp.square(difference)
    estimate = {"k1": difference, "k2": square, "k3": jnp.expm1(-difference) + difference}[kind]
    if straight_through:
        # Adds exactly 0 to the value.
        estimate = jax.lax.stop_gradient(estimate) + (square - jax.lax.stop_gradient(square))
    return jnp.where(mask, estimate, 0.0)

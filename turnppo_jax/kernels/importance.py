"""Samples of one policy, gradients of another: weights where the sampler's log-probs and the learner's differ."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turnppo_jax.kernels.checks import as_float, check_choice, check_shapes
from turnppo_jax.kernels.masked import masked_sum
from turnppo_jax.kernels.segments import POOLINGS, ratio_of, sum_by_trajectory, sum_by_turn

IMPORTANCE_LEVELS = ("token", "turn", "sequence")
IMPORTANCE_MODES = ("truncate", "mask")


def importance_weights(
    old_logprobs: Any,
    behavior_logprobs: Any,
    turn_ids: Any,
    num_turns: int,
    *,
    level: str,
    pooling: str = "product",
    mode: str = "truncate",
    low: float = 0.0,
    high: float = 2.0,
    trajectory_ids: Any = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """How much likelier the learner's policy finds what the sampler's drew, bounded.

        r_u = exp(Σ_{t in u} (old_t − behavior_t))        the mean over u's tokens in place of the sum by pooling
        truncate: m_u = clip(r_u, low, high)              mask: m_u = r_u where low ≤ r_u ≤ high, else 0

    u runs over tokens, turns or whole trajectories. The sum is clamped to ±20 before exp. Old and behavior log-probs
    stay the same through all updates of a rollout, so it does not matter when m is computed. Truncation is TIS, at
    the level "token" with high = 2 that of verl; masks are IcePop and MIS (references: verl's rollout correction).
    The product over many tokens strays far from 1 for small gaps a token; the geometric mean does not, and is not the
    weight that makes the expectation right.

    Args:
      old_logprobs: [B, T] nats, of the learner before the first update; anything off the sampled tokens.
      behavior_logprobs: [B, T] nats, of the sampler; anything off the sampled tokens.
      turn_ids: [B, T] int32, -1 off the sampled tokens.
      num_turns: K.
      level: "token" | "turn" | "sequence".
      pooling: "product" | "geometric_mean", over the tokens of a turn or sequence.
      mode: "truncate" | "mask".
      low: least weight, at least 0.
      high: largest weight, above `low`.
      trajectory_ids: [B, K] int, of the sequence level: equal ids are one trajectory, also across rows; negative ids
        do not count. Default: one trajectory a row.

    Returns:
      (weights, metrics): weights [B, T] of tokens, or [B, K] of turns (each that of its trajectory at the level
      "sequence"); 0 off what is sampled. Over the units (`num_units`) float32 scalars: mean and square_mean of m,
      cut_share (r outside the bounds). The effective sample size as a share is mean² / square_mean.

    Raises:
      ValueError: a name is unknown, a shape is wrong, or not 0 ≤ low < high.
    """
    check_choice("importance_weights", "level", level, IMPORTANCE_LEVELS)
    check_choice("importance_weights", "mode", mode, IMPORTANCE_MODES)
    check_choice("importance_weights", "pooling", pooling, POOLINGS)
    if not 0 <= low < high:
        raise ValueError(f"importance_weights: low={low}, high={high}; allowed: 0 <= low < high")
    shape = np.shape(turn_ids)
    check_shapes(
        "importance_weights", "turn_ids", shape, old_logprobs=old_logprobs, behavior_logprobs=behavior_logprobs
    )
    turn_ids = jnp.asarray(turn_ids)
    inside = (turn_ids >= 0) & (turn_ids < num_turns)
    gap = jnp.where(inside, as_float(old_logprobs), 0.0) - jnp.where(inside, as_float(behavior_logprobs), 0.0)
    if level == "token":
        share = inside.astype(gap.dtype)
    else:
        counts = sum_by_turn(inside.astype(gap.dtype), turn_ids, num_turns)
        gap = sum_by_turn(gap, turn_ids, num_turns)
        inside = counts > 0
        share = inside.astype(gap.dtype)
        if level == "sequence":
            if trajectory_ids is None:
                trajectory_ids = jnp.broadcast_to(jnp.arange(shape[0], dtype=jnp.int32)[:, None], gap.shape)
            check_shapes("importance_weights", "the turns", gap.shape, trajectory_ids=trajectory_ids)
            inside = inside & (jnp.asarray(trajectory_ids) >= 0)
            ids = jnp.where(inside, jnp.asarray(trajectory_ids), -1)
            gap, counts = sum_by_trajectory(gap, ids), sum_by_trajectory(counts, ids)
            # A trajectory counts once, however many turns say its weight.
            share = inside / jnp.maximum(sum_by_trajectory(share, ids), 1.0)
        if pooling == "geometric_mean":
            gap = gap / jnp.maximum(counts, 1.0)
    ratio = ratio_of(gap)
    outside = inside & ((ratio < low) | (ratio > high))
    bounded = jnp.clip(ratio, low, high) if mode == "truncate" else jnp.where(outside, 0.0, ratio)
    weights = jnp.where(inside, bounded, 0.0)
    num_units = jnp.round(jnp.sum(share))  # of thirds and the like

    def mean(x):
        return masked_sum(share * x, inside) / jnp.maximum(num_units, 1.0)

    metrics = {
        "num_units": num_units.astype(jnp.float32),
        "mean": mean(weights),
        "square_mean": mean(jnp.square(weights)),
        "cut_share": mean(outside.astype(gap.dtype)),
    }
    return weights, metrics

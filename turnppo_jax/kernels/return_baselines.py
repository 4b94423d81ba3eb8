"""Advantages of returns against a baseline without groups of turns: REINFORCE++, whitened returns, ReMax."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turnppo_jax.kernels.advantages import EQUAL_SCORES, discounted_returns, group_advantages
from turnppo_jax.kernels.checks import as_float, as_mask, check_shapes
from turnppo_jax.kernels.masked import whiten


def whitened_returns(
    rewards: Any,
    mask: Any,
    *,
    gamma: float,
    turn_last: Any = None,
    segment_ids: Any = None,
    bootstrap_values: Any = None,
) -> jax.Array:
    """Discounted returns, whitened over all entries of the batch.

        R_k = r_k + γ · R_{k+1}        A_k = (R_k − mean R) / std R

    Over turns this is the return batch normalisation of GEM (arXiv 2510.01051); over tokens with a KL penalty inside
    the rewards it is REINFORCE++ (arXiv 2501.03262). Mean and sample standard deviation (n − 1) are over every
    masked-in entry, not one a trajectory. One entry, or equal returns, give exactly 0: the mean is the baseline.

    Args:
      rewards: [B, K] over turns or [B, T] over tokens.
      mask: same shape, bool or 0/1; positions outside it are skipped.
      gamma: discount a position.
      turn_last: as in `discounted_returns`.
      segment_ids: as in `discounted_returns`.
      bootstrap_values: as in `discounted_returns`.

    Returns:
      Same shape, float32; 0 outside the mask.

    Raises:
      ValueError: the shapes differ.
    """
    check_shapes("whitened_returns", "rewards", np.shape(rewards), mask=mask)
    returns = discounted_returns(
        rewards, mask, gamma=gamma, turn_last=turn_last, segment_ids=segment_ids, bootstrap_values=bootstrap_values
    )
    mask = as_mask(mask) if segment_ids is None else as_mask(mask) & (jnp.asarray(segment_ids) > 0)
    return _whitened_or_zero(returns, mask)


def reinforce_baseline_advantages(scores: Any, group_ids: Any, mask: Any) -> jax.Array:
    """Score minus the mean of its group, whitened over the batch: the baseline form of REINFORCE++.

        a_i = s_i − mean_{j in group} s_j        A_{i,k} = (a_i − mean a) / std a

    Mean and sample standard deviation are over every masked-in entry, so a trajectory counts once for each of its
    entries there, and once in its group (arXiv 2501.03262). The scale is the batch's:
    unlike GRPO, a group with little spread is not blown up. A group of one, and equal scores, give 0 before whitening;
    a batch without any spread gives exactly 0.

    Args:
      scores: [M], one a trajectory.
      group_ids: [M] int; negative ids belong to none and give 0, outside the statistics.
      mask: [M, K] turns or [M, N] tokens, bool or 0/1.

    Returns:
      [M, K] or [M, N] float32; 0 outside the mask.

    Raises:
      ValueError: the shapes differ.
    """
    by_trajectory = group_advantages(scores, group_ids, scale="none")
    mask = as_mask(mask)
    check_shapes("reinforce_baseline_advantages", "mask", mask.shape[:-1], scores=scores)
    mask = mask & (jnp.asarray(group_ids) >= 0)[..., None]
    return _whitened_or_zero(jnp.where(mask, by_trajectory[..., None], 0.0), mask)


def remax_advantages(turn_rewards: Any, turn_mask: Any, greedy_scores: Any, *, gamma: float = 1.0) -> jax.Array:
    """Return to go minus the score of a greedy rollout of the same prompt (ReMax, arXiv 2310.10505).

        A_k = Σ_{l ≥ k} γ^{l−k} r_l − s_greedy

    With one turn: the score minus the greedy score. The baseline is a number of the prompt alone, so it stays unbiased.

    Args:
      turn_rewards: [M, K].
      turn_mask: [M, K], bool or 0/1.
      greedy_scores: [M], undiscounted reward of the greedy trajectory; anything where a row has no turn.
      gamma: discount a turn; 1 in the paper.

    Returns:
      [M, K] float32; 0 outside the mask.

    Raises:
      ValueError: the shapes differ.
    """
    check_shapes("remax_advantages", "turn_rewards", np.shape(turn_rewards), turn_mask=turn_mask)
    check_shapes("remax_advantages", "turn_rewards", np.shape(turn_rewards)[:-1], greedy_scores=greedy_scores)
    returns = discounted_returns(turn_rewards, turn_mask, gamma=gamma)
    return jnp.where(as_mask(turn_mask), returns - as_float(greedy_scores)[..., None], 0.0)


def _whitened_or_zero(x: jax.Array, mask: jax.Array) -> jax.Array:
    """`whiten`, but exactly 0 where there is no spread: here x has no baseline yet that `whiten` could leave."""
    lowest = jnp.min(jnp.where(mask, x, jnp.inf), initial=jnp.inf)
    above = jnp.where(mask, x - jnp.where(mask, lowest, 0.0), 0.0)
    flat = jnp.max(above, initial=0.0) <= EQUAL_SCORES * jnp.max(jnp.where(mask, jnp.abs(x), 0.0), initial=0.0)
    return jnp.where(flat, 0.0, whiten(above, mask))

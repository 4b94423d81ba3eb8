"""Group advantages turn by turn: turn k of a trajectory against turn k of those that answer the same prompt."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turnppo_jax.kernels.advantages import discounted_returns, group_advantages
from turnppo_jax.kernels.checks import as_float, as_mask, check_choice, check_shapes

ABSENT = ("skip", "zero")


def turn_index_advantages(
    turn_rewards: Any,
    turn_mask: Any,
    group_ids: Any,
    *,
    gamma: float,
    scale: str = "std",
    baseline: str = "mean",
    absent: str = "skip",
) -> jax.Array:
    """Return from turn k on, relative to the returns of turn k in the same group.

        R_{i,k} = Σ_{l ≥ k} γ^{l−k} r_{i,l}        A_{i,k} = group advantage of R_{i,k} among { R_{j,k} : j in group }

    `group_advantages` column by column; with one turn it is GRPO. A member that ended before turn k is left out
    ("skip"), so a turn that nobody else of the group played gives exactly 0; or it counts with the return 0 that it has
    from there on ("zero"), so that the baseline of every turn of a group has the same number of terms. Under "skip"
    that number depends on when the others stopped, and late turns are measured against the few that went on.
    A line without any turn is no member.

    Args:
      turn_rewards: [M, K].
      turn_mask: [M, K], bool or 0/1; turns outside it may hold anything.
      group_ids: [M] int; negative ids belong to none and give 0.
      gamma: discount a turn.
      scale: "std" | "none", as in `group_advantages`.
      baseline: "mean" | "leave_one_out".
      absent: "skip" | "zero".

    Returns:
      [M, K] float32; 0 outside the mask.

    Raises:
      ValueError: the shapes differ, or a name is unknown.
    """
    _check("turn_index_advantages", turn_rewards, turn_mask, group_ids)
    check_choice("turn_index_advantages", "absent", absent, ABSENT)
    returns = discounted_returns(turn_rewards, turn_mask, gamma=gamma)
    return _by_turn_index(returns, as_mask(turn_mask), group_ids, scale, baseline, absent)


def mt_grpo_advantages(
    scores: Any,
    turn_rewards: Any,
    turn_mask: Any,
    group_ids: Any,
    *,
    gamma: float = 1.0,
    turn_weight: float = 1.0,
    scale: str = "std",
) -> jax.Array:
    """Normalised turn rewards and the normalised outcome, discounted back to each turn (MT-GRPO, arXiv 2505.11821).

        A_{i,k} = c Σ_{l ≥ k} γ^{l−k} A^I_{i,l} + γ^{K_i−k} A^O_i

    A^I_{i,l} is the group advantage of the reward of turn l among the members that played it, A^O_i that of the
    outcome; K_i is the trajectory's own last turn (the paper asks for equal turn counts). Two turns, the reward on
    the first, and γ = 1 are the paper's case: A^O + c A^I, then A^O. Without turn rewards and at γ = 1 it is GRPO.

    Args:
      scores: [M], the outcome reward, not part of the turn rewards.
      turn_rewards: [M, K], rewards of the turns themselves.
      turn_mask: [M, K], bool or 0/1; turns outside it may hold anything.
      group_ids: [M] int; negative ids belong to none and give 0.
      gamma: discount a turn (the paper's α).
      turn_weight: c.
      scale: "std" | "none", as in `group_advantages`.

    Returns:
      [M, K] float32; 0 outside the mask.

    Raises:
      ValueError: the shapes differ, or the scale is unknown.
    """
    _check("mt_grpo_advantages", turn_rewards, turn_mask, group_ids)
    check_shapes("mt_grpo_advantages", "group_ids", np.shape(group_ids), scores=scores)
    mask = as_mask(turn_mask)
    of_turn = _by_turn_index(as_float(turn_rewards), mask, group_ids, scale, "mean", "skip")
    of_outcome = group_advantages(scores, group_ids, scale=scale)
    last = mask & (jnp.cumsum(mask[:, ::-1], axis=1)[:, ::-1] == 1)
    credit = turn_weight * of_turn + jnp.where(last, of_outcome[:, None], 0.0)
    return discounted_returns(credit, mask, gamma=gamma)


def _check(function: str, turn_rewards: Any, turn_mask: Any, group_ids: Any) -> None:
    check_shapes(function, "turn_rewards", np.shape(turn_rewards), turn_mask=turn_mask)
    check_shapes(function, "turn_rewards", np.shape(turn_rewards)[:-1], group_ids=group_ids)


def _by_turn_index(x: jax.Array, mask: jax.Array, group_ids: Any, scale: str, baseline: str, absent: str) -> jax.Array:
    """[M, K]: `group_advantages` within each column."""
    groups = jnp.asarray(group_ids)[:, None]
    inside = mask if absent == "skip" else jnp.broadcast_to(jnp.any(mask, axis=1, keepdims=True), mask.shape)
    members = jnp.where(inside, groups, -1)
    relative = group_advantages(jnp.where(mask, x, 0.0).T, members.T, scale=scale, baseline=baseline).T
    return jnp.where(mask, relative, 0.0)

"""Step advantages among turns that saw the same thing: GiGPO's anchor groups and HGPO's hierarchy of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turnppo_jax.kernels.advantages import EQUAL_SCORES, discounted_returns, group_advantages
from turnppo_jax.kernels.checks import as_float, as_mask, check_choice, check_shapes

# Turns compared at a time: bounds the memory at _BLOCK · M K numbers where all pairs would be (M K)².
_BLOCK = 256
# HGPO leaves out advantages that are 0; in float32 a return at the mean of its group is so to this share of the range.
_AT_THE_MEAN = 1e-6


def gigpo_advantages(
    scores: Any,
    turn_rewards: Any,
    turn_mask: Any,
    group_ids: Any,
    anchor_ids: Any,
    *,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    scale: str = "none",
) -> jax.Array:
    """Advantage of the trajectory in its group plus that of the step among equal states (GiGPO, arXiv 2505.10978).

        A_{i,k} = A^E_i + w A^S_{i,k}
        A^S_{i,k} = R_{i,k} relative to the R_{j,l} of the same prompt with the same anchor;  R discounted by γ

    A^E is `group_advantages` of the scores: a trajectory counts once however long it is. w = 0 is the group advantage
    alone. A turn alone with its anchor, and returns that are equal up to rounding, have A^S = 0. Both parts are divided
    by their sample standard deviation (n − 1) with scale "std". Revisits within one trajectory count as members, as in
    the paper.

    Args:
      scores: [M], undiscounted reward of each trajectory.
      turn_rewards: [M, K].
      turn_mask: [M, K], bool or 0/1; turns outside it may hold anything.
      group_ids: [M] int; negative ids belong to none and give 0.
      anchor_ids: [M, K] int, equal where the observations count as the same state (exactly, or by similarity, as the
        caller decides); read within a group only; negative: no anchor, A^S = 0.
      gamma: discount a turn, of the step returns.
      step_weight: w.
      scale: "std" | "none".

    Returns:
      [M, K] float32; 0 outside the mask.

    Raises:
      ValueError: the shapes differ, or the scale is unknown.
    """
    _check("gigpo_advantages", turn_rewards, turn_mask, group_ids, anchor_ids, scale)
    mask = as_mask(turn_mask)
    episode = group_advantages(scores, group_ids, scale=scale)
    returns = discounted_returns(turn_rewards, mask, gamma=gamma)
    step, _ = _relative(returns, _state_ids(group_ids, anchor_ids, mask), scale)
    present = mask & (jnp.asarray(group_ids) >= 0)[:, None]
    return jnp.where(present, episode[:, None] + step_weight * step, 0.0)


def hgpo_advantages(
    turn_rewards: Any,
    turn_mask: Any,
    group_ids: Any,
    anchor_ids: Any,
    *,
    history_length: int,
    gamma: float = 0.95,
    alpha: float = 1.0,
    scale: str = "none",
    scores: Any = None,
) -> jax.Array:
    """Weighted mean of step advantages among turns that share ever more history (HGPO, arXiv 2602.22817).

        a_h = return of the turn relative to those of the same prompt whose last h observations are the same
        A = Σ_h w_h a_h,   w_h = (h + 1)^α / Σ (h + 1)^α,   h = 1 .. history_length + 1

    Levels that say nothing (a turn alone in its group, or at the group's mean) are left out of sum and weights; a turn
    with fewer than h observations has no level h. history_length 0 is the step part A^S of GiGPO. With `scores` the
    trajectory's group advantage joins as level h = 0. The deviation is the sample's (n − 1), here as elsewhere; the
    authors' code takes that of the population, which is smaller by sqrt((n − 1)/n).

    Args:
      turn_rewards: [M, K].
      turn_mask: [M, K], bool or 0/1; turns outside it are skipped, in histories too.
      group_ids: [M] int; negative ids belong to none and give 0.
      anchor_ids: [M, K] int, one an observation; negative: equal to no other.
      history_length: earlier observations that the deepest level compares, at least 0.
      gamma: discount a turn, of the step returns.
      alpha: preference for long histories; 0 weighs all levels alike.
      scale: "std" | "none".
      scores: [M] undiscounted reward of each trajectory, or None for no level 0.

    Returns:
      [M, K] float32; 0 outside the mask.

    Raises:
      ValueError: the shapes differ, the scale is unknown, or history_length is negative.
    """
    _check("hgpo_advantages", turn_rewards, turn_mask, group_ids, anchor_ids, scale)
    if history_length < 0:
        raise ValueError(f"hgpo_advantages: history_length={history_length} must be at least 0")
    mask = as_mask(turn_mask)
    returns = discounted_returns(turn_rewards, mask, gamma=gamma)
    states = _state_ids(group_ids, anchor_ids, mask)
    weighted, total = jnp.zeros_like(returns), jnp.zeros_like(returns)
    if scores is not None:
        check_shapes("hgpo_advantages", "group_ids", np.shape(group_ids), scores=scores)
        episode, speaks = _relative(as_float(scores)[:, None], jnp.asarray(group_ids)[:, None], scale)
        weight = jnp.where(mask & speaks, 1.0, 0.0)  # (0 + 1)^α
        weighted, total = weight * episode, weight
    histories = states
    for level in range(1, history_length + 2):
        if level > 1:
            histories = _pair_ids(_before(histories, mask), states)
        step, speaks = _relative(returns, histories, scale)
        weight = jnp.where(speaks, (level + 1.0) ** alpha, 0.0)
        weighted, total = weighted + weight * step, total + weight
    return jnp.where(mask & (total > 0), weighted / jnp.where(total > 0, total, 1.0), 0.0)


def _check(function: str, turn_rewards: Any, turn_mask: Any, group_ids: Any, anchor_ids: Any, scale: str) -> None:
    check_choice(function, "scale", scale, ("std", "none"))
    shape = np.shape(turn_rewards)
    check_shapes(function, "turn_rewards", shape, turn_mask=turn_mask, anchor_ids=anchor_ids)
    check_shapes(function, "turn_rewards", shape[:-1], group_ids=group_ids)


def _state_ids(group_ids: Any, anchor_ids: Any, mask: jax.Array) -> jax.Array:
    """[M, K] int32: equal for turns of one prompt with one anchor; -1 where there is none."""
    groups = jnp.broadcast_to(jnp.asarray(group_ids)[:, None], mask.shape)
    return _pair_ids(jnp.where(mask, groups, -1), jnp.where(mask, jnp.asarray(anchor_ids), -1))


def _pair_ids(first: jax.Array, second: jax.Array) -> jax.Array:
    """[M, K] int32: a number for each pair (first, second); -1 where either is negative."""
    flat_first, flat_second = first.reshape(-1), second.reshape(-1)
    order = jnp.lexsort((flat_second, flat_first))
    in_order = flat_first[order], flat_second[order]
    begins = (in_order[0][1:] != in_order[0][:-1]) | (in_order[1][1:] != in_order[1][:-1])
    ranks = jnp.concatenate([jnp.zeros(min(1, order.size), jnp.int32), jnp.cumsum(begins, dtype=jnp.int32)])
    ids = jnp.zeros(order.shape, jnp.int32).at[order].set(ranks).reshape(first.shape)
    return jnp.where((first >= 0) & (second >= 0), ids, -1)


def _before(ids: jax.Array, mask: jax.Array) -> jax.Array:
    """[M, K]: the id at the masked-in turn before each; -1 where there is none."""
    columns = jnp.broadcast_to(jnp.arange(mask.shape[1], dtype=jnp.int32), mask.shape)
    latest = jax.lax.cummax(jnp.where(mask, columns, -1), axis=1)
    before = jnp.concatenate([jnp.full((mask.shape[0], 1), -1, jnp.int32), latest[:, :-1]], axis=1)
    return jnp.where(before >= 0, jnp.take_along_axis(ids, jnp.maximum(before, 0), axis=1), -1)


def _relative(x: jax.Array, ids: jax.Array, scale: str) -> tuple[jax.Array, jax.Array]:
    """(x of each turn relative to those with its id, whether that says anything), [M, K] each; 0 where the id is -1."""
    keys = ids.reshape(-1)
    values = jnp.where(keys >= 0, as_float(x).reshape(-1), 0.0)

    def one_turn(turn):
        value, key = turn
        same = (keys == key) & (key >= 0)
        members = jnp.sum(same).astype(values.dtype)
        # Measured from the lowest of the group, equal returns are exact zeros before any rounding.
        lowest = jnp.min(jnp.where(same, values, jnp.inf), initial=jnp.inf)
        lowest = jnp.where(members > 0, lowest, 0.0)
        size = jnp.max(jnp.where(same, jnp.abs(values), 0.0), initial=0.0)
        above = jnp.where(same, values - lowest, 0.0)
        differ = jnp.max(above, initial=0.0) > EQUAL_SCORES * size
        above = jnp.where(differ, above, 0.0)
        mean = jnp.sum(above) / jnp.maximum(members, 1.0)
        centred = jnp.where(differ, value - lowest - mean, 0.0)
        speaks = jnp.abs(centred) > _AT_THE_MEAN * jnp.max(above, initial=0.0)
        if scale == "std":
            squares = jnp.sum(jnp.where(same, jnp.square(above - mean), 0.0))
            variance = squares / jnp.maximum(members - 1.0, 1.0)
            spread = variance > 0.0
            centred = jnp.where(spread, centred * jax.lax.rsqrt(jnp.where(spread, variance, 1.0)), 0.0)
        return centred, speaks

    relative, speaks = jax.lax.map(one_turn, (values, keys), batch_size=max(1, min(_BLOCK, values.size)))
    return relative.reshape(x.shape), speaks.reshape(x.shape)

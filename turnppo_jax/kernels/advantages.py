"""Advantages and returns: GAE over turns, GAE over tokens, discounted returns, group scores.

All follow one recursion over the masked-in positions of a row, from the last to the first. Masked-out positions
are skipped: value and advantage are carried across them, and what stands on them is never read.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turnppo_jax.kernels.checks import as_float, as_mask, check_choice, check_shapes

# Scores of a group within this share of the largest are equal up to float32 rounding: the same rewards, summed in
# another order, differ by about 1e-7 of it, and the standard deviation would make ±1 of that.
EQUAL_SCORES = 1e-6


def turn_gae(
    turn_rewards: Any,
    turn_values: Any,
    turn_mask: Any,
    *,
    gamma: float,
    gae_lambda: float,
    turn_last: Any = None,
    bootstrap_values: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Generalised advantage estimation over turns (arXiv 1506.02438; over turns: arXiv 2512.17008, section 4).

        δ_k = r_k + γ · (last_k ? bootstrap_k : V_{k+1}) − V_k
        A_k = δ_k + γλ · (last_k ? 0 : A_{k+1})           returns_k = A_k + V_k

    λ = 1 gives returns equal to the discounted returns; γ = λ = 1 with V = 0 gives the reward to go.

    Args:
      turn_rewards: [B, K], the whole turn's reward.
      turn_values: [B, K], V of the state before the turn's action.
      turn_mask: [B, K], bool or 0/1; turns outside it are skipped and may hold anything.
      gamma: discount a turn.
      gae_lambda: λ.
      turn_last: [B, K] bool, the turn ends its trajectory; without it the last masked-in turn of a row does.
      bootstrap_values: [B, K], V after the end, read only where a trajectory ends; 0 without it.

    Returns:
      (advantages, returns), [B, K] float32 each; 0 outside the mask.

    Raises:
      ValueError: the shapes differ.
    """
    shape = np.shape(turn_rewards)
    check_shapes(
        "turn_gae",
        "turn_rewards",
        shape,
        turn_values=turn_values,
        turn_mask=turn_mask,
        turn_last=turn_last,
        bootstrap_values=bootstrap_values,
    )
    mask = as_mask(turn_mask)
    rewards = jnp.where(mask, as_float(turn_rewards), 0.0)
    values = jnp.where(mask, as_float(turn_values), 0.0)
    last = _last_masked_in(mask) if turn_last is None else as_mask(turn_last) & mask
    bootstrap = _bootstrap_at(last, bootstrap_values)

    def one_turn(carry, turn):
        next_value, next_advantage = carry
        reward, value, present, ends, after = turn
        next_value_here = jnp.where(ends, after, next_value)
        advantage = reward + gamma * next_value_here - value
        advantage += gamma * gae_lambda * jnp.where(ends, 0.0, next_advantage)
        carry = jnp.where(present, value, next_value), jnp.where(present, advantage, next_advantage)
        return carry, jnp.where(present, advantage, 0.0)

    turns_first = [jnp.moveaxis(x, -1, 0) for x in (rewards, values, mask, last, bootstrap)]
    dtype = jnp.result_type(rewards, values, bootstrap)
    start = jnp.zeros(shape[:-1], dtype), jnp.zeros(shape[:-1], dtype)
    turns_first = [x if x.dtype == bool else x.astype(dtype) for x in turns_first]
    _, advantages = jax.lax.scan(one_turn, start, turns_first, reverse=True)
    advantages = jnp.moveaxis(advantages, 0, -1)
    return advantages, jnp.where(mask, advantages + values, 0.0)


def token_gae(
    token_rewards: Any,
    token_values: Any,
    action_mask: Any,
    *,
    gamma: float,
    gae_lambda: float,
    segment_ids: Any = None,
    bootstrap_values: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Generalised advantage estimation over sampled tokens, as a parallel scan (arXiv 1506.02438).

    The recursion of `turn_gae` with a sampled token in place of a turn. Positions outside the action mask
    are skipped. A reward on a skipped position belongs to the sampled token before it in its segment
    (where there is none, or the reward is not finite, it is ignored).

    Args:
      token_rewards: [B, T].
      token_values: [B, T], V before the token at that position is sampled; read under the mask only.
      action_mask: [B, T], bool or 0/1, set on sampled tokens.
      gamma: discount a token.
      gae_lambda: λ.
      segment_ids: [B, T] int32, trajectories packed in a row; a change ends the trajectory, 0 is padding.
        Without it a row is one trajectory.
      bootstrap_values: [B, T], V after the end, read only at a trajectory's last sampled token.

    Returns:
      (advantages, returns), [B, T] float32 each; 0 outside the mask.

    Raises:
      ValueError: the shapes differ.
    """
    check_shapes(
        "token_gae",
        "token_rewards",
        np.shape(token_rewards),
        token_values=token_values,
        action_mask=action_mask,
        segment_ids=segment_ids,
        bootstrap_values=bootstrap_values,
    )
    mask, segments = _inside(action_mask, segment_ids)
    rewards = _reward_of_sampled(as_float(token_rewards), mask, segments)
    values = jnp.where(mask, as_float(token_values), 0.0)
    following, last = _following(mask, segments)
    next_values = jnp.where(last, _bootstrap_at(last, bootstrap_values), jnp.take_along_axis(values, following, -1))
    deltas = jnp.where(mask, rewards + gamma * next_values - values, 0.0)
    advantages = _backward_recurrence(deltas, mask, last, gamma * gae_lambda)
    return advantages, jnp.where(mask, advantages + values, 0.0)


def discounted_returns(
    rewards: Any,
    mask: Any,
    *,
    gamma: float,
    turn_last: Any = None,
    segment_ids: Any = None,
    bootstrap_values: Any = None,
) -> jax.Array:
    """Discounted sum of the rewards from each position to the end of its trajectory.

        R_k = r_k + γ · (last_k ? bootstrap_k : R_{k+1})

    The Monte-Carlo target of the critic; equal to the returns of GAE at λ = 1.

    Args:
      rewards: [B, K] over turns or [B, T] over tokens.
      mask: same shape, bool or 0/1; positions outside it are skipped.
      gamma: discount a position.
      turn_last: same shape, the position ends its trajectory.
      segment_ids: same shape, as in `token_gae`; with it, rewards on skipped positions count as there.
        Where both are given, both end a trajectory; where neither is, the last masked-in position does.
      bootstrap_values: same shape, read only where a trajectory ends.

    Returns:
      Same shape, float32; 0 outside the mask.

    Raises:
      ValueError: the shapes differ.
    """
    check_shapes(
        "discounted_returns",
        "rewards",
        np.shape(rewards),
        mask=mask,
        turn_last=turn_last,
        segment_ids=segment_ids,
        bootstrap_values=bootstrap_values,
    )
    mask, segments = _inside(mask, segment_ids)
    rewards = as_float(rewards)
    if segment_ids is not None:
        rewards = _reward_of_sampled(rewards, mask, segments)
    rewards = jnp.where(mask, rewards, 0.0)
    _, last = _following(mask, segments)
    if turn_last is not None:
        given = as_mask(turn_last) & mask
        last = given if segment_ids is None else last | given
    return _backward_recurrence(rewards + gamma * _bootstrap_at(last, bootstrap_values), mask, last, gamma)


def group_advantages(scores: Any, group_ids: Any, *, scale: str = "std", baseline: str = "mean") -> jax.Array:
    """Score of each trajectory relative to those that answer the same prompt (GRPO, arXiv 2402.03300, section 4.1).

        mean:           A_i = s_i − mean_{j in group} s_j
        leave_one_out:  A_i = s_i − mean_{j in group, j ≠ i} s_j         (RLOO, arXiv 2402.14740)
        scale "std":    divided by the sample standard deviation (n − 1) of the group

    A group whose scores are all equal (within 1e-6 of the largest), and a group of one, give exactly 0. scale "none"
    with baseline "mean" is the advantage of Dr. GRPO (arXiv 2503.20783).

    Args:
      scores: [B], one a trajectory (not one a row: a long trajectory counts once).
      group_ids: [B] int; equal ids form a group, negative ids belong to none and give 0.
      scale: "std" | "none".
      baseline: "mean" | "leave_one_out".

    Returns:
      [B] float32.

    Raises:
      ValueError: the shapes differ, or a name is unknown.
    """
    check_choice("group_advantages", "scale", scale, ("std", "none"))
    check_choice("group_advantages", "baseline", baseline, ("mean", "leave_one_out"))
    check_shapes("group_advantages", "scores", np.shape(scores), group_ids=group_ids)
    group_ids = jnp.asarray(group_ids)
    present = group_ids >= 0
    scores = jnp.where(present, as_float(scores), 0.0)
    same = (group_ids[..., :, None] == group_ids[..., None, :]) & present[..., :, None] & present[..., None, :]
    members = jnp.sum(same, axis=-1).astype(scores.dtype)

    def over_group(x):
        return jnp.sum(jnp.where(same, x[..., None, :], 0.0), axis=-1)

    # Measured from the lowest score of the group, equal scores are exact zeros before any rounding.
    lowest = jnp.min(jnp.where(same, scores[..., None, :], jnp.inf), axis=-1, initial=jnp.inf)
    above = jnp.where(present, scores - jnp.where(present, lowest, 0.0), 0.0)
    largest = jnp.max(jnp.where(same, jnp.abs(scores)[..., None, :], 0.0), axis=-1, initial=0.0)
    differ = jnp.max(jnp.where(same, above[..., None, :], 0.0), axis=-1, initial=0.0) > EQUAL_SCORES * largest
    above = jnp.where(differ, above, 0.0)
    centred = jnp.where(present, above - over_group(above) / jnp.maximum(members, 1.0), 0.0)
    advantages = centred
    if baseline == "leave_one_out":
        advantages = centred * members / jnp.maximum(members - 1.0, 1.0)
    if scale == "std":
        # Within a group `centred` differs by member, so the squares are taken member by member.
        variance = over_group(jnp.square(centred)) / jnp.maximum(members - 1.0, 1.0)
        spread = variance > 0.0
        advantages = jnp.where(spread, advantages * jax.lax.rsqrt(jnp.where(spread, variance, 1.0)), 0.0)
    return jnp.where(members > 1.0, advantages, 0.0)


def _last_masked_in(mask: jax.Array) -> jax.Array:
    """[..., T] bool: the last set entry of each row."""
    later = jnp.cumsum(mask[..., ::-1], axis=-1)[..., ::-1]
    return mask & (later == 1)


def _bootstrap_at(last: jax.Array, bootstrap_values: Any) -> jax.Array:
    """The bootstrap value where a trajectory ends, 0 elsewhere."""
    if bootstrap_values is None:
        return jnp.zeros(last.shape, jnp.float32)
    return jnp.where(last, as_float(bootstrap_values), 0.0)


def _inside(mask: Any, segment_ids: Any) -> tuple[jax.Array, jax.Array]:
    """(mask without padding, segment of every position); without ids a row is one segment."""
    mask = as_mask(mask)
    if segment_ids is None:
        return mask, jnp.ones(mask.shape, jnp.int32)
    segments = jnp.asarray(segment_ids)
    return mask & (segments > 0), segments


def _following(mask: jax.Array, segments: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(column of the next masked-in position, clamped; whether the position is its segment's last), [..., T] each."""
    length = mask.shape[-1]
    columns = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), mask.shape)
    nearest = jax.lax.cummin(jnp.where(mask, columns, length), axis=mask.ndim - 1, reverse=True)
    after = jnp.concatenate([nearest[..., 1:], jnp.full((*mask.shape[:-1], 1), length, jnp.int32)], axis=-1)
    following = jnp.minimum(after, length - 1)
    goes_on = (after < length) & (jnp.take_along_axis(segments, following, -1) == segments)
    return following, mask & ~goes_on


def _reward_of_sampled(rewards: jax.Array, mask: jax.Array, segments: jax.Array) -> jax.Array:
    """Moves the reward of each skipped position to the masked-in position before it in its segment."""
    length = mask.shape[-1]
    columns = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), mask.shape)
    owner = jax.lax.cummax(jnp.where(mask, columns, -1), axis=mask.ndim - 1)
    owned = (owner >= 0) & (jnp.take_along_axis(segments, jnp.maximum(owner, 0), -1) == segments) & (segments > 0)
    moved = jnp.where(owned & ~mask & jnp.isfinite(rewards), rewards, 0.0).reshape(-1, length)
    rows = jnp.arange(moved.shape[0], dtype=jnp.int32)[:, None]
    target = jnp.maximum(owner, 0).reshape(-1, length)
    added = jnp.zeros_like(moved).at[rows, target].add(moved).reshape(mask.shape)
    return jnp.where(mask, rewards, 0.0) + added


def _backward_recurrence(x: jax.Array, mask: jax.Array, last: jax.Array, decay: float) -> jax.Array:
    """y_t = x_t + decay · (last_t ? 0 : y of the next masked-in position), 0 outside the mask; in log2(T) rounds."""
    x = jnp.where(mask, x, 0.0)
    factors = jnp.where(mask, jnp.where(last, 0.0, jnp.asarray(decay, x.dtype)), jnp.ones((), x.dtype))

    def join(later, earlier):
        later_factor, later_sum = later
        factor, total = earlier
        return later_factor * factor, total + factor * later_sum

    _, y = jax.lax.associative_scan(join, (factors, x), reverse=True, axis=x.ndim - 1)
    return jnp.where(mask, y, 0.0)

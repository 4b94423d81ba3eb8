"""Variants of GAE: two levels (turns, then the tokens inside), two lambdas (policy, critic), one value a sequence."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turnppo_jax.kernels.advantages import token_gae, turn_gae
from turnppo_jax.kernels.checks import as_float, as_mask, check_choice, check_shapes
from turnppo_jax.kernels.segments import broadcast_turns

ANCHORS = ("first", "last")
LEVELS = ("turn", "token")


def bi_level_gae(
    turn_rewards: Any,
    token_values: Any,
    turn_ids: Any,
    *,
    gamma: float,
    turn_gamma: float,
    gae_lambda: float,
    turn_lambda: float | None = None,
    anchor: str = "first",
    turn_last: Any = None,
    bootstrap_values: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """GAE over turns, whose result is the reward of a GAE over the tokens inside each turn (arXiv 2510.16907).

        turns:   δ_k = r_k + γ_turn · V_{k+1} − V_k        A_k = δ_k + γ_turn λ_turn A_{k+1}
        tokens:  the token GAE of each turn alone with γ and λ, where the turn's last token gets the reward A_k + V_k

    V_k is the value at the turn's anchor token: "first" is the state before any token of the action; "last" is the
    position of the published code, where the critic has seen all of the action but one token. Turns are told apart by
    their ids: the published code takes positions with a reward for their ends, so that a turn with reward 0 melts into
    the next. With all of γ, γ_turn, λ, λ_turn equal to 1, and for a single turn at any γ and λ, it is token GAE; with
    one token a turn it is turn GAE with γ_turn and λ_turn.

    Args:
      turn_rewards: [B, K], the whole turn's reward.
      token_values: [B, T], V before the token at that position is sampled; read at sampled tokens only.
      turn_ids: [B, T] int32, 0..K-1 at sampled tokens, -1 elsewhere; a turn without a token is skipped.
      gamma: discount a token, inside a turn.
      turn_gamma: discount a turn.
      gae_lambda: λ inside a turn.
      turn_lambda: λ over turns; None: `gae_lambda`, as published.
      anchor: "first" | "last".
      turn_last: [B, K] bool, as in `turn_gae`.
      bootstrap_values: [B, K], as in `turn_gae`.

    Returns:
      (advantages, returns), [B, T] float32 each; 0 outside the turns.

    Raises:
      ValueError: the shapes differ or the anchor is unknown.
    """
    check_choice("bi_level_gae", "anchor", anchor, ANCHORS)
    check_shapes("bi_level_gae", "turn_ids", np.shape(turn_ids), token_values=token_values)
    turn_ids, turn_rewards = jnp.asarray(turn_ids), as_float(turn_rewards)
    if turn_rewards.shape[:-1] != turn_ids.shape[:-1]:
        raise ValueError(
            f"bi_level_gae: turn_rewards has shape {turn_rewards.shape}, turn_ids {turn_ids.shape}; rows differ"
        )
    num_turns = turn_rewards.shape[-1]
    turn_ids = jnp.where(turn_ids < num_turns, turn_ids, -1)
    sampled = turn_ids >= 0
    values = jnp.where(sampled, as_float(token_values), 0.0)
    member = turn_ids[..., None, :] == jnp.arange(num_turns, dtype=turn_ids.dtype)[:, None]  # [B, K, T]
    first = jnp.argmax(member, axis=-1)
    last = turn_ids.shape[-1] - 1 - jnp.argmax(member[..., ::-1], axis=-1)
    anchor_values = jnp.take_along_axis(values, first if anchor == "first" else last, axis=-1)
    _, turn_returns = turn_gae(
        turn_rewards,
        anchor_values,
        jnp.any(member, axis=-1),
        gamma=turn_gamma,
        gae_lambda=gae_lambda if turn_lambda is None else turn_lambda,
        turn_last=turn_last,
        bootstrap_values=bootstrap_values,
    )
    columns = jnp.arange(turn_ids.shape[-1], dtype=last.dtype)
    ends = sampled & (broadcast_turns(last, turn_ids) == columns)
    rewards = jnp.where(ends, broadcast_turns(turn_returns, turn_ids), 0.0)
    return token_gae(rewards, values, sampled, gamma=gamma, gae_lambda=gae_lambda, segment_ids=turn_ids + 1)


def decoupled_gae(
    rewards: Any,
    values: Any,
    mask: Any,
    *,
    level: str,
    gamma: float,
    policy_lambda: Any,
    value_lambda: Any = 1.0,
    turn_last: Any = None,
    segment_ids: Any = None,
    bootstrap_values: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Advantages with one λ, critic targets with another (VC-PPO, arXiv 2503.01491; VAPO, arXiv 2504.05118).

        advantages = A(λ_policy)        returns = A(λ_value) + V

    λ_value = 1 gives the discounted returns, whatever V is. Equal lambdas are `turn_gae` or `token_gae`. With
    λ_policy from `length_adaptive_lambda` it is the estimator of VAPO.

    Args:
      rewards: [B, K] by turn or [B, T] by token.
      values: same shape.
      mask: same shape, bool or 0/1.
      level: "turn" (`turn_gae`) | "token" (`token_gae`).
      gamma: discount a turn or token.
      policy_lambda: λ of the advantages, a number or [B], one a row.
      value_lambda: λ of the returns, a number or [B].
      turn_last: same shape, as in `turn_gae`; level "turn" only.
      segment_ids: same shape, as in `token_gae`; level "token" only.
      bootstrap_values: same shape, as there.

    Returns:
      (advantages, returns), same shape, float32 each; 0 outside the mask.

    Raises:
      ValueError: the shapes differ, the level is unknown, or an argument belongs to the other level.
    """
    check_choice("decoupled_gae", "level", level, LEVELS)
    other = {"segment_ids": segment_ids} if level == "turn" else {"turn_last": turn_last}
    for name, array in other.items():
        if array is not None:
            raise ValueError(f"decoupled_gae: {name} is given, but level={level!r} allows only None there")
    kernel = functools.partial(turn_gae if level == "turn" else token_gae, gamma=gamma)
    rows = [as_float(rewards), as_float(values), as_mask(mask)]
    options = {"turn_last": turn_last} if level == "turn" else {"segment_ids": segment_ids}
    options["bootstrap_values"] = bootstrap_values
    options = {name: jnp.asarray(array) for name, array in options.items() if array is not None}

    def estimate(name, gae_lambda):
        if np.ndim(gae_lambda) == 0:
            return kernel(*rows, gae_lambda=gae_lambda, **options)
        check_shapes("decoupled_gae", "one number a row", np.shape(rewards)[:-1], **{name: gae_lambda})
        by_row = jax.vmap(lambda rows, options, own: kernel(*rows, gae_lambda=own, **options))
        return by_row(rows, options, as_float(gae_lambda))

    return estimate("policy_lambda", policy_lambda)[0], estimate("value_lambda", value_lambda)[1]


def length_adaptive_lambda(lengths: Any, *, alpha: float = 0.05) -> jax.Array:
    """λ that reaches equally far into a short and a long response (VAPO, arXiv 2504.05118).

        λ = 1 − 1 / (α l), at least 0

    The weights λ^t then sum to about α l: a fixed share of the response.

    Args:
      lengths: [...] sampled tokens of each response (trajectory); at or below 1/α, and at 0, λ is 0.
      alpha: α, above 0; the paper's 0.05.

    Returns:
      [...] float32 in [0, 1).

    Raises:
      ValueError: alpha is not above 0.
    """
    if not alpha > 0.0:
        raise ValueError(f"length_adaptive_lambda: alpha={alpha} must be above 0")
    reach = alpha * as_float(lengths)
    return jnp.where(reach > 1.0, 1.0 - 1.0 / jnp.where(reach > 1.0, reach, 1.0), 0.0)


def sequence_critic_advantages(scores: Any, values: Any, mask: Any) -> jax.Array:
    """Score of the whole trajectory minus the value of its prompt, for every entry (SPPO, arXiv 2604.08865).

        A_{i,k} = s_i − V(prompt_i)

    The trajectory as one action of a bandit. With one turn it is turn GAE; over several it is the first turn's
    advantage at γ = λ = 1, given to all. In the paper V is the probability that the prompt is solved, sigmoid of a
    head trained by cross-entropy, and the score is 0 or 1; here V comes in the score's units.

    Args:
      scores: [M], undiscounted reward of each trajectory.
      values: [M], V of the prompt before any action.
      mask: [M, K] turns or [M, N] tokens, bool or 0/1; a row without any may hold anything.

    Returns:
      [M, K] or [M, N] float32; 0 outside the mask.

    Raises:
      ValueError: the shapes differ.
    """
    mask = as_mask(mask)
    check_shapes("sequence_critic_advantages", "mask", mask.shape[:-1], scores=scores, values=values)
    any_inside = jnp.any(mask, axis=-1)
    advantages = jnp.where(any_inside, as_float(scores), 0.0) - jnp.where(any_inside, as_float(values), 0.0)
    return jnp.where(mask, advantages[..., None], 0.0)

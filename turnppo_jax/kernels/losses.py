"""Losses as weighted sums, and the weights.

`loss_weights` is computed once for a whole minibatch; micro-batches and devices only add. Metrics that the losses
return are means over what they counted: to join micro-batches, multiply by the count (`num_turns`, `num_tokens`,
`num_entries`), add, divide.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turnppo_jax.kernels.checks import as_float, as_mask, check_choice, check_shapes
from turnppo_jax.kernels.masked import masked_mean
from turnppo_jax.kernels.segments import POOLINGS, broadcast_turns, sum_by_turn, turn_log_ratios

LEVELS = ("turn", "token")
NORMALIZERS = ("trajectory_tokens", "tokens", "turns", "trajectories")
KL_KINDS = ("k1", "k2", "k3")

# Log-ratios are clamped to this before exp, so that a ratio stays finite in float32 (exp(20) = 4.9e8); the same
# number as verl's.
LOG_RATIO_LIMIT = 20.0


def loss_weights(
    turn_ids: Any, turn_mask: Any, *, level: str, normalizer: str, trajectory_ids: Any = None
) -> jax.Array:
    """What each turn, or each sampled token, of a minibatch counts in the loss.

    | normalizer          | weight of a turn | weight of a token |
    |---------------------|------------------|-------------------|
    | `trajectory_tokens` | 1 / (M n_i)      | 1 / (M n_i)       |
    | `tokens`            | 1 / n            | 1 / n             |
    | `turns`             | 1 / N            | 1 / (N n_k)       |
    | `trajectories`      | 1 / (M N_i)      | 1 / (M N_i n_k)   |

    Only what has a sampled token counts: M trajectories, n tokens and N turns in the minibatch, n_i tokens and N_i
    turns in trajectory i, n_k tokens in turn k. `trajectory_tokens` is the objective of Turn-PPO
    (arXiv 2512.17008: 1/G Σ_i 1/|a^i| Σ_n) at turn level; `trajectories` is its critic's 1/G Σ_i 1/N_i.

    Args:
      turn_ids: [B, T] int32, -1 off the sampled tokens.
      turn_mask: [B, K], bool or 0/1; tokens of a turn outside it do not count.
      level: "turn" | "token".
      normalizer: a name of the table.
      trajectory_ids: [B, K] int; equal ids are one trajectory, also across rows; negative ids do not count.
        Without it every row is a trajectory.

    Returns:
      [B, K] or [B, T] float32 by the level; 0 where nothing counts.

    Raises:
      ValueError: a name is unknown or the shapes differ.
    """
    check_choice("loss_weights", "level", level, LEVELS)
    check_choice("loss_weights", "normalizer", normalizer, NORMALIZERS)
    turn_mask, turn_ids = as_mask(turn_mask), jnp.asarray(turn_ids)
    if trajectory_ids is None:
        rows = jnp.arange(turn_mask.shape[0], dtype=jnp.int32)[:, None]
        trajectory_ids = jnp.broadcast_to(rows, turn_mask.shape)
    check_shapes("loss_weights", "turn_mask", turn_mask.shape, trajectory_ids=trajectory_ids)
    trajectory_ids = jnp.asarray(trajectory_ids)
    tokens = sum_by_turn(jnp.ones(turn_ids.shape, jnp.float32), turn_ids, turn_mask.shape[-1])  # n_k
    counts = turn_mask & (tokens > 0) & (trajectory_ids >= 0)
    tokens = jnp.where(counts, tokens, 0.0)
    turns = counts.astype(jnp.float32)

    def over_trajectory(x):
        return jax.ops.segment_sum(x.reshape(-1), owner, num_segments=owner.shape[0])

    # Ids are whatever the caller has; their rank among the ids present is below B K whatever they are.
    owner = jnp.unique(jnp.where(counts, trajectory_ids, -1).reshape(-1), return_inverse=True, size=turn_mask.size)[1]
    owner = owner.reshape(-1)
    tokens_of, turns_of = over_trajectory(tokens), over_trajectory(turns)
    num_trajectories = jnp.sum(tokens_of > 0).astype(jnp.float32)
    total = {
        "trajectory_tokens": num_trajectories * tokens_of[owner].reshape(turn_mask.shape),
        "tokens": jnp.sum(tokens),
        "turns": jnp.sum(turns),
        "trajectories": num_trajectories * turns_of[owner].reshape(turn_mask.shape),
    }[normalizer]
    if level == "token" and normalizer in ("turns", "trajectories"):
        total = total * tokens
    weights = jnp.where(counts, 1.0 / jnp.where(counts, total, 1.0), 0.0)
    return weights if level == "turn" else broadcast_turns(weights, turn_ids)


def policy_loss(
    logprobs: Any,
    old_logprobs: Any,
    turn_ids: Any,
    advantages: Any,
    weights: Any,
    *,
    ratio_level: str = "turn",
    advantage_level: str | None = None,
    ratio_pooling: str = "product",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    num_turns: int | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Clipped policy objective with the ratio formed per turn or per token (arXiv 1707.06347 eq. 7; 2512.17008).

        loss = Σ_j w_j · max(−A_j ρ_j, −A_j clip(ρ_j, 1 − clip_low, 1 + clip_high))

    and with `dual_clip` = c, where A_j < 0, no more than −A_j c (arXiv 1912.09729, eq. 5). j runs over turns where
    both levels are "turn", else over sampled tokens, to which the turn's side is broadcast. log ρ is clamped to ±20
    before exp. With one token a turn both levels are the same; with one turn a row, geometric mean and normalizer
    `trajectories` this is GSPO (arXiv 2507.18071).

    Args:
      logprobs: [B, T] nats, at sampled tokens; anything elsewhere.
      old_logprobs: [B, T] nats, before the first epoch; anything off the sampled tokens.
      turn_ids: [B, T] int32, -1 off the sampled tokens.
      advantages: [B, K] or [B, T] by `advantage_level`; anything where nothing counts.
      weights: [B, K] where both levels are "turn", else [B, T]; from `loss_weights`. What has weight 0 is left out
        of loss and metrics.
      ratio_level: "turn" | "token".
      advantage_level: "turn" | "token"; default: the ratio's.
      ratio_pooling: "product" | "geometric_mean", of a turn ratio.
      clip_low: ε below 1.
      clip_high: ε above 1.
      dual_clip: c > 1, or None for no bound.
      num_turns: K, where the advantages have the token level and do not tell it; default T.

    Returns:
      (loss, metrics): float32 scalars. Over turns (`num_turns`): clip_fraction_turn, turn_log_ratio_mean,
      turn_log_ratio_square_mean. Over tokens (`num_tokens`): clip_fraction_token, approx_kl (k3). Over the entries
      of the loss (`num_entries`): clip_fraction_positive and clip_fraction_negative (clipped and A > 0 or A < 0; a
      share of all entries), dual_clip_fraction (A < 0 by its nature). Clipped means that the clip cuts the gradient.
      And turn_log_ratio_max (of |log ρ|). The turn and token fractions are both there whatever level the loss has.

    Raises:
      ValueError: a name is unknown, a shape is wrong, or dual_clip is not above 1.
    """
    advantage_level = advantage_level or ratio_level
    check_choice("policy_loss", "ratio_level", ratio_level, LEVELS)
    check_choice("policy_loss", "advantage_level", advantage_level, LEVELS)
    check_choice("policy_loss", "ratio_pooling", ratio_pooling, POOLINGS)
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"policy_loss: dual_clip={dual_clip} must be above 1, or None for no bound")
    by_turn = ratio_level == advantage_level == "turn"
    turn_ids, advantages, weights = jnp.asarray(turn_ids), as_float(advantages), as_float(weights)
    check_shapes("policy_loss", "turn_ids", turn_ids.shape, logprobs=logprobs, old_logprobs=old_logprobs)
    if advantage_level == "token":
        check_shapes("policy_loss", 'advantage_level="token"', turn_ids.shape, advantages=advantages)
    if by_turn:
        check_shapes("policy_loss", "advantages", advantages.shape, weights=weights)
    else:
        check_shapes("policy_loss", "the token level", turn_ids.shape, weights=weights)

    sampled = turn_ids >= 0
    if advantage_level == "turn":
        num_turns = advantages.shape[-1]
    num_turns = num_turns or turn_ids.shape[-1]  # a row has no more turns than tokens
    token_weights = broadcast_turns(weights, turn_ids) if by_turn else weights
    token_active = sampled & (token_weights != 0)
    active_ids = jnp.where(token_active, turn_ids, -1)
    tokens = sum_by_turn(jnp.ones(turn_ids.shape, jnp.float32), active_ids, num_turns)
    turn_active = tokens > 0

    token_log_ratio = jnp.where(
        token_active,
        jnp.where(token_active, as_float(logprobs), 0.0) - jnp.where(token_active, as_float(old_logprobs), 0.0),
        0.0,
    )
    log_ratio_of_turn = turn_log_ratios(
        token_log_ratio, jnp.zeros_like(token_log_ratio), active_ids, num_turns, pooling=ratio_pooling
    )
    token_ratio = _ratio(token_log_ratio)
    turn_ratio = _ratio(log_ratio_of_turn)
    if advantage_level == "turn":
        turn_advantages = jnp.where(turn_active, advantages, 0.0)
        token_advantages = broadcast_turns(turn_advantages, active_ids)
    else:
        token_advantages = jnp.where(token_active, advantages, 0.0)
        # For the metric alone: the advantage of a turn is the mean over its tokens.
        turn_advantages = sum_by_turn(token_advantages, active_ids, num_turns) / jnp.maximum(tokens, 1.0)

    if by_turn:
        ratio, advantage, active = turn_ratio, turn_advantages, turn_active
    else:
        ratio = broadcast_turns(turn_ratio, active_ids) if ratio_level == "turn" else token_ratio
        advantage, active = token_advantages, token_active
    losses = jnp.maximum(-advantage * ratio, -advantage * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high))
    beyond = jnp.zeros(active.shape, bool)
    if dual_clip is not None:
        beyond = active & (advantage < 0) & (ratio > dual_clip)
        losses = jnp.where(advantage < 0, jnp.minimum(losses, -advantage * dual_clip), losses)
    loss = jnp.sum(jnp.where(active, weights, 0.0) * losses)

    def clipped(ratio, advantage):
        return ((advantage > 0) & (ratio > 1.0 + clip_high)) | ((advantage < 0) & (ratio < 1.0 - clip_low))

    cut = clipped(ratio, advantage)
    metrics = {
        "num_turns": jnp.sum(turn_active).astype(jnp.float32),
        "num_tokens": jnp.sum(token_active).astype(jnp.float32),
        "num_entries": jnp.sum(active).astype(jnp.float32),
        "clip_fraction_turn": masked_mean(clipped(turn_ratio, turn_advantages), turn_active),
        "clip_fraction_token": masked_mean(clipped(token_ratio, token_advantages), token_active),
        "clip_fraction_positive": masked_mean(cut & (advantage > 0), active),
        "clip_fraction_negative": masked_mean(cut & (advantage < 0), active),
        "dual_clip_fraction": masked_mean(beyond, active),
        "turn_log_ratio_mean": masked_mean(log_ratio_of_turn, turn_active),
        "turn_log_ratio_square_mean": masked_mean(jnp.square(log_ratio_of_turn), turn_active),
        "turn_log_ratio_max": jnp.max(jnp.abs(log_ratio_of_turn), initial=0.0),
        "approx_kl": masked_mean(
            kl_penalty(jnp.zeros_like(token_log_ratio), token_log_ratio, token_active), token_active
        ),
    }
    return loss, metrics


def turn_ppo_loss(
    logprobs: Any,
    old_logprobs: Any,
    turn_ids: Any,
    turn_advantages: Any,
    turn_mask: Any,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio_pooling: str = "product",
    normalizer: str = "trajectory_tokens",
    trajectory_ids: Any = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The objective of Turn-PPO (arXiv 2512.17008) for a whole minibatch: `loss_weights` and `policy_loss` in one.

        loss = −1/M Σ_i 1/n_i Σ_{k of i} min(ρ_k A_k, clip(ρ_k, 1 − clip_low, 1 + clip_high) A_k)

    Args and returns: as in those two, both levels "turn"; advantages [B, K], turn_mask [B, K].

    Raises:
      ValueError: as those two.
    """
    weights = loss_weights(turn_ids, turn_mask, level="turn", normalizer=normalizer, trajectory_ids=trajectory_ids)
    return policy_loss(
        logprobs,
        old_logprobs,
        turn_ids,
        turn_advantages,
        weights,
        ratio_level="turn",
        ratio_pooling=ratio_pooling,
        clip_low=clip_low,
        clip_high=clip_high,
    )


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


def kl_penalty(logprobs: Any, ref_logprobs: Any, action_mask: Any, *, kind: str = "k3") -> jax.Array:
    """Per-token estimate of KL(policy ‖ reference) from tokens that the policy sampled.

        d = logprob − ref_logprob, clamped to ±20
        k1 = d            k2 = d² / 2            k3 = exp(−d) − 1 + d

    k3 is never negative and has k1's expectation (Schulman, "Approximating KL divergence", 2020).

    Args:
      logprobs: [B, T] nats; anything outside the mask.
      ref_logprobs: [B, T] nats, of the reference; anything outside the mask.
      action_mask: [B, T], bool or 0/1, set on sampled tokens.
      kind: "k1" | "k2" | "k3".

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
    if kind == "k1":
        estimate = difference
    elif kind == "k2":
        estimate = 0.5 * jnp.square(difference)
    else:
        estimate = jnp.expm1(-difference) + difference
    return jnp.where(mask, estimate, 0.0)


def _ratio(log_ratio: jax.Array) -> jax.Array:
    return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))

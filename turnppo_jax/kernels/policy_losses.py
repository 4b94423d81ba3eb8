"""Policy objectives as weighted sums.

The weights are computed once for a whole minibatch; micro-batches and devices only add. Metrics that the losses return
are means over what they counted: to join micro-batches, multiply by the count (`num_turns`, `num_tokens`,
`num_sequences`, `num_entries`), add, divide.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from turnppo_jax.kernels.checks import as_float, check_choice, check_shapes
from turnppo_jax.kernels.kl import kl_penalty
from turnppo_jax.kernels.masked import masked_mean
from turnppo_jax.kernels.segments import (
    POOLINGS,
    broadcast_turns,
    ratio_of,
    sequence_ids,
    sequences_of_turns,
    sum_by_turn,
    turn_log_ratios,
)
from turnppo_jax.kernels.weights import LEVELS, loss_weights

RATIO_LEVELS = ("turn", "token", "sequence")


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
    objective: str = "clip",
    importance: Any = None,
    trajectory_ids: Any = None,
    num_turns: int | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Policy objective with the ratio formed per turn, token or trajectory.

        clip:       loss = Σ_j w_j m_j · max(−A_j ρ_j, −A_j clip(ρ_j, 1 − clip_low, 1 + clip_high))
        cispo:      loss = −Σ_j w_j m_j · A_j · sg(clip(ρ_j, 1 − clip_low, 1 + clip_high)) · ℓ_j
        reinforce:  loss = −Σ_j w_j m_j · A_j · ℓ_j

    "clip" is arXiv 1707.06347 eq. 7, by turn 2512.17008; with `dual_clip` = c, where A_j < 0, no more than −A_j c
    (1912.09729, eq. 5). "cispo" is 2506.13585: sg stops the gradient, so no token loses its own (clip_low ≥ 1 leaves
    the lower side open, as there). j runs over turns where the advantage has the turn's level and the ratio is not
    one of tokens, else over sampled tokens, to which what is coarser is broadcast. log ρ is clamped to ±20 before exp;
    ℓ is log π pooled over the unit of the ratio as its logarithm is, so that at ratio 1 all three have the same
    gradient, −Σ_j w_j m_j A_j ∇log ρ_j, at every combination of levels.

    With one token a turn the levels "turn" and "token" are the same; with one turn a trajectory "turn" and "sequence"
    are. A trajectory with one advantage A_i and a sequence ratio s_i gives Σ_j w_j · A_i s_i: GSPO (arXiv 2507.18071)
    is the geometric mean with weights that add to 1/M over a trajectory, which are those of `trajectories`, and by
    token also those of `trajectory_tokens`; at ratio 1 its gradient is that of the token ratio with
    `trajectory_tokens`. Where the advantages differ inside a trajectory each entry is clipped by its own sign.

    Args:
      logprobs: [B, T] nats, at sampled tokens; anything elsewhere.
      old_logprobs: [B, T] nats, before the first epoch; anything off the sampled tokens.
      turn_ids: [B, T] int32, -1 off the sampled tokens.
      advantages: [B, K] or [B, T] by `advantage_level`; anything where nothing counts.
      weights: [B, K] or [B, T], w over what j runs over; from `loss_weights`. What has weight 0 is left out of loss,
        ratios and metrics.
      ratio_level: "turn" | "token" | "sequence".
      advantage_level: "turn" | "token"; default: the ratio's, "turn" for a sequence.
      ratio_pooling: "product" | "geometric_mean", of the ratio of a turn or sequence.
      clip_low: ε below 1.
      clip_high: ε above 1.
      dual_clip: c > 1, or None for no bound; objective "clip" only.
      objective: "clip" | "cispo" | "reinforce".
      importance: m, in the shape of `weights`, for samples of another policy, see `importance_weights`; None for 1.
        Where it is 0 an entry leaves the loss but not the ratio of its unit, nor the metrics. No gradient.
      trajectory_ids: [B, K] int, of a sequence ratio: equal ids in a row are one trajectory, which must stand in that
        row whole; negative ids do not count. Default: one trajectory a row.
      num_turns: K, where the advantages have the token level and do not tell it; default T.

    Returns:
      (loss, metrics): float32 scalars. Over turns (`num_turns`): clip_fraction_turn, turn_log_ratio_mean,
      turn_log_ratio_square_mean. Over tokens (`num_tokens`): clip_fraction_token, approx_kl (k3). With a sequence
      ratio over trajectories (`num_sequences`): clip_fraction_sequence, sequence_log_ratio_mean,
      sequence_log_ratio_square_mean. Over the entries of the loss (`num_entries`): clip_fraction_positive and
      clip_fraction_negative (clipped and A > 0 or A < 0; a share of all entries), dual_clip_fraction (A < 0 by its
      nature). Clipped means that the clip cuts the gradient; of "cispo", that ρ is beyond the range. And
      turn_log_ratio_max (of |log ρ|); and clip_bias = Σ w_j m_j A_j ρ_j over the entries whose gradient the clip
      cuts, for `clip_bias_scale`. The turn and token fractions are there whatever level the loss has.

    Raises:
      ValueError: a name is unknown, a shape is wrong, dual_clip is not above 1 or given without the clip.
    """
    advantage_level = advantage_level or ("turn" if ratio_level == "sequence" else ratio_level)
    check_choice("policy_loss", "ratio_level", ratio_level, RATIO_LEVELS)
    check_choice("policy_loss", "advantage_level", advantage_level, LEVELS)
    check_choice("policy_loss", "ratio_pooling", ratio_pooling, POOLINGS)
    check_choice("policy_loss", "objective", objective, OBJECTIVES)
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"policy_loss: dual_clip={dual_clip} must be above 1, or None for no bound")
    if dual_clip is not None and objective != "clip":
        raise ValueError(f"policy_loss: dual_clip={dual_clip} with objective={objective!r}, which allows only None")
    by_turn = advantage_level == "turn" and ratio_level != "token"
    turn_ids, advantages, weights = jnp.asarray(turn_ids), as_float(advantages), as_float(weights)
    check_shapes("policy_loss", "turn_ids", turn_ids.shape, logprobs=logprobs, old_logprobs=old_logprobs)
    if advantage_level == "token":
        check_shapes("policy_loss", 'advantage_level="token"', turn_ids.shape, advantages=advantages)
    if by_turn:
        check_shapes("policy_loss", "advantages", advantages.shape, weights=weights, importance=importance)
    else:
        check_shapes("policy_loss", "the token level", turn_ids.shape, weights=weights, importance=importance)

    # What counts, as tokens and as turns.
    if advantage_level == "turn":
        num_turns = advantages.shape[-1]
    num_turns = num_turns or turn_ids.shape[-1]  # a row has no more turns than tokens
    token_weights = broadcast_turns(weights, turn_ids) if by_turn else weights
    token_active = (turn_ids >= 0) & (token_weights != 0)
    active_ids = jnp.where(token_active, turn_ids, -1)
    tokens = sum_by_turn(jnp.ones(turn_ids.shape, jnp.float32), active_ids, num_turns)
    turn_active = tokens > 0
    new = jnp.where(token_active, as_float(logprobs), 0.0)
    token_log_ratio = new - jnp.where(token_active, as_float(old_logprobs), 0.0)
    if advantage_level == "turn":
        turn_advantages = jnp.where(turn_active, advantages, 0.0)
        token_advantages = broadcast_turns(turn_advantages, active_ids)
    else:
        token_advantages = jnp.where(token_active, advantages, 0.0)
        # For the metric alone: the advantage of a turn is the mean over its tokens.
        turn_advantages = sum_by_turn(token_advantages, active_ids, num_turns) / jnp.maximum(tokens, 1.0)

    # The units of the ratio, and what the loss runs over.
    if ratio_level == "sequence":
        if trajectory_ids is None:
            trajectory_ids = jnp.zeros(turn_active.shape, jnp.int32)
        check_shapes("policy_loss", "the turns", turn_active.shape, trajectory_ids=trajectory_ids)
        unit_of_turn = sequences_of_turns(trajectory_ids)
        unit_ids = sequence_ids(active_ids, trajectory_ids)
    else:
        unit_of_turn, unit_ids = None, active_ids

    def by_unit(x):
        return turn_log_ratios(x, jnp.zeros_like(x), unit_ids, num_turns, pooling=ratio_pooling)

    def at_entries(x):
        """From tokens to the units of the ratio, pooled, and on to what j runs over."""
        if ratio_level == "token":
            return x
        units = by_unit(x)
        if not by_turn:
            return broadcast_turns(units, unit_ids)
        return units if unit_of_turn is None else broadcast_turns(units, unit_of_turn)

    ratio = ratio_of(at_entries(token_log_ratio))
    if by_turn:
        advantage, active = turn_advantages, turn_active
    else:
        advantage, active = token_advantages, token_active
    factors = jnp.where(active, weights, 0.0)
    if importance is not None:
        factors = factors * jax.lax.stop_gradient(jnp.where(active, as_float(importance), 0.0))
    low, high = 1.0 - clip_low, 1.0 + clip_high
    losses = OBJECTIVES[objective](ratio, lambda: at_entries(new), advantage, low, high)
    beyond = jnp.zeros(active.shape, bool)
    if dual_clip is not None:
        beyond = active & (advantage < 0) & (ratio > dual_clip)
        losses = jnp.where(advantage < 0, jnp.minimum(losses, -advantage * dual_clip), losses)
    loss = jnp.sum(factors * losses)

    def clipped(ratio, advantage):
        if objective == "reinforce":
            return jnp.zeros(ratio.shape, bool)
        if objective == "cispo":
            return (ratio > high) | (ratio < low)
        return ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))

    turn_log_ratio = turn_log_ratios(
        token_log_ratio, jnp.zeros_like(token_log_ratio), active_ids, num_turns, pooling=ratio_pooling
    )
    cut = clipped(ratio, advantage)
    removed = cut if objective == "clip" else jnp.zeros_like(cut)
    metrics = {
        "num_turns": jnp.sum(turn_active).astype(jnp.float32),
        "num_tokens": jnp.sum(token_active).astype(jnp.float32),
        "num_entries": jnp.sum(active).astype(jnp.float32),
        "clip_fraction_turn": masked_mean(clipped(ratio_of(turn_log_ratio), turn_advantages), turn_active),
        "clip_fraction_token": masked_mean(clipped(ratio_of(token_log_ratio), token_advantages), token_active),
        "clip_fraction_positive": masked_mean(cut & (advantage > 0), active),
        "clip_fraction_negative": masked_mean(cut & (advantage < 0), active),
        "dual_clip_fraction": masked_mean(beyond, active),
        "turn_log_ratio_mean": masked_mean(turn_log_ratio, turn_active),
        "turn_log_ratio_square_mean": masked_mean(jnp.square(turn_log_ratio), turn_active),
        "turn_log_ratio_max": jnp.max(jnp.abs(turn_log_ratio), initial=0.0),
        "approx_kl": masked_mean(
            kl_penalty(jnp.zeros_like(token_log_ratio), token_log_ratio, token_active), token_active
        ),
        "clip_bias": jnp.sum(jnp.where(removed, factors * ratio * advantage, 0.0)),
    }
    if ratio_level == "sequence":
        counts = sum_by_turn(jnp.ones(turn_ids.shape, jnp.float32), unit_ids, num_turns)
        mean_advantage = sum_by_turn(token_advantages, unit_ids, num_turns) / jnp.maximum(counts, 1.0)
        log_ratio, inside = by_unit(token_log_ratio), counts > 0
        metrics |= {
            "num_sequences": jnp.sum(inside).astype(jnp.float32),
            "clip_fraction_sequence": masked_mean(clipped(ratio_of(log_ratio), mean_advantage), inside),
            "sequence_log_ratio_mean": masked_mean(log_ratio, inside),
            "sequence_log_ratio_square_mean": masked_mean(jnp.square(log_ratio), inside),
        }
    return loss, metrics


def clip_bias_scale(clip_bias: Any) -> jax.Array:
    """What the gradient of an update is multiplied by for its clipping bias (after ST-PPO, arXiv 2511.20718).

        C = Σ_{j: the clip cuts j's gradient} w_j A_j ρ_j        scale = 1 / (1 + |C|)

    C is `clip_bias` of `policy_loss`, added over the whole minibatch before the absolute value, so that micro-batches
    change nothing. With weights `trajectory_tokens` by token it is the paper's C(θ) = E[1/|y| Σ_clipped ρ_t A_t].
    Nothing clipped leaves the gradient as it is; the more of it the clip took away, the smaller the step.

    Uncertain: the paper divides the gradient by the L2 norm of C(θ). Read as printed, that divides by 0 where nothing
    is clipped and enlarges the gradient where |C| < 1, against its stated purpose (to weigh down updates that are far
    off-policy), hence 1 + |C|. Whether its C(θ) carries ∇log π (a norm over parameters, at the price of a second
    backward pass) could not be told apart from this scalar; its code was not at hand.

    Args:
      clip_bias: scalar.

    Returns:
      scalar float32 in (0, 1].
    """
    return 1.0 / (1.0 + jnp.abs(as_float(clip_bias)))


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


def _clip(ratio: jax.Array, log_prob: Callable, advantage: jax.Array, low: float, high: float) -> jax.Array:
    del log_prob
    return jnp.maximum(-advantage * ratio, -advantage * jnp.clip(ratio, low, high))


def _cispo(ratio: jax.Array, log_prob: Callable, advantage: jax.Array, low: float, high: float) -> jax.Array:
    return -advantage * jax.lax.stop_gradient(jnp.clip(ratio, low, high)) * log_prob()


def _reinforce(ratio: jax.Array, log_prob: Callable, advantage: jax.Array, low: float, high: float) -> jax.Array:
    del ratio, low, high
    return -advantage * log_prob()


# name: (ρ, log π of its unit, A, 1 − clip_low, 1 + clip_high) -> loss of each entry
OBJECTIVES = {"clip": _clip, "cispo": _cispo, "reinforce": _reinforce}

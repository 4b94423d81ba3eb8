"""Pure functions on arrays: turn sums, advantages, losses. Importing this starts no device and reads no config."""

from turnppo_jax.kernels.advantages import discounted_returns, group_advantages, token_gae, turn_gae
from turnppo_jax.kernels.anchor_groups import gigpo_advantages, hgpo_advantages
from turnppo_jax.kernels.filters import groups_with_spread, not_overlong, top_spread_groups
from turnppo_jax.kernels.gae_variants import (
    bi_level_gae,
    decoupled_gae,
    length_adaptive_lambda,
    sequence_critic_advantages,
)
from turnppo_jax.kernels.importance import importance_weights
from turnppo_jax.kernels.kl import kl_penalty
from turnppo_jax.kernels.masked import masked_mean, masked_sum, whiten
from turnppo_jax.kernels.policy_losses import clip_bias_scale, policy_loss, turn_ppo_loss
from turnppo_jax.kernels.return_baselines import reinforce_baseline_advantages, remax_advantages, whitened_returns
from turnppo_jax.kernels.segments import (
    broadcast_turns,
    sequence_ids,
    sum_by_trajectory,
    sum_by_turn,
    turn_log_ratios,
)
from turnppo_jax.kernels.turn_groups import mt_grpo_advantages, turn_index_advantages
from turnppo_jax.kernels.value_losses import value_cross_entropy, value_loss
from turnppo_jax.kernels.weights import loss_weights

__all__ = [
    "bi_level_gae",
    "broadcast_turns",
    "clip_bias_scale",
    "decoupled_gae",
    "discounted_returns",
    "gigpo_advantages",
    "group_advantages",
    "groups_with_spread",
    "hgpo_advantages",
    "importance_weights",
    "kl_penalty",
    "length_adaptive_lambda",
    "loss_weights",
    "masked_mean",
    "masked_sum",
    "mt_grpo_advantages",
    "not_overlong",
    "policy_loss",
    "reinforce_baseline_advantages",
    "remax_advantages",
    "sequence_critic_advantages",
    "sequence_ids",
    "sum_by_trajectory",
    "sum_by_turn",
    "token_gae",
    "top_spread_groups",
    "turn_gae",
    "turn_index_advantages",
    "turn_log_ratios",
    "turn_ppo_loss",
    "value_cross_entropy",
    "value_loss",
    "whiten",
    "whitened_returns",
]

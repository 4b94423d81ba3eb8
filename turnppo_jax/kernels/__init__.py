"""Pure functions on arrays: turn sums, advantages, losses. Importing this starts no device and reads no config."""

from turnppo_jax.kernels.advantages import discounted_returns, group_advantages, token_gae, turn_gae
from turnppo_jax.kernels.losses import kl_penalty, loss_weights, policy_loss, turn_ppo_loss, value_loss
from turnppo_jax.kernels.masked import masked_mean, masked_sum, whiten
from turnppo_jax.kernels.segments import broadcast_turns, sum_by_turn, turn_log_ratios

__all__ = [
    "broadcast_turns",
    "discounted_returns",
    "group_advantages",
    "kl_penalty",
    "loss_weights",
    "masked_mean",
    "masked_sum",
    "policy_loss",
    "sum_by_turn",
    "token_gae",
    "turn_gae",
    "turn_log_ratios",
    "turn_ppo_loss",
    "value_loss",
    "whiten",
]

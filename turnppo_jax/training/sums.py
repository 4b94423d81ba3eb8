"""Sums over a micro-batch that become metrics of a step: entropies, the gap to the sampler, log-ratios by turn.

A name that ends in _max is a maximum, every other one a sum; vectors have one entry for each index of a turn in its
trajectory. Means are taken once, from the totals of a step (`update_metrics`).
"""

import jax
import jax.numpy as jnp

from turnppo_jax import kernels
from turnppo_jax.training.forward import behavior_logprobs
from turnppo_jax.training.rollout_table import compact_turn_ids
from turnppo_jax.types import TrajectoryBatch

# Nats; below it the likeliest token has a probability of .98 or more.
LOW_ENTROPY = 0.1


def join_sums(sums: dict[str, jax.Array], more: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Sums added; of maxima the larger one."""
    return {name: jnp.maximum(sums[name], x) if name.endswith("_max") else sums[name] + x for name, x in more.items()}


def sampler_sums(
    logprobs: jax.Array, entropy: jax.Array, micro: TrajectoryBatch, max_turns: int
) -> dict[str, jax.Array]:
    """What the scored tokens of a micro-batch say: entropy, and |log-prob − that of the sampler|.

    Args:
      logprobs: [R, A] nats.
      entropy: [R, A] nats.
      micro: its rows.
      max_turns: of a trajectory.

    Returns:
      float32: entropy_sum, low_entropy_tokens, gap_sum, gap_max, num_tokens; [max_turns]: entropy_by_turn,
      tokens_by_turn.
    """
    turn_ids = compact_turn_ids(micro)
    mask = turn_ids >= 0
    entropy = jnp.where(mask, entropy, 0.0)
    gap = jnp.where(mask, jnp.abs(logprobs - behavior_logprobs(micro)), 0.0)
    return {
        "entropy_sum": jnp.sum(entropy),
        "low_entropy_tokens": jnp.sum(mask & (entropy < LOW_ENTROPY)).astype(jnp.float32),
        "gap_sum": jnp.sum(gap),
        "gap_max": jnp.max(gap),
        "num_tokens": jnp.sum(mask).astype(jnp.float32),
        "entropy_by_turn": _by_turn_index(_of_turns(entropy, turn_ids, micro), micro, max_turns),
        "tokens_by_turn": _by_turn_index(_of_turns(mask, turn_ids, micro), micro, max_turns),
    }


def empty_sampler_sums(max_turns: int) -> dict[str, jax.Array]:
    """`sampler_sums` of nothing."""
    scalars = ("entropy_sum", "low_entropy_tokens", "gap_sum", "gap_max", "num_tokens")
    vectors = ("entropy_by_turn", "tokens_by_turn")
    return {name: jnp.zeros(()) for name in scalars} | {name: jnp.zeros(max_turns) for name in vectors}


def log_ratio_sums(
    logprobs: jax.Array, old_logprobs: jax.Array, turn_ids: jax.Array, micro: TrajectoryBatch, max_turns: int
) -> dict[str, jax.Array]:
    """Sums of log ρ of whole turns (products of token ratios) by the turn's index; no gradient.

    Args:
      logprobs: [R, A] nats.
      old_logprobs: [R, A] nats.
      turn_ids: [R, A] int32, -1 off the sampled tokens.
      micro: its rows.
      max_turns: of a trajectory.

    Returns:
      [max_turns] float32 each: turns_by_turn, log_ratio_by_turn, log_ratio_square_by_turn.
    """
    num_turns = micro.turn_mask.shape[1]
    log_ratio = jax.lax.stop_gradient(kernels.turn_log_ratios(logprobs, old_logprobs, turn_ids, num_turns))
    played = _of_turns(turn_ids >= 0, turn_ids, micro) > 0
    return {
        "turns_by_turn": _by_turn_index(played, micro, max_turns),
        "log_ratio_by_turn": _by_turn_index(log_ratio, micro, max_turns),
        "log_ratio_square_by_turn": _by_turn_index(jnp.square(log_ratio), micro, max_turns),
    }


def _of_turns(x: jax.Array, turn_ids: jax.Array, micro: TrajectoryBatch) -> jax.Array:
    """[R, K]."""
    return kernels.sum_by_turn(x.astype(jnp.float32), turn_ids, micro.turn_mask.shape[1])


def _by_turn_index(x: jax.Array, micro: TrajectoryBatch, max_turns: int) -> jax.Array:
    """[max_turns]: x [R, K] summed over the turns with each index."""
    index = jnp.where(micro.turn_index >= 0, micro.turn_index, max_turns).reshape(-1)
    return jax.ops.segment_sum(x.astype(jnp.float32).reshape(-1), index, num_segments=max_turns)

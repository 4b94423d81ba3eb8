"""Sampler and learner: how far their log-probs lie apart, and the weights that make up for it."""

import jax
import jax.numpy as jnp

from turnppo_jax import kernels
from turnppo_jax.training.algorithm import AlgorithmConfig

SUMS = (
    "importance_units",
    "importance_sum",
    "importance_square_sum",
    "importance_cut",
    "sampler_kl_k1",
    "sampler_kl_k3",
)


def _weights(
    old: jax.Array, behavior: jax.Array, turn_ids: jax.Array, trajectory_ids: jax.Array, cfg: AlgorithmConfig
) -> tuple[jax.Array, dict[str, jax.Array]]:
    return kernels.importance_weights(
        old,
        behavior,
        turn_ids,
        trajectory_ids.shape[1],
        level=cfg.importance_level or "token",
        pooling=cfg.importance_pooling,
        mode=cfg.importance_mode,
        low=cfg.importance_low,
        high=cfg.importance_high,
        trajectory_ids=trajectory_ids,
    )


def importance(
    old: jax.Array, behavior: jax.Array, turn_ids: jax.Array, trajectory_ids: jax.Array, cfg: AlgorithmConfig
) -> jax.Array:
    """The weight of each entry of the policy loss, [B, K] or [B, A] by the loss's level; no gradient.

    Args:
      old: [B, A] of the learner before the first update.
      behavior: [B, A] of the sampler.
      turn_ids: [B, A], -1 off the sampled tokens.
      trajectory_ids: [B, K]; a trajectory's rows must all be here at the level "sequence".
      cfg: of the run, whose importance_level is set.
    """
    weights, _ = _weights(old, behavior, turn_ids, trajectory_ids, cfg)
    if cfg.importance_level != "token":
        weights = weights if cfg.loss_level == "turn" else kernels.broadcast_turns(weights, turn_ids)
    elif cfg.loss_level == "turn":
        num_turns = trajectory_ids.shape[1]
        counts = kernels.sum_by_turn(jnp.ones(turn_ids.shape), turn_ids, num_turns)
        weights = kernels.sum_by_turn(weights, turn_ids, num_turns) / jnp.maximum(counts, 1.0)
    return jax.lax.stop_gradient(weights)


def mismatch_sums(
    old: jax.Array, behavior: jax.Array, turn_ids: jax.Array, trajectory_ids: jax.Array, cfg: AlgorithmConfig
) -> dict[str, jax.Array]:
    """Sums by the names of `SUMS`: of the weights, also where the loss takes none, and of KL(sampler ‖ learner).

    Arguments as of `importance`.
    """
    old = jax.lax.stop_gradient(old)
    _, metrics = _weights(old, behavior, turn_ids, trajectory_ids, cfg)
    units, mask = metrics["num_units"], turn_ids >= 0
    divergence = {kind: jnp.sum(kernels.kl_penalty(behavior, old, mask, kind=kind)) for kind in ("k1", "k3")}
    return dict(
        zip(
            SUMS,
            (
                units,
                units * metrics["mean"],
                units * metrics["square_mean"],
                units * metrics["cut_share"],
                divergence["k1"],
                divergence["k3"],
            ),
            strict=True,
        )
    )

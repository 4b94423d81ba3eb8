"""Advantages of a whole rollout: the estimator of the config, what is measured of it, whitening, targets."""

import dataclasses

import jax
import jax.numpy as jnp

from turnppo_jax import kernels
from turnppo_jax.training.algorithm import AlgorithmConfig
from turnppo_jax.training.estimators import ESTIMATORS, TrajectoryFacts
from turnppo_jax.training.rollout_table import Level, RolloutTable


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Advantages:
    """What the update reads, and numbers about it."""

    advantages: jax.Array  # [M, K_max] or [M, N] float32 by the advantage's level; 0 where nothing is
    targets: jax.Array  # like the table's values, in units of the critic's output
    turn_advantages: jax.Array  # [M, K_max] float32; at token level the mean over the turn's tokens
    turn_values: jax.Array  # [M, K_max] float32; at token level V at the turn's first token
    metrics: dict[str, jax.Array]  # float32 scalars by the name they are logged under


def estimate(table: RolloutTable, facts: TrajectoryFacts, key: jax.Array, cfg: AlgorithmConfig) -> Advantages:
    """Advantages and critic targets of the whole rollout.

    Args:
      table: filled from every minibatch.
      facts: of its trajectories, [M] each.
      key: for `permute_advantages` alone.
      cfg: estimator, whitening, target, reward placement, placebo.
    """
    level = Level(table, cfg)
    kl = jnp.where(level.mask, table.kl, 0.0)
    if cfg.kl_in_reward:
        level.lower_rewards(cfg.kl_coef * kl)
        facts = dataclasses.replace(facts, scores=facts.scores - cfg.kl_coef * jnp.sum(kl, axis=1))
    advantages, targets = ESTIMATORS[cfg.estimator].compute(level, table, facts, cfg)
    if targets is None:
        targets = jnp.zeros_like(table.values)
    mask = level.mask
    metrics = {
        "advantage/mean": kernels.masked_mean(advantages, mask),
        "advantage/std": _spread(advantages, mask),
    }
    if cfg.has_critic:
        taught = table.value_weights > 0
        spread, residual = _spread(targets, taught), _spread(targets - table.values, taught)
        explained = 1.0 - jnp.square(residual / jnp.where(spread > 0, spread, 1.0))
        metrics |= {
            # Targets without spread cannot be explained.
            "value/explained_variance": jnp.where(spread > 0, explained, 0.0),
            "value/mean": kernels.masked_mean(table.values, taught),
            "value/return_mean": kernels.masked_mean(targets, taught),
            "value/return_std": spread,
        }
        if cfg.value_loss_kind == "cross_entropy":
            scaled, any_target = targets / cfg.value_scale, jnp.any(taught)
            least, largest = (f(scaled, where=taught, initial=x) for f, x in ((jnp.min, jnp.inf), (jnp.max, -jnp.inf)))
            metrics |= {
                "value/target_min": jnp.where(any_target, least, 0.0),
                "value/target_max": jnp.where(any_target, largest, 0.0),
            }
    if cfg.kl_in_reward:
        sampled = jnp.where(table.mask, table.num_tokens, 0)
        metrics["policy/ref_kl"] = jnp.sum(kl) / jnp.maximum(jnp.sum(sampled), 1)
    if cfg.whitening == "rollout":
        advantages = kernels.whiten(advantages, mask)
    elif cfg.whitening == "trajectory":
        advantages = jax.vmap(kernels.whiten)(advantages, mask)
    if cfg.permute_advantages:
        advantages = _permute(advantages, mask, key)
    return Advantages(
        advantages=advantages,
        targets=targets / cfg.value_scale,
        turn_advantages=level.per_turn_mean(advantages),
        turn_values=level.per_turn_first(table.values),
        metrics=metrics,
    )


def _spread(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Sample standard deviation of the masked-in entries; 0 for fewer than two."""
    centred = jnp.where(mask, x - kernels.masked_mean(x, mask), 0.0)
    return jnp.sqrt(jnp.sum(jnp.square(centred)) / jnp.maximum(jnp.sum(mask) - 1, 1))


def _permute(x: jax.Array, mask: jax.Array, key: jax.Array) -> jax.Array:
    """Shuffles the masked-in entries among themselves; the rest stay 0."""
    flat, inside = x.reshape(-1), mask.reshape(-1)
    places = jnp.argsort(~inside, stable=True)  # masked-in first, in order
    # Draws lie below 1, so those outside the mask come last here too.
    drawn = jnp.argsort(jnp.where(inside, jax.random.uniform(key, flat.shape), 2.0))
    return jnp.where(mask, jnp.zeros_like(flat).at[places].set(flat[drawn]).reshape(x.shape), 0.0)

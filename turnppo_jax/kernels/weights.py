"""What each turn or token counts in a loss: computed once for a whole minibatch; micro-batches and devices only add."""

from typing import Any

import jax
import jax.numpy as jnp

from turnppo_jax.kernels.checks import as_mask, check_choice, check_shapes
from turnppo_jax.kernels.segments import broadcast_turns, sum_by_turn

LEVELS = ("turn", "token")
NORMALIZERS = ("trajectory_tokens", "tokens", "turns", "trajectories")


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

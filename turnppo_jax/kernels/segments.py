"""From tokens to turns and back.

`turn_ids` [B, T] int32 holds, at every sampled token, the index 0..K-1 of its turn in the row, and -1 elsewhere.
-1 never indexes: what it marks is selected away before any arithmetic.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turnppo_jax.kernels.checks import as_float, check_choice, check_shapes

POOLINGS = ("product", "geometric_mean")

# Log-ratios are clamped to this before exp, so that a ratio stays finite in float32 (exp(20) = 4.9e8); the same
# number as verl's.
LOG_RATIO_LIMIT = 20.0


def sum_by_turn(x: Any, turn_ids: Any, num_turns: int) -> jax.Array:
    """Sums `x` over the tokens of each turn.

        y[b, k] = Σ_{t : turn_ids[b, t] = k} x[b, t]

    Args:
      x: [B, T] numbers; anything where the id is -1 (or not below `num_turns`).
      turn_ids: [B, T] int32.
      num_turns: K, a Python int.

    Returns:
      [B, K] float32; 0 for a turn without tokens.

    Raises:
      ValueError: the shapes differ.
    """
    check_shapes("sum_by_turn", "x", np.shape(x), turn_ids=turn_ids)
    turn_ids = jnp.asarray(turn_ids)
    x = as_float(x)
    member = turn_ids[..., None] == jnp.arange(num_turns, dtype=turn_ids.dtype)
    inside = (turn_ids >= 0) & (turn_ids < num_turns)
    # A product with a 0/1 matrix is deterministic on every device, where a scatter of sums is not; its operand
    # would be rounded to bfloat16 on a TPU without the stated precision.
    return jnp.einsum(
        "...t,...tk->...k",
        jnp.where(inside, x, 0.0),
        member.astype(x.dtype),
        precision=jax.lax.Precision.HIGHEST,
    )


def broadcast_turns(y: Any, turn_ids: Any) -> jax.Array:
    """Gives every sampled token the number of its turn; 0 where the id is -1.

    Args:
      y: [B, K] numbers; anything at turns that no token names.
      turn_ids: [B, T] int32.

    Returns:
      [B, T], in the type of `y`.

    Raises:
      ValueError: the leading axes differ.
    """
    y, turn_ids = jnp.asarray(y), jnp.asarray(turn_ids)
    if y.shape[:-1] != turn_ids.shape[:-1]:
        raise ValueError(f"broadcast_turns: y has shape {y.shape} and turn_ids {turn_ids.shape}; leading axes differ")
    num_turns = y.shape[-1]
    inside = (turn_ids >= 0) & (turn_ids < num_turns)
    gathered = jnp.take_along_axis(y, jnp.clip(turn_ids, 0, num_turns - 1), axis=-1)
    return jnp.where(inside, gathered, jnp.zeros((), y.dtype))


def turn_log_ratios(
    logprobs: Any, old_logprobs: Any, turn_ids: Any, num_turns: int, *, pooling: str = "product"
) -> jax.Array:
    """Logarithm of the ratio of new to old probability of each whole turn.

        product:         log ρ_k = Σ_{t in turn k} (logprob_t − old_t)
        geometric_mean:  the same divided by the number of tokens of turn k

    With one token a turn both are the token's log-ratio; with one turn a row the geometric mean is GSPO's
    sequence ratio (arXiv 2507.18071, eq. 7). The product is the ratio of Turn-PPO (arXiv 2512.17008). Not
    clamped: whoever takes the exponential clamps first.

    Args:
      logprobs: [B, T] nats; anything where the id is -1.
      old_logprobs: [B, T] nats; anything where the id is -1.
      turn_ids: [B, T] int32.
      num_turns: K.
      pooling: "product" | "geometric_mean".

    Returns:
      [B, K] float32 nats; 0 for a turn without tokens.

    Raises:
      ValueError: the shapes differ or the pooling is unknown.
    """
    check_choice("turn_log_ratios", "pooling", pooling, POOLINGS)
    check_shapes("turn_log_ratios", "turn_ids", np.shape(turn_ids), logprobs=logprobs, old_logprobs=old_logprobs)
    summed = sum_by_turn(as_float(logprobs) - as_float(old_logprobs), turn_ids, num_turns)
    if pooling == "product":
        return summed
    counts = sum_by_turn(jnp.ones(np.shape(turn_ids), summed.dtype), turn_ids, num_turns)
    return summed / jnp.maximum(counts, 1.0)


def ratio_of(log_ratio: jax.Array) -> jax.Array:
    """The ratio of a log-ratio clamped to ±20, so that it stays finite in float32."""
    return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def sequences_of_turns(trajectory_ids: Any) -> jax.Array:
    """[B, K] int32: the first turn of the row that belongs to the same trajectory; -1 where the id is negative.

    An index of the row's trajectories that is below K, whatever numbers they have.

    Args:
      trajectory_ids: [B, K] int; negative ids are no turns.
    """
    ids = jnp.asarray(trajectory_ids)
    same = ids[..., :, None] == ids[..., None, :]
    return jnp.where(ids >= 0, jnp.argmax(same, axis=-1).astype(jnp.int32), -1)


def sequence_ids(turn_ids: Any, trajectory_ids: Any) -> jax.Array:
    """[B, T] int32: the trajectory of each sampled token as an index of its row, to stand where `turn_ids` stand.

    With these ids a ratio of turns is one of whole trajectories: that of GSPO (arXiv 2507.18071).

    Args:
      turn_ids: [B, T] int32, -1 off the sampled tokens.
      trajectory_ids: [B, K] int; negative ids are no turns.
    """
    return broadcast_turns(sequences_of_turns(trajectory_ids) + 1, turn_ids) - 1


def sum_by_trajectory(x: Any, trajectory_ids: Any) -> jax.Array:
    """Gives every turn the sum of `x` over all turns of its trajectory, in whatever rows they are.

    Args:
      x: [B, K] numbers; anything where the id is negative.
      trajectory_ids: [B, K] int; negative ids do not count.

    Returns:
      [B, K] float32; 0 where the id is negative.

    Raises:
      ValueError: the shapes differ.
    """
    check_shapes("sum_by_trajectory", "x", np.shape(x), trajectory_ids=trajectory_ids)
    ids, x = jnp.asarray(trajectory_ids), as_float(x)
    counts = ids >= 0
    # Ids are whatever the caller has; their rank among the ids present is below B K whatever they are.
    owner = jnp.unique(jnp.where(counts, ids, -1).reshape(-1), return_inverse=True, size=ids.size)[1].reshape(-1)
    total = jax.ops.segment_sum(jnp.where(counts, x, 0.0).reshape(-1), owner, num_segments=ids.size)
    return jnp.where(counts, total[owner].reshape(ids.shape), 0.0)

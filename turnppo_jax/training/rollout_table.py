"""The rollout as a table with one line a trajectory.

A trajectory may span rows and minibatches, so GAE, targets, whitening and group scores are computed on tables
[M, K_max] (turns) or [M, N] (sampled tokens), filled from the rows by (trajectory_ids, turn_index) and read back the
same way. Everything is jittable with fixed shapes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from turnppo_jax import kernels
from turnppo_jax.training.algorithm import AlgorithmConfig
from turnppo_jax.training.batching import BatchShape
from turnppo_jax.types import TrajectoryBatch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RolloutTable:
    """What the rows say about each trajectory's turns."""

    rewards: jax.Array  # [M, K_max] float32
    mask: jax.Array  # [M, K_max] bool
    num_tokens: jax.Array  # [M, K_max] int32, sampled tokens of the turn
    values: jax.Array  # [M, K_max] or [M, N] float32 by the advantage's level, in units of reward
    bootstrap: jax.Array  # [M, K_max] float32, value after a truncated last turn; 0 elsewhere
    value_weights: jax.Array  # [M, K_max] or [M, N] float32, weight in the value loss of the trajectory's minibatch
    kl: jax.Array  # like values: estimated divergence from the reference, of a turn the sum over its tokens


def empty_table(shape: BatchShape, cfg: AlgorithmConfig) -> RolloutTable:
    """A table to add minibatches to; N is `shape.max_sampled`."""
    turns = shape.trajectories, shape.max_turns
    values = turns if cfg.advantage_level == "turn" else (shape.trajectories, shape.max_sampled)
    return RolloutTable(
        rewards=jnp.zeros(turns, jnp.float32),
        mask=jnp.zeros(turns, bool),
        num_tokens=jnp.zeros(turns, jnp.int32),
        values=jnp.zeros(values, jnp.float32),
        bootstrap=jnp.zeros(turns, jnp.float32),
        value_weights=jnp.zeros(values, jnp.float32),
        kl=jnp.zeros(values, jnp.float32),
    )


def to_table(table: jax.Array, x: Any, lines: Any, columns: Any) -> jax.Array:
    """`table` with x[b, j] written at (lines[b, j], columns[b, j]); -1 writes nothing.

    Args:
      table: [M, N].
      x: [B, J].
      lines: [B, J] int32, trajectories.
      columns: [B, J] int32, which turn or token of the trajectory.
    """
    nowhere = table.shape[0]  # out of bounds above, which "drop" drops; a negative index would wrap
    lines = jnp.where((lines >= 0) & (columns >= 0), lines, nowhere)
    return table.at[lines, jnp.maximum(columns, 0)].set(jnp.asarray(x, table.dtype), mode="drop")


def from_table(table: jax.Array, lines: Any, columns: Any) -> jax.Array:
    """[B, J]: table[lines, columns]; 0 where an index is -1."""
    inside = (lines >= 0) & (columns >= 0)
    picked = table.at[jnp.maximum(lines, 0), jnp.maximum(columns, 0)].get(mode="clip")
    return jnp.where(inside, picked, jnp.zeros((), table.dtype))


def compact_turn_ids(batch: TrajectoryBatch) -> jax.Array:
    """[B, A] int32: the turn of each sampled token, in the order of `sampled_positions`; -1 off the end."""
    at = jnp.maximum(batch.sampled_positions, 0)
    return jnp.where(batch.sampled_positions >= 0, jnp.take_along_axis(batch.turn_ids, at, axis=1), -1)


def token_index(batch: TrajectoryBatch, max_turns: int) -> tuple[jax.Array, jax.Array]:
    """(trajectory, which of its sampled tokens) of every sampled token, [B, A] int32 each; -1 off the end.

    The rows must hold each of their trajectories whole, as those of a minibatch do.
    """
    turn_ids = compact_turn_ids(batch)
    num_turns = batch.turn_mask.shape[1]
    counts = kernels.sum_by_turn(jnp.ones(turn_ids.shape), turn_ids, num_turns).astype(jnp.int32)
    table = jnp.zeros((batch.group_ids.shape[0], max_turns), jnp.int32)
    table = to_table(table, counts, batch.trajectory_ids, batch.turn_index)
    before_turn = from_table(jnp.cumsum(table, axis=1) - table, batch.trajectory_ids, batch.turn_index)
    # Sampled tokens stand in the order of their turns, so a turn begins after the tokens of those before it.
    first = kernels.broadcast_turns(jnp.cumsum(counts, axis=1) - counts, turn_ids)
    within = jnp.arange(turn_ids.shape[1], dtype=jnp.int32) - first
    lines = kernels.broadcast_turns(batch.trajectory_ids, turn_ids)
    columns = kernels.broadcast_turns(before_turn, turn_ids) + within
    return jnp.where(turn_ids >= 0, lines, -1), jnp.where(turn_ids >= 0, columns, -1)


def entry_index(batch: TrajectoryBatch, max_turns: int, cfg: AlgorithmConfig) -> tuple[jax.Array, jax.Array]:
    """(lines, columns) in the table of every turn [B, K] or sampled token [B, A], by the advantage's level."""
    if cfg.advantage_level == "turn":
        return batch.trajectory_ids, batch.turn_index
    return token_index(batch, max_turns)


def add_minibatch(table: RolloutTable, batch: TrajectoryBatch, cfg: AlgorithmConfig) -> RolloutTable:
    """Writes rewards, masks, token counts and value weights of one minibatch's (untrimmed) rows into the table."""
    lines, columns = batch.trajectory_ids, batch.turn_index
    turn_ids = compact_turn_ids(batch)
    counts = kernels.sum_by_turn(jnp.ones(turn_ids.shape), turn_ids, batch.turn_mask.shape[1])
    value_weights = table.value_weights
    if cfg.has_critic:
        taught = batch.turn_mask & (columns == 0) if cfg.estimator == "sequence_critic" else batch.turn_mask
        weights = kernels.loss_weights(
            turn_ids, taught, level=cfg.advantage_level, normalizer=cfg.value_normalizer, trajectory_ids=lines
        )
        where = entry_index(batch, table.mask.shape[1], cfg)
        value_weights = to_table(value_weights, weights, *where)
    return dataclasses.replace(
        table,
        rewards=to_table(table.rewards, batch.turn_rewards, lines, columns),
        mask=to_table(table.mask, batch.turn_mask, lines, columns),
        num_tokens=to_table(table.num_tokens, counts, lines, columns),
        value_weights=value_weights,
    )


def add_values(
    table: RolloutTable, batch: TrajectoryBatch, values: jax.Array, bootstrap: jax.Array, cfg: AlgorithmConfig
) -> RolloutTable:
    """Writes the critic's outputs on one minibatch's rows into the table, in units of reward.

    Args:
      table: of the rollout.
      batch: the rows that were scored (trimmed ones at turn level).
      values: [B, K] or [B, A] by the advantage's level.
      bootstrap: [B, K].
      cfg: of the run.
    """
    turn = batch.trajectory_ids, batch.turn_index
    where = entry_index(batch, table.mask.shape[1], cfg)
    present = (batch.bootstrap_positions >= 0).astype(jnp.float32)
    return dataclasses.replace(
        table,
        values=to_table(table.values, in_reward_units(values, cfg), *where),
        bootstrap=to_table(table.bootstrap, in_reward_units(bootstrap, cfg) * present, *turn),
    )


def in_reward_units(outputs: jax.Array, cfg: AlgorithmConfig) -> jax.Array:
    """The values that the critic's outputs stand for."""
    said = jax.nn.sigmoid(outputs) if cfg.value_loss_kind == "cross_entropy" else outputs
    return said * cfg.value_scale


def add_kl(
    table: RolloutTable, batch: TrajectoryBatch, old_logprobs: jax.Array, ref_logprobs: jax.Array, cfg: AlgorithmConfig
) -> RolloutTable:
    """Writes the divergence from the reference of one minibatch's sampled tokens, by the advantage's level.

    Args:
      table: of the rollout.
      batch: the untrimmed rows.
      old_logprobs: [B, A] of the policy before the update.
      ref_logprobs: [B, A] of the reference.
      cfg: of the run.
    """
    turn_ids = compact_turn_ids(batch)
    kl = kernels.kl_penalty(old_logprobs, ref_logprobs, turn_ids >= 0, kind=cfg.kl_kind)
    if cfg.advantage_level == "turn":
        kl = kernels.sum_by_turn(kl, turn_ids, batch.turn_mask.shape[1])
    return dataclasses.replace(table, kl=to_table(table.kl, kl, *entry_index(batch, table.mask.shape[1], cfg)))


class Level:
    """The table seen at the advantage's level: turns as they are, or the sampled tokens of all turns in a line."""

    def __init__(self, table: RolloutTable, cfg: AlgorithmConfig):
        self.by_turn = cfg.advantage_level == "turn"
        turns = table.mask
        last = turns & (jnp.cumsum(turns[:, ::-1], axis=1)[:, ::-1] == 1)
        rewards = jnp.where(turns, table.rewards, 0.0)
        if cfg.reward_placement == "final":
            rewards = jnp.where(last, jnp.sum(rewards, axis=1, keepdims=True), 0.0)
        bootstrap = jnp.where(last, table.bootstrap, 0.0)
        self.turn_mask, self.turn_rewards, self.turn_bootstrap = turns, rewards, bootstrap
        if self.by_turn:
            self.mask, self.rewards, self.bootstrap, self.last = turns, rewards, bootstrap, last
            return
        width = table.values.shape[1]
        ends = jnp.cumsum(table.num_tokens, axis=1)  # [M, K_max]: tokens up to and with the turn
        self.starts = jnp.where(turns, ends - table.num_tokens, -1)
        self.counts = table.num_tokens
        columns = jnp.arange(width, dtype=jnp.int32)
        self.mask = columns < ends[:, -1:]
        turn_of = jnp.sum(columns[None, :, None] >= ends[:, None, :], axis=-1)
        self.turn_of_token = jnp.where(self.mask, turn_of, -1)
        # A turn's reward, and what follows its end, stand on its last token.
        final = self.mask & (columns == from_lines(ends - 1, self.turn_of_token))
        self.rewards = jnp.where(final, kernels.broadcast_turns(rewards, self.turn_of_token), 0.0)
        self.bootstrap = jnp.where(final, kernels.broadcast_turns(bootstrap, self.turn_of_token), 0.0)

    def lower_rewards(self, x: jax.Array) -> None:
        """Takes x, in the level's shape, off the rewards."""
        self.rewards = self.rewards - x
        self.turn_rewards = self.turn_rewards - (
            x if self.by_turn else kernels.sum_by_turn(x, self.turn_of_token, self.turn_mask.shape[1])
        )

    def per_turn_mean(self, x: jax.Array) -> jax.Array:
        """[M, K_max]: mean over the entries of each turn."""
        if self.by_turn:
            return x
        summed = kernels.sum_by_turn(x, self.turn_of_token, self.turn_mask.shape[1])
        return summed / jnp.maximum(self.counts, 1)

    def per_turn_first(self, x: jax.Array) -> jax.Array:
        """[M, K_max]: the first entry of each turn."""
        return jnp.where(self.turn_mask, x, 0.0) if self.by_turn else from_lines(x, self.starts)


def from_lines(x: jax.Array, columns: jax.Array) -> jax.Array:
    """[M, J]: x[m, columns[m, j]], 0 where the column is -1."""
    return kernels.broadcast_turns(x, columns)

"""Programs of the scoring pass: old log-probs, values, the rollout's table and its advantages.

Factories of pure jitted functions of pytrees, lowerable from ShapeDtypeStructs alone; each takes what is static (sizes,
mesh, settings). The number of micro-batches is a traced number: the loop runs over the rows in use and compiles once.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from turnppo_jax.models.critic import ValueHead, bind_critic
from turnppo_jax.models.sizes import ModelSizes
from turnppo_jax.training import advantages, forward
from turnppo_jax.training import rollout_table as tables
from turnppo_jax.training.algorithm import AlgorithmConfig
from turnppo_jax.training.batching import BatchShape
from turnppo_jax.training.forward import LearnerSettings
from turnppo_jax.training.mismatch import mismatch_sums
from turnppo_jax.training.sums import empty_sampler_sums, join_sums, sampler_sums


def make_actor_score(sizes: ModelSizes, mesh: Mesh, settings: LearnerSettings, *, reference: bool = False) -> Callable:
    """Scoring of the policy, or of the reference (log-probs alone).

    Returns:
      jitted (params, value_head | None, batch, num_micro, temperature) -> dict: logprobs [B, A] float32, and for the
      policy the sums of `sums.sampler_sums` and `mismatch.mismatch_sums` over sampled tokens; with a value head also
      values ([B, K] or [B, A] by the advantage's level) and bootstrap [B, K].
    """
    shape, cfg = settings.shape, settings.algorithm

    def score(params, value_head, batch, num_micro, temperature):
        out = {"logprobs": jnp.zeros((shape.rows, shape.sampled), jnp.float32)}
        if not reference:
            out |= empty_sampler_sums(shape.max_turns)
        if value_head is not None:
            out |= _value_buffers(shape, cfg)

        def body(index, out):
            micro = forward.micro_batch(forward.rows_of(batch), index, shape.micro_rows, mesh)
            hidden = forward.actor_hidden(params, sizes, mesh, micro, settings.forward)
            logprobs, entropy = forward.actor_logprobs(
                params, sizes, mesh, hidden, micro, temperature, settings.forward, with_entropy=not reference
            )
            new = {"logprobs": logprobs}
            if value_head is not None:
                head = ValueHead(value_head["value_head"])
                new["values"], new["bootstrap"] = forward.read_values(head, hidden, micro, level=cfg.advantage_level)
            out = out | {name: _put(out[name], x, index) for name, x in new.items()}
            if reference:
                return out
            return out | join_sums(out, sampler_sums(logprobs, entropy, micro, shape.max_turns))

        out = jax.lax.fori_loop(0, num_micro, body, out)
        if reference:
            return out
        turn_ids, behavior = tables.compact_turn_ids(batch), forward.behavior_logprobs(batch)
        return out | mismatch_sums(out["logprobs"], behavior, turn_ids, batch.trajectory_ids, cfg)

    return jax.jit(score)


def make_critic_score(sizes: ModelSizes, mesh: Mesh, settings: LearnerSettings) -> Callable:
    """Scoring of a critic with a backbone of its own.

    Returns:
      jitted (params, batch, num_micro) -> dict: values [B, K] or [B, A] by the advantage's level, bootstrap [B, K].
      Temperature has no part in it.
    """
    shape, cfg = settings.shape, settings.algorithm

    def score(params, batch, num_micro):
        def body(index, out):
            micro = forward.micro_batch(forward.rows_of(batch), index, shape.micro_rows, mesh)
            hidden = forward.critic_hidden(params, sizes, mesh, micro, settings.forward)
            values, bootstrap = forward.read_values(
                bind_critic(params, sizes), hidden, micro, level=cfg.advantage_level
            )
            return {
                "values": _put(out["values"], values, index),
                "bootstrap": _put(out["bootstrap"], bootstrap, index),
            }

        return jax.lax.fori_loop(0, num_micro, body, _value_buffers(shape, cfg))

    return jax.jit(score)


def make_collect(settings: LearnerSettings) -> Callable:
    """Adds one minibatch to the rollout's table.

    Returns:
      jitted (table, batch, scored_batch, scored | None, old_logprobs | None, ref_logprobs | None) -> table; `scored`
      holds values and bootstrap on the rows of `scored_batch`. The log-probs [B, A], on the rows of `batch`, are read
      for a KL term in the reward; where the old ones are None they are those of the sampler.
    """
    cfg = settings.algorithm

    def collect(table, batch, scored_batch, scored, old_logprobs=None, ref_logprobs=None):
        table = tables.add_minibatch(table, batch, cfg)
        if cfg.kl_in_reward:
            old = forward.behavior_logprobs(batch) if old_logprobs is None else old_logprobs
            table = tables.add_kl(table, batch, old, ref_logprobs, cfg)
        if scored is None:
            return table
        return tables.add_values(table, scored_batch, scored["values"], scored["bootstrap"], cfg)

    return jax.jit(collect)


def make_estimate(settings: LearnerSettings) -> Callable:
    """Jitted (table, TrajectoryFacts, key) -> Advantages; see `advantages.estimate`."""
    return jax.jit(functools.partial(advantages.estimate, cfg=settings.algorithm))


def _value_buffers(shape: BatchShape, cfg: AlgorithmConfig) -> dict[str, jax.Array]:
    width = shape.turns if cfg.advantage_level == "turn" else shape.sampled
    return {
        "values": jnp.zeros((shape.rows, width), jnp.float32),
        "bootstrap": jnp.zeros((shape.rows, shape.turns), jnp.float32),
    }


def _put(buffer: jax.Array, rows: jax.Array, index: jax.Array) -> jax.Array:
    """`buffer` with the rows of micro-batch `index` written."""
    return jax.lax.dynamic_update_slice_in_dim(buffer, rows.astype(buffer.dtype), index * rows.shape[0], axis=0)

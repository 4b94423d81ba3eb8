"""Programs of the update: one optimizer step of the policy or the critic on one minibatch.

Factories of pure jitted functions of pytrees, lowerable from ShapeDtypeStructs alone. The number of micro-batches is a
traced number with the gradient in the loop's body. Gradients are summed in float32; losses are weighted sums whose
weights belong to the whole minibatch, so the number of micro-batches changes nothing.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from turnppo_jax import kernels
from turnppo_jax.models.critic import ValueHead, bind_critic
from turnppo_jax.models.sizes import ModelSizes
from turnppo_jax.parallel.sharding import shardings
from turnppo_jax.training import forward, mismatch
from turnppo_jax.training import rollout_table as tables
from turnppo_jax.training.advantages import Advantages
from turnppo_jax.training.algorithm import AlgorithmConfig
from turnppo_jax.training.batching import BatchShape
from turnppo_jax.training.forward import LearnerSettings
from turnppo_jax.training.optimizer import ModelState, apply_gradients
from turnppo_jax.training.rollout_table import RolloutTable
from turnppo_jax.training.sums import join_sums, log_ratio_sums, sampler_sums
from turnppo_jax.types import TrajectoryBatch

# Means that the losses return and the count that each is a mean over.
_POLICY_COUNTS = {
    "clip_fraction_turn": "num_turns",
    "turn_log_ratio_mean": "num_turns",
    "turn_log_ratio_square_mean": "num_turns",
    "clip_fraction_sequence": "num_sequences",
    "sequence_log_ratio_mean": "num_sequences",
    "sequence_log_ratio_square_mean": "num_sequences",
    "clip_fraction_token": "num_tokens",
    "approx_kl": "num_tokens",
    "clip_fraction_positive": "num_entries",
    "clip_fraction_negative": "num_entries",
    "dual_clip_fraction": "num_entries",
}
_VALUE_COUNTS = {"clip_fraction": "num_entries", "error_mean": "num_entries", "error_square_mean": "num_entries"}


def make_actor_update(
    sizes: ModelSizes,
    mesh: Mesh,
    settings: LearnerSettings,
    optimizer: optax.GradientTransformation,
    head_optimizer: optax.GradientTransformation | None = None,
) -> Callable:
    """One optimizer step of the policy, and of the value head on it where the backbone is shared.

    Returns:
      jitted (state, head_state | None, batch, estimated, table, old_logprobs | None, ref_logprobs | None,
      num_micro, temperature, success | None) -> (state, head_state, sums). Both states are donated. `old_logprobs`
      [B, A] is None where the update's own forward pass or the sampler gives them, `ref_logprobs` without a KL term
      in the loss, `success` [M] bool without an imitation term. `sums` is a dict of float32 scalars to be added over
      updates (names that end in _max: the maximum); all 0 where the step was skipped, but for `applied`.
    """
    shape, cfg = settings.shape, settings.algorithm
    with_entropy = cfg.entropy_coef > 0 or not settings.scores_actor
    needs_token_weights = cfg.entropy_coef > 0 or cfg.kl_in_loss

    def loss_of(trained, micro, entries, temperature):
        params, head_params = trained
        hidden = forward.actor_hidden(params, sizes, mesh, micro, settings.forward)
        logprobs, entropy = forward.actor_logprobs(
            params, sizes, mesh, hidden, micro, temperature, settings.forward, with_entropy=with_entropy
        )
        behavior = forward.behavior_logprobs(micro)
        old = entries.get("old_logprobs")
        if old is None:
            old = behavior if cfg.old_logprobs == "behavior" else jax.lax.stop_gradient(logprobs)
        importance = entries.get("importance")
        if cfg.importance_level is not None and importance is None:
            importance = mismatch.importance(old, behavior, entries["turn_ids"], micro.trajectory_ids, cfg)
        loss, metrics = kernels.policy_loss(
            logprobs,
            old,
            entries["turn_ids"],
            entries["advantages"],
            entries["weights"],
            ratio_level=cfg.ratio_level,
            advantage_level=cfg.advantage_level,
            ratio_pooling=cfg.ratio_pooling,
            clip_low=cfg.clip_low,
            clip_high=cfg.clip_high,
            dual_clip=cfg.dual_clip,
            objective=cfg.objective,
            importance=importance,
            trajectory_ids=micro.trajectory_ids,
            num_turns=shape.turns,
        )
        sums = {"policy_loss": loss} | _as_sums(metrics, _POLICY_COUNTS)
        sums |= {name: metrics[name] for name in ("turn_log_ratio_max", "clip_bias")}
        sums |= log_ratio_sums(logprobs, old, entries["turn_ids"], micro, shape.max_turns)
        if cfg.kl_in_loss:
            kl = kernels.kl_penalty(
                logprobs,
                entries["ref_logprobs"],
                entries["turn_ids"] >= 0,
                kind=cfg.kl_kind,
                straight_through=cfg.kl_straight_through,
            )
            loss = loss + cfg.kl_coef * jnp.sum(entries["token_weights"] * kl)
            sums["ref_kl"] = jnp.sum(kl)
        if cfg.entropy_coef > 0:
            loss = loss - cfg.entropy_coef * jnp.sum(entries["token_weights"] * entropy)
        if cfg.imitation_coef > 0:
            imitated = entries["imitation_weights"]
            loss = loss - cfg.imitation_coef * jnp.sum(imitated * logprobs)
            sums["imitation_logprob"] = kernels.masked_sum(logprobs, imitated > 0)
            sums["imitation_tokens"] = jnp.sum(imitated > 0).astype(jnp.float32)
        if not settings.scores_actor:
            sums |= mismatch.mismatch_sums(logprobs, behavior, entries["turn_ids"], micro.trajectory_ids, cfg)
        if with_entropy:
            # The tokens that the loss counts keep their number: those of weight 0 are none of it.
            sums = sampler_sums(jax.lax.stop_gradient(logprobs), entropy, micro, shape.max_turns) | sums
        if head_params is not None:
            read_from = forward.scale_gradient(hidden, cfg.value_loss_coef)
            values, _ = forward.read_values(
                ValueHead(head_params["value_head"]), read_from, micro, level=cfg.advantage_level
            )
            value_loss, value_sums = _value_loss(values, entries, cfg)
            loss = loss + value_loss
            sums |= value_sums
        return loss, sums

    def update(
        state, head_state, batch, estimated, table, old_logprobs, ref_logprobs, num_micro, temperature, success=None
    ):
        turn_ids = tables.compact_turn_ids(batch)
        where = tables.entry_index(batch, shape.max_turns, cfg)
        weights = functools.partial(
            kernels.loss_weights,
            turn_ids,
            batch.turn_mask,
            normalizer=cfg.normalizer,
            trajectory_ids=batch.trajectory_ids,
        )
        entries = {
            "turn_ids": turn_ids,
            "advantages": tables.from_table(estimated.advantages, *where),
            "weights": weights(level=cfg.loss_level),
        }
        if needs_token_weights:
            entries["token_weights"] = weights(level="token")
        if old_logprobs is not None:
            entries["old_logprobs"] = old_logprobs
        if old_logprobs is not None and cfg.importance_level is not None:
            behavior = forward.behavior_logprobs(batch)
            entries["importance"] = mismatch.importance(old_logprobs, behavior, turn_ids, batch.trajectory_ids, cfg)
        if cfg.imitation_coef > 0:
            entries["imitation_weights"] = _imitation_weights(turn_ids, batch, success)
        if cfg.kl_in_loss:
            entries["ref_logprobs"] = ref_logprobs
        if head_state is not None:
            entries |= _value_entries(estimated, table, where, cfg)
        trained = state.params, None if head_state is None else head_state.params
        loss, grads, sums = _accumulate(
            functools.partial(loss_of, temperature=temperature), trained, batch, entries, num_micro, shape, mesh
        )
        if cfg.clip_bias_correction:
            sums["clip_bias_scale"] = kernels.clip_bias_scale(sums["clip_bias"])
            grads = jax.tree.map(lambda g: g * sums["clip_bias_scale"], grads[0]), grads[1]
        state, metrics = _step(optimizer, state, grads[0], loss, mesh)
        sums = _keep_if(metrics["applied"], sums) | _optimizer_sums(metrics, "actor")
        if head_state is not None:
            head_state, head_metrics = _step(head_optimizer, head_state, grads[1], loss, mesh)
            sums |= _optimizer_sums(head_metrics, "critic")
        return state, head_state, sums

    return jax.jit(update, donate_argnums=(0, 1))


def make_critic_update(
    sizes: ModelSizes, mesh: Mesh, settings: LearnerSettings, optimizer: optax.GradientTransformation
) -> Callable:
    """One optimizer step of a critic with a backbone of its own.

    Returns:
      jitted (state, batch, estimated, table, num_micro) -> (state, sums); the state is donated, `sums` as in
      `make_actor_update`.
    """
    shape, cfg = settings.shape, settings.algorithm

    def loss_of(params, micro, entries):
        hidden = forward.critic_hidden(params, sizes, mesh, micro, settings.forward)
        values, _ = forward.read_values(bind_critic(params, sizes), hidden, micro, level=cfg.advantage_level)
        return _value_loss(values, entries, cfg)

    def update(state, batch, estimated, table, num_micro):
        where = tables.entry_index(batch, shape.max_turns, cfg)
        entries = _value_entries(estimated, table, where, cfg)
        loss, grads, sums = _accumulate(loss_of, state.params, batch, entries, num_micro, shape, mesh)
        state, metrics = _step(optimizer, state, grads, loss, mesh)
        return state, _keep_if(metrics["applied"], sums) | _optimizer_sums(metrics, "critic")

    return jax.jit(update, donate_argnums=(0,))


def _accumulate(
    loss_of: Callable, params: Any, batch: TrajectoryBatch, entries: dict, num_micro: Any, shape: BatchShape, mesh: Mesh
) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
    """(loss, float32 gradient, sums) over the micro-batches in use."""
    rows = forward.rows_of(batch), entries
    grad_of = jax.value_and_grad(loss_of, has_aux=True)
    place = shardings(mesh, params)

    def zeros(x):
        return jnp.zeros(x.shape, jnp.float32)

    def slice_at(index):
        return forward.micro_batch(rows, index, shape.micro_rows, mesh)

    names = jax.eval_shape(lambda p, r: loss_of(p, *r)[1], params, jax.eval_shape(slice_at, jnp.int32(0)))

    def body(index, carry):
        loss, grads, sums = carry
        (more, more_sums), new = grad_of(params, *slice_at(index))
        grads = jax.tree.map(lambda total, g: total + g.astype(jnp.float32), grads, new)
        grads = jax.lax.with_sharding_constraint(grads, place)
        return loss + more, grads, join_sums(sums, more_sums)

    start = jnp.zeros((), jnp.float32), jax.tree.map(zeros, params), jax.tree.map(zeros, names)
    return jax.lax.fori_loop(0, num_micro, body, start)


def _step(
    optimizer: optax.GradientTransformation, state: ModelState, grads: Any, loss: jax.Array, mesh: Mesh
) -> tuple[ModelState, dict[str, jax.Array]]:
    state, metrics = apply_gradients(optimizer, state, grads, loss)
    return jax.lax.with_sharding_constraint(state, shardings(mesh, state)), metrics


def _keep_if(applied: jax.Array, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """A skipped step adds nothing to any mean, its tokens included."""
    return {name: jnp.where(applied > 0, x, 0.0) for name, x in sums.items()}


def _optimizer_sums(metrics: dict[str, jax.Array], model: str) -> dict[str, jax.Array]:
    finite = jnp.isfinite(metrics["grad_norm"])
    return {
        f"{model}_applied": metrics["applied"],
        f"{model}_skipped": 1.0 - metrics["applied"],
        f"{model}_grad_norm": jnp.where(finite, metrics["grad_norm"], 0.0) * metrics["applied"],
        f"{model}_update_rms": metrics["update_rms"],
    }


def _as_sums(metrics: dict[str, jax.Array], counts: dict[str, str]) -> dict[str, jax.Array]:
    """Means times their counts, and the counts; of those that there are."""
    counts = {name: count for name, count in counts.items() if name in metrics}
    sums = {name: metrics[name] * metrics[count] for name, count in counts.items()}
    return sums | {count: metrics[count] for count in set(counts.values())}


def _value_entries(estimated: Advantages, table: RolloutTable, where: Any, cfg: AlgorithmConfig) -> dict:
    return {
        "targets": tables.from_table(estimated.targets, *where),
        "old_values": tables.from_table(table.values, *where) / cfg.value_scale,
        "value_weights": tables.from_table(table.value_weights, *where),
    }


def _value_loss(values: jax.Array, entries: dict, cfg: AlgorithmConfig) -> tuple[jax.Array, dict[str, jax.Array]]:
    if cfg.value_loss_kind == "cross_entropy":
        loss, metrics = kernels.value_cross_entropy(values, entries["targets"], entries["value_weights"])
    else:
        loss, metrics = kernels.value_loss(
            values, entries["old_values"], entries["targets"], entries["value_weights"], clip=cfg.value_clip
        )
    sums = {f"value_{name}": x for name, x in _as_sums(metrics, _VALUE_COUNTS).items()}
    return loss, {"value_loss": loss} | sums


def _imitation_weights(turn_ids: jax.Array, batch: TrajectoryBatch, success: jax.Array) -> jax.Array:
    """[B, A]: 1 / n at the n sampled tokens of the minibatch's successful trajectories, 0 elsewhere."""
    lines = batch.trajectory_ids
    succeeded = batch.turn_mask & (lines >= 0) & jnp.asarray(success).astype(bool)[jnp.maximum(lines, 0)]
    return kernels.loss_weights(turn_ids, succeeded, level="token", normalizer="tokens", trajectory_ids=lines)

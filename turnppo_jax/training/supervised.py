"""Supervised training on demonstrations: the programs, and the loop that runs them.

    loss = - sum_t w_t log p(token_t | tokens before it),   w_t = 1 / n at the n imitated tokens, 0 elsewhere

n counts the whole batch, so micro-batches and devices only add.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from turnppo_jax.models.attention import check_attention
from turnppo_jax.models.decoder import bind
from turnppo_jax.models.head import token_logprobs
from turnppo_jax.models.sizes import ModelSizes
from turnppo_jax.parallel.sharding import constrain, named_sharding, place, shardings
from turnppo_jax.training.demonstrations import DemonstrationBatch
from turnppo_jax.training.optimizer import OptimizerConfig, apply_gradients, fresh_state, make_optimizer

_ROW_AXES = ("rows", "columns")


@dataclasses.dataclass(frozen=True)
class SupervisedConfig:
    """Settings of supervised training.

    Attributes:
      optimizer: schedule and optimizer; its steps are the steps here.
      steps: optimizer steps at most.
      evaluate_every: steps between evaluations; entropy is looked at only there.
      stop_entropy: mean token entropy (nats) of the held-out batch below which training stops; 0 never stops.
        A policy that is certain of everything leaves reinforcement learning nothing to work with.
      num_microbatches: parts that the rows of a batch are split into, one after another; divides the rows.
      compute_dtype: "float32" or "bfloat16".
      remat: see `Decoder.hidden_states`.
      attention: see `Decoder.hidden_states`.
      head_chunk: see `token_logprobs`.

    Raises:
      ValueError: a number out of range, by name.
    """

    optimizer: OptimizerConfig
    steps: int
    evaluate_every: int = 10
    stop_entropy: float = 0.0
    num_microbatches: int = 1
    compute_dtype: str = "float32"
    remat: str = "none"
    attention: str = "auto"
    head_chunk: int = 128

    def __post_init__(self):
        for name in ("steps", "evaluate_every", "num_microbatches", "head_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; allowed: at least 1")
        if not self.stop_entropy >= 0:
            raise ValueError(f"stop_entropy={self.stop_entropy}; allowed: at least 0")
        check_attention(self.attention)


def make_supervised_step(sizes: ModelSizes, mesh: Mesh, config: SupervisedConfig):
    """The training program: `(state, batch) -> (state, metrics)`, pure and jittable.

    `state` is a ModelState, `batch` a DemonstrationBatch whose rows `num_microbatches` divides. Metrics are
    scalars: `sft/loss` of the batch before the step, those of `apply_gradients`, `sft/skipped` (steps left out so far).
    """
    optimizer = make_optimizer(config.optimizer)

    def loss_of(params, batch, num_tokens):
        hidden, targets = _predicting(params, sizes, mesh, batch, config)
        logprobs = token_logprobs(bind(params, sizes, mesh), hidden, targets, 1.0, chunk=config.head_chunk)
        return -jnp.sum(logprobs) / num_tokens

    def step(state, batch):
        num_tokens = jnp.maximum(jnp.sum(batch.sampled_positions >= 0), 1).astype(jnp.float32)

        def split(x):
            # Every device has rows in every part.
            parts = x.reshape(config.num_microbatches, -1, *x.shape[1:])
            return constrain(parts, (None, *_ROW_AXES), mesh)

        def add(sums, part):
            loss, grads = jax.value_and_grad(loss_of)(state.params, part, num_tokens)
            grads = jax.lax.with_sharding_constraint(grads, shardings(mesh, grads))
            return jax.tree.map(lambda total, term: total + term.astype(jnp.float32), sums, (loss, grads)), None

        if config.num_microbatches == 1:
            loss, grads = jax.value_and_grad(loss_of)(state.params, batch, num_tokens)
        else:
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (jnp.float32(0), state.params))
            (loss, grads), _ = jax.lax.scan(add, zeros, jax.tree.map(split, batch))
        state, metrics = apply_gradients(optimizer, state, grads, loss)
        state = jax.lax.with_sharding_constraint(state, shardings(mesh, state))
        metrics = {f"sft/{name}": value for name, value in metrics.items()}
        return state, metrics | {"sft/loss": loss, "sft/skipped": state.skipped}

    return step


def make_supervised_evaluation(sizes: ModelSizes, mesh: Mesh, config: SupervisedConfig):
    """The evaluation program: `(params, batch) -> metrics`, pure and jittable.

    Metrics are means over the imitated tokens: `sft/heldout_loss`, `sft/accuracy` (the token is the most likely
    one) and `sft/entropy` (nats).
    """

    def evaluate(params, batch):
        hidden, targets = _predicting(params, sizes, mesh, batch, config)
        model = bind(params, sizes, mesh)
        chunk = min(config.head_chunk, targets.shape[1])
        padding = -targets.shape[1] % chunk
        hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0)))
        targets = jnp.pad(targets, ((0, 0), (0, padding)), constant_values=-1)

        def add(sums, index):
            h = jax.lax.dynamic_slice_in_dim(hidden, index * chunk, chunk, axis=1)
            y = jax.lax.dynamic_slice_in_dim(targets, index * chunk, chunk, axis=1)
            logp = jax.nn.log_softmax(model.logits(h), axis=-1)  # [B, chunk, V] float32
            # A sum and a maximum: where the vocabulary is split, an index into it would gather the logits.
            logprob = jnp.sum(jnp.where(jnp.arange(sizes.vocab_size) == y[..., None], logp, 0), axis=-1)
            p = jnp.exp(logp)
            entropy = -jnp.sum(jnp.where(p > 0, p * logp, 0), axis=-1)
            right = (jnp.argmax(logp, axis=-1) == y).astype(jnp.float32)
            terms = jnp.stack([-logprob, right, entropy, jnp.ones_like(entropy)])
            return sums + jnp.sum(jnp.where(y >= 0, terms, 0), axis=(1, 2)), None

        sums, _ = jax.lax.scan(add, jnp.zeros(4, jnp.float32), jnp.arange(hidden.shape[1] // chunk))
        loss, accuracy, entropy = sums[:3] / jnp.maximum(sums[3], 1)
        return {"sft/heldout_loss": loss, "sft/accuracy": accuracy, "sft/entropy": entropy}

    return evaluate


@functools.lru_cache(maxsize=4)
def supervised_programs(sizes: ModelSizes, mesh: Mesh, config: SupervisedConfig):
    """(training, evaluation) jitted; equal arguments give the same programs, so nothing compiles twice in a process.

    The training program takes over (donates) the state that it is given.
    """
    return jax.jit(make_supervised_step(sizes, mesh, config), donate_argnums=0), jax.jit(
        make_supervised_evaluation(sizes, mesh, config)
    )


def train_supervised(
    params: Any,
    sizes: ModelSizes,
    mesh: Mesh,
    batches: Iterator[DemonstrationBatch],
    config: SupervisedConfig,
    *,
    heldout: DemonstrationBatch | None = None,
    report: Callable[[dict[str, float]], None] | None = None,
) -> tuple[Any, list[dict[str, float]]]:
    """Trains until `config.steps`, or until the held-out entropy falls below `config.stop_entropy`.

    Args:
      params: of the decoder; copied, so the caller's stay valid.
      sizes: of the decoder.
      mesh: from `make_mesh`.
      batches: batches of one shape, as many as there are steps.
      config: settings.
      heldout: demonstrations that are not trained on, of any one shape; without them the batch of the step
        itself is measured.
      report: called with each row of the history as it is made.

    Returns:
      The parameters, and one row per evaluation: `step`, `sft/loss` (mean since the row before; absent at step 0),
      the metrics of the evaluation, those of the last optimizer step, `time/elapsed_s`, from step 2 on
      `sft/tokens_per_s` (padding not counted) and `time/left_s` (compilation not counted), and in the last row
      `sft/stopped_by_entropy`.

    Raises:
      ValueError: `stop_entropy` is set and there is no held-out batch, or the micro-batches do not divide the rows.
    """
    if config.stop_entropy and heldout is None:
        raise ValueError(f"stop_entropy={config.stop_entropy} needs held-out demonstrations")
    report = report or (lambda row: None)
    step_program, evaluate_program = supervised_programs(sizes, mesh, config)
    state = fresh_state(make_optimizer(config.optimizer), params, mesh)
    measured = None if heldout is None else place_batch(mesh, heldout)

    begin = time.perf_counter()
    warm, tokens, losses, metrics, history = begin, 0, [], {}, []
    for step in range(config.steps + 1):
        if step:
            host_batch = next(batches)
            if host_batch.tokens.shape[0] % config.num_microbatches:
                raise ValueError(
                    f"num_microbatches={config.num_microbatches} does not divide rows={host_batch.tokens.shape[0]}"
                )
            batch = place_batch(mesh, host_batch)
            state, metrics = step_program(state, batch)
            losses.append(metrics.pop("sft/loss"))
            tokens += int(np.sum(np.asarray(host_batch.segment_ids) > 0))
            if step == 1:  # the clock for speed starts once both programs are compiled
                jax.block_until_ready(state.params)
                warm, tokens = time.perf_counter(), 0
        if step % config.evaluate_every and step != config.steps:
            continue
        if heldout is None:
            if not step:
                continue
            measured = batch
        evaluation = evaluate_program(state.params, measured)
        row = {"step": step} | {name: float(value) for name, value in (evaluation | metrics).items()}
        if losses:
            row["sft/loss"] = float(np.mean(jax.device_get(losses)))
        now = time.perf_counter()
        row["time/elapsed_s"] = now - begin
        if step > 1:
            row["sft/tokens_per_s"] = tokens / (now - warm)
            row["time/left_s"] = (now - warm) / (step - 1) * (config.steps - step)
        stopped = bool(step and row["sft/entropy"] < config.stop_entropy)
        if stopped or step == config.steps:
            row["sft/stopped_by_entropy"] = float(stopped)
        losses = []
        history.append(row)
        report(row)
        if stopped:
            break
    return state.params, history


def place_batch(mesh: Mesh, batch: DemonstrationBatch) -> DemonstrationBatch:
    """The batch on the devices of the mesh, its rows split over the data axes."""
    return place(batch, jax.tree.map(lambda x: named_sharding(mesh, _ROW_AXES, x.shape), batch))


def _predicting(params, sizes, mesh, batch, config) -> tuple[jax.Array, jax.Array]:
    """Hidden states [B, A, D] before the imitated tokens and these tokens [B, A], -1 where there is none."""
    hidden = bind(params, sizes, mesh).hidden_states(
        batch.tokens,
        batch.positions,
        batch.segment_ids,
        compute_dtype=jnp.dtype(config.compute_dtype),
        remat=config.remat,
        attention=config.attention,
    )
    columns = jnp.maximum(batch.sampled_positions, 1)
    hidden = jnp.take_along_axis(hidden, columns[..., None] - 1, axis=1)
    targets = jnp.take_along_axis(batch.tokens, columns, axis=1)
    return hidden, jnp.where(batch.sampled_positions >= 0, targets, -1)

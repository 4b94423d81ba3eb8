"""The learner's programs over shapes alone: no weights exist."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from turnppo_jax.models.sizes import ModelSizes
from turnppo_jax.parallel.weight_sync import make_resharding
from turnppo_jax.planning.programs import Program
from turnppo_jax.planning.states import States, replicated
from turnppo_jax.planning.topology import Topology
from turnppo_jax.planning.workload import Workload
from turnppo_jax.settings import RunSettings
from turnppo_jax.training import scoring, update
from turnppo_jax.training.forward import LearnerSettings
from turnppo_jax.training.optimizer import make_optimizer
from turnppo_jax.training.rollout_table import empty_table
from turnppo_jax.training.selection import select


def learner_programs(
    settings: RunSettings, sizes: ModelSizes, topology: Topology, mesh: Mesh, states: States, workload: Workload
) -> list[Program]:
    """What `training.learner.Learner` runs in a step, in its order.

    Args:
      settings: of the run.
      sizes: of the models.
      topology: of the whole slice.
      mesh: of the learner, over its devices.
      states: of the models, on that mesh.
      workload: of a minibatch.
    """
    learner, cfg = settings.learner, settings.learner.algorithm
    plain = dataclasses.replace(learner, forward=dataclasses.replace(learner.forward, remat="none"))
    actor_optimizer = make_optimizer(settings.actor_optimizer)
    critic_optimizer = make_optimizer(settings.critic_optimizer) if cfg.has_critic else None
    own_critic = cfg.has_critic and not cfg.share_backbone
    head = states.critic if cfg.share_backbone else None

    # What the programs are called with beside states.
    batch = replicated(mesh, workload.batch)
    table = replicated(mesh, jax.eval_shape(lambda: empty_table(learner.shape, cfg)))
    facts = select([], learner.shape, cfg, greedy_scores=(), branch_values=()).facts
    facts = replicated(mesh, jax.tree.map(jnp.asarray, facts))
    key = replicated(mesh, jax.eval_shape(lambda: jax.random.key(0)))
    estimate = scoring.make_estimate(learner)
    estimated = replicated(mesh, jax.eval_shape(estimate, table, facts, key))
    logprobs = replicated(mesh, jnp.zeros((learner.shape.rows, learner.shape.sampled), jnp.float32))
    old_logprobs = logprobs if learner.scores_actor and cfg.old_logprobs == "learner" else None
    ref_logprobs = logprobs if cfg.kl_in_loss else None
    success = replicated(mesh, jnp.zeros(learner.shape.trajectories, bool)) if cfg.imitation_coef > 0 else None
    num_micro, temperature = replicated(mesh, (jnp.int32(0), jnp.float32(1.0)))

    programs: list[Program] = []

    def add(name: str, function: Callable, arguments: tuple[Any, ...], loops: tuple[float, ...] = (), **fields: Any):
        fields = {"loops": loops, "dynamic": loops, "holds": ()} | fields
        programs.append(Program(name, "learn", topology, mesh, function, arguments, **fields))

    rows_of_actor, rows_of_critic = (float(workload.actor.num_micro),), (float(workload.critic.num_micro),)
    held = ("actor",) if head is None else ("actor", "critic")
    actor = {"loops": rows_of_actor, "params": states.actor.params, "holds": held}
    if learner.scores_actor:
        function = scoring.make_actor_score(sizes, mesh, learner)
        head_params = None if head is None else head.params
        arguments = states.actor.params, head_params, batch, num_micro, temperature
        add("actor score", function, arguments, runs=cfg.num_minibatches, **actor)
    if cfg.kl_coef > 0:
        function = scoring.make_actor_score(sizes, mesh, learner, reference=True)
        arguments = states.reference, None, batch, num_micro, temperature
        reference = actor | {"params": states.reference, "holds": ("reference",)}
        add("reference score", function, arguments, runs=cfg.num_minibatches, **reference)
    if own_critic:
        critic = {"loops": rows_of_critic, "params": states.critic.params, "holds": ("critic",)}
        function = scoring.make_critic_score(sizes, mesh, learner)
        arguments = states.critic.params, batch, num_micro
        add("critic score", function, arguments, runs=cfg.num_minibatches, **critic)
    add("advantages", estimate, (table, facts, key), runs=1)

    def actor_update(learner: LearnerSettings) -> Callable:
        shared = critic_optimizer if cfg.share_backbone else None
        return update.make_actor_update(sizes, mesh, learner, actor_optimizer, shared)

    updates = cfg.epochs * cfg.num_minibatches
    arguments = states.actor, head, batch, estimated, table, old_logprobs, ref_logprobs, num_micro, temperature, success
    add("actor update", actor_update(learner), arguments, runs=updates, plain=actor_update(plain), **actor)
    if own_critic:

        def critic_update(learner: LearnerSettings) -> Callable:
            return update.make_critic_update(sizes, mesh, learner, critic_optimizer)

        arguments = states.critic, batch, estimated, table, num_micro
        add("critic update", critic_update(learner), arguments, runs=updates, plain=critic_update(plain), **critic)
    return programs


def weight_sync_program(
    settings: RunSettings, sizes: ModelSizes, topology: Topology, mesh: Mesh, rollout_mesh: Mesh, states: States
) -> Program:
    """What brings the policy's weights to the samplers after an update.

    Args:
      settings: of the run.
      sizes: of the model.
      topology: of the whole slice.
      mesh: of the learner.
      rollout_mesh: of all samplers together, over the same devices.
      states: of the models.
    """
    function = make_resharding(sizes, mesh, rollout_mesh, settings.sampler.compute_dtype)
    # It runs when the sampler's earlier weights and its cache are gone: nothing but the learner's states is there.
    return Program("weight sync", "learn", topology, mesh, function, (states.actor.params,), ("actor",), runs=1)

"""Everything that a run keeps on the devices, as shapes with shardings, and the table of what it takes."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from turnppo_jax.models.critic import init_critic
from turnppo_jax.models.parameters import cast_weights, decoder_shapes
from turnppo_jax.models.sizes import ModelSizes
from turnppo_jax.parallel.sharding import shardings
from turnppo_jax.rollout.sampler import make_empty_cache
from turnppo_jax.settings import RunSettings
from turnppo_jax.training.optimizer import ModelState, init_state, make_optimizer


@dataclasses.dataclass(frozen=True)
class States:
    """Shapes with shardings.

    Attributes:
      actor: state of the policy.
      critic: of the critic; of the value head alone where the backbone is shared; None without one.
      reference: parameters of the reference model, None without one.
      rollout: parameters that the sampler reads, on one host.
      cache: of the sampler, on one host.
    """

    actor: ModelState
    critic: ModelState | None
    reference: Any
    rollout: Any
    cache: Any


@dataclasses.dataclass(frozen=True)
class Resident:
    """Something that stays in memory between programs.

    Attributes:
      name: as printed.
      bytes: on one chip.
      phases: during which it is there, of "rollout" and "learn"; none: among the temporaries of the updates.
      parts: (name, bytes) of what it is made of.
      fields: of the config that make it smaller.
    """

    name: str
    bytes: float
    phases: tuple[str, ...]
    parts: tuple[tuple[str, float], ...] = ()
    fields: str = ""


def make_states(settings: RunSettings, sizes: ModelSizes, mesh: Mesh, rollout_mesh: Mesh) -> States:
    """Shapes of all states of a run.

    Args:
      settings: of the run.
      sizes: of the models.
      mesh: of the learner.
      rollout_mesh: of the sampler of one host.
    """
    cfg = settings.learner.algorithm
    params = decoder_shapes(sizes)

    def fresh(optimizer: Any, params: Any) -> ModelState:
        return placed(mesh, jax.eval_shape(lambda p: init_state(make_optimizer(optimizer), p), params))

    critic = None
    if cfg.has_critic:
        critic_params = jax.eval_shape(lambda: init_critic(sizes, jax.random.key(0)))
        if cfg.share_backbone:
            critic_params = {"value_head": critic_params["value_head"]}
        critic = fresh(settings.critic_optimizer, critic_params)
    dtype = jnp.dtype(settings.sampler.compute_dtype)
    cache = jax.eval_shape(make_empty_cache(sizes, rollout_mesh, settings.sampler))
    return States(
        actor=fresh(settings.actor_optimizer, params),
        critic=critic,
        reference=placed(mesh, params) if cfg.kl_coef > 0 else None,
        rollout=placed(rollout_mesh, jax.eval_shape(lambda p: cast_weights(p, dtype), params)),
        cache=placed(rollout_mesh, {"cache": cache})["cache"],
    )


def residents(states: States) -> list[Resident]:
    """What stays in a chip's memory, by the actual shardings."""
    always = "rollout", "learn"
    table = []
    for name, state in (("actor", states.actor), ("critic", states.critic)):
        if state is not None:
            parts = _parts(state)
            fields = f"mesh.fsdp, mesh.tensor, {name}_optimizer.moment_dtype"
            table.append(Resident(name, sum(size for _, size in parts), always, parts, fields))
    gradients = [bytes_per_chip(state.params) for state in (states.actor, states.critic) if state is not None]
    table.append(Resident("gradients of one model", max(gradients), ()))
    if states.reference is not None:
        size = bytes_per_chip(states.reference)
        table.append(Resident("reference", size, always, (), "mesh.fsdp, mesh.tensor, algorithm.kl_coef"))
    # The sampler lets go of both before the learner begins.
    size = bytes_per_chip(states.rollout)
    table.append(Resident("rollout weights", size, ("rollout",), (), "rollout_mesh.tensor, sampler.compute_dtype"))
    size = bytes_per_chip(states.cache)
    fields = "sampler.num_slots, sampler.context_length, rollout_mesh.tensor"
    table.append(Resident("cache", size, ("rollout",), (), fields))
    return table


def resident_bytes(table: Iterable[Resident], phase: str, without: Iterable[str] = ()) -> float:
    """Bytes of what is resident in a phase, those left out that are named."""
    without = set(without)
    return sum(one.bytes for one in table if phase in one.phases and one.name not in without)


def placed(mesh: Mesh, tree: Any) -> Any:
    """Shapes with the shardings of the two tables."""
    return jax.tree.map(_with_sharding, tree, shardings(mesh, tree))


def replicated(mesh: Mesh, tree: Any) -> Any:
    """Shapes, arrays or numbers as shapes that every device holds whole."""
    place = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda leaf: _with_sharding(leaf, place), tree)


def bytes_per_chip(tree: Any) -> float:
    """Bytes of one chip's shards of every leaf, which carry shardings."""
    return float(sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)))


def _with_sharding(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _parts(state: ModelState) -> tuple[tuple[str, float], ...]:
    return (
        ("float32 parameters", bytes_per_chip(state.params)),
        ("optimizer moments", bytes_per_chip((state.opt_state, state.step, state.skipped))),
    )

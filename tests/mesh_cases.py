"""A tiny model, a rollout of very uneven rows and what a mesh makes of them: for the programs with 8 devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from tests import learner_cases as cases
from tests.model_fixtures import random_params
from turnppo_jax.models.critic import init_critic
from turnppo_jax.models.decoder import decoder_shapes
from turnppo_jax.models.sizes import ModelSizes
from turnppo_jax.parallel.mesh import make_mesh
from turnppo_jax.parallel.sharding import shard, shardings
from turnppo_jax.rollout.sampler import (
    Sampler,
    SamplerSettings,
    Sampling,
    episode_keys,
    make_decode,
    make_empty_cache,
    make_prefill,
)
from turnppo_jax.rollout.scheduler import Scheduler
from turnppo_jax.training import scoring
from turnppo_jax.training.algorithm import AlgorithmConfig
from turnppo_jax.training.batching import BatchShape, pack
from turnppo_jax.training.forward import ForwardSettings, LearnerSettings
from turnppo_jax.training.learner import Learner
from turnppo_jax.training.optimizer import init_state, make_optimizer
from turnppo_jax.training.rollout_table import empty_table
from turnppo_jax.training.selection import select
from turnppo_jax.training.update import make_actor_update
from turnppo_jax.types import StopReason, Trajectory, Turn

# Every kind of leaf: biases, norms of queries and keys, a head of its own; ids that no token has. tensor=2 has two
# query heads and one key/value head a part, tensor=4 more parts than key/value heads, tensor=8 more than heads.
SIZES = ModelSizes(
    family="qwen3", vocab_size=40, num_token_ids=37, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=4, intermediate_size=24, rope_theta=1e4, rms_norm_eps=1e-6, tie_word_embeddings=False, qkv_bias=True,
    qk_norm=True, max_position_embeddings=256,
)  # fmt: skip
TIED = dataclasses.replace(SIZES, tie_word_embeddings=True, qkv_bias=False)

# (data, fsdp, tensor): every mesh of the devices that there are, by how many it takes.
MESHES = {
    count: [
        (data, fsdp, count // data // fsdp)
        for data in (1, 2, 4, 8)
        for fsdp in (1, 2, 4, 8)
        if count % (data * fsdp) == 0
    ]
    for count in (1, 2, 4, 8)
}
ONE = (1, 1, 1)


def mesh_of(shape):
    """The mesh of the first devices of this (data, fsdp, tensor)."""
    data, fsdp, tensor = shape
    return make_mesh(data, fsdp, tensor, devices=jax.devices()[: data * fsdp * tensor])


def uneven_trajectories():
    """Seven trajectories of 8 to 32 tokens, each a row of its own; of eight rows the last is empty."""
    rng = np.random.default_rng(0)
    # More than half of a row's sampled tokens each, so that no two share a row.
    plan = ([(1, 7)], [(20, 12)], [(2, 3), (4, 4), (3, 5)], [(5, 1), (1, 7)], [(3, 4), (2, 6)], [(24, 8)], [(1, 9)])
    out = []
    for episode, turns in enumerate(plan):
        made = [
            Turn(
                prompt_ids=rng.integers(0, SIZES.num_token_ids, prompt).astype(np.int32),
                response_ids=rng.integers(0, SIZES.num_token_ids, response).astype(np.int32),
                behavior_logprobs=-rng.random(response).astype(np.float32) - 3.0,
                reward=float(rng.normal()),
                stop=StopReason.EOS,
                policy_step=0,
            )
            for prompt, response in turns
        ]
        out.append(
            Trajectory(turns=made, terminated=True, truncated=False, group=episode, seed=episode, episode=episode)
        )
    return out


def actor_params(sizes=SIZES):
    return random_params(sizes)


def critic_params(sizes=SIZES):
    """A critic whose value head is not zero, so that values matter."""
    params = init_critic(sizes, jax.random.key(1), backbone=random_params(sizes, seed=1))
    kernel = np.random.default_rng(2).normal(size=sizes.hidden_size).astype(np.float32)
    return params | {"value_head": params["value_head"] | {"kernel": jnp.asarray(kernel)}}


def learner_settings(micro_rows, compute_dtype="float32", remat="none"):
    shape = BatchShape(
        rows=8, tokens=32, turns=3, sampled=12, trajectories=8, max_turns=4, max_sampled=12, micro_rows=micro_rows
    )
    forward = ForwardSettings(head_chunk=5, compute_dtype=compute_dtype, remat=remat)
    return LearnerSettings(shape, AlgorithmConfig(gamma=0.9, gae_lambda=0.8, entropy_coef=0.1), forward)


def learner_step(shape, micro_rows=8, sizes=SIZES, *, score=True, **forward):
    """One training step on a mesh: gradients, the parameters after it, metrics, and log-probs of a scoring pass."""
    settings = learner_settings(micro_rows, **forward)
    mesh = mesh_of(shape)
    learner = Learner(sizes, mesh, settings, cases.NO_CLIP, cases.NO_CLIP)
    actor, critic = learner.init_states(actor_params(sizes), critic_params(sizes))
    logprobs = None
    if score:
        batch, stats = pack(uneven_trajectories(), settings.shape)
        program = scoring.make_actor_score(sizes, mesh, settings)
        logprobs = program(actor.params, None, batch, np.int32(stats.num_micro), np.float32(0.9))["logprobs"]
    actor, critic, result = learner.step(actor, critic, uneven_trajectories(), step=0, temperature=0.9)
    states = actor, critic
    return jax.device_get({
        "gradient": [cases.gradients(state) for state in states],
        "parameters": [state.params for state in states],
        "logprobs": logprobs,
        "metrics": {name: x for name, x in result.metrics.items() if not name.startswith(("time/", "batch/"))},
        "batch": {name: x for name, x in result.metrics.items() if name.startswith("batch/")},
        "compiled": max(learner.compile_counts().values()),
    })  # fmt: skip


def update_program(mesh, sizes=SIZES, **forward):
    """The lowered update of the policy on a mesh, from shapes alone."""
    settings = learner_settings(8, **forward)
    optimizer = make_optimizer(cases.NO_CLIP)
    state = jax.eval_shape(lambda: init_state(optimizer, actor_params(sizes)))
    state = on(mesh, state)
    batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, pack([], settings.shape)[0]))
    table = jax.eval_shape(lambda: empty_table(settings.shape, settings.algorithm))
    estimate = scoring.make_estimate(settings)
    facts = select([], settings.shape, settings.algorithm).facts
    estimated = jax.eval_shape(estimate, table, facts, jax.eval_shape(jax.random.key, 0))
    count, temperature = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)
    update = make_actor_update(sizes, mesh, settings, optimizer)
    return update.lower(state, None, batch, estimated, table, None, None, count, temperature)


def on(mesh, tree):
    """Shapes with the places that the table gives them."""

    def place(leaf, sharding):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, tree, shardings(mesh, tree))


def sampler_programs(shape, settings, sizes=TIED):
    """(the lowered prefill and decode of a sampler on a mesh, from shapes alone, bytes of its cache)."""
    mesh = mesh_of(shape)
    cache = jax.eval_shape(make_empty_cache(sizes, mesh, settings))
    params = on(mesh, decoder_shapes(sizes))
    placed = on(mesh, {"cache": cache})["cache"]
    slots, rows = settings.num_slots, settings.prefill_rows * settings.data_shards(mesh)

    def ints(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.int32)

    keys, number = jax.ShapeDtypeStruct((slots, 2), jnp.uint32), jax.ShapeDtypeStruct((), jnp.float32)
    prefill = make_prefill(sizes, mesh, settings).lower(
        params, placed, ints(slots), ints(rows), ints(rows, 16), ints(rows)
    )
    decode = make_decode(sizes, mesh, settings).lower(
        params, placed, ints(slots), ints(slots), ints(slots), keys, ints(1), (number, number, ints())
    )
    return {"prefill": prefill, "decode": decode}, sum(x.size * x.dtype.itemsize for x in (cache.k, cache.v))


def largest_difference(got, want):
    """Over all leaves, in units of the leaf's largest entry."""

    def of(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-6))

    return max(jax.tree.leaves(jax.tree.map(of, got, want)))


def sampled_ids(shape, sizes=TIED, num_slots=8, sampling=None, **settings):
    """Ids and log-probs of two turns of eight conversations on a mesh."""
    data, fsdp, tensor = shape
    mesh = mesh_of((data, fsdp, tensor))
    made = SamplerSettings(
        num_slots=num_slots, context_length=64, decode_chunk=4, prefill_chunk=16, prefill_rows=2, **settings
    )
    sampler = Sampler(sizes, mesh, made, eos_ids=(7,))
    sampler.set_params(shard(mesh, random_params(sizes)))
    scheduler = Scheduler(sampler, sampling or Sampling(temperature=0.9, top_p=0.9), decode_text=str)
    keys, rng = episode_keys(0, 0, 0, num_slots), np.random.default_rng(0)
    drawn = [[] for _ in range(num_slots)]
    for slot, key in enumerate(keys):
        scheduler.open(slot, key)
    for _ in range(2):
        for slot in range(num_slots):
            # Prompts of 1 to 21 tokens: in one piece and in two.
            scheduler.extend(slot, rng.integers(8, 37, 1 + (5 * slot) % 22).astype(np.int32), 7)
        while scheduler.busy:
            scheduler.launch()
            for response in scheduler.collect():
                drawn[response.slot].append((response.ids.tolist(), response.logprobs))
    ids = [[ids for ids, _ in turns] for turns in drawn]
    logprobs = np.concatenate([logprobs for turns in drawn for _, logprobs in turns])
    return {"ids": ids, "logprobs": logprobs, "programs": sampler.num_programs}

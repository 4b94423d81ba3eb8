"""Run as a program with 8 CPU devices: the learner and the sampler on meshes against one device; prints one JSON line.

`tests/test_mesh.py` says what must hold; arguments name the checks to run, default all.
`python -m tests.mesh_sweep` does the same on every mesh.
"""

import json
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from tests import mesh_cases as mc
from tests.collectives import collectives, partitioned_text
from turnppo_jax.models.cache import copy_prefix, init_cache
from turnppo_jax.models.decoder import decoder_shapes
from turnppo_jax.models.sizes import SIZES
from turnppo_jax.parallel.mesh import rollout_mesh
from turnppo_jax.parallel.sharding import constrain, shard, shardings
from turnppo_jax.parallel.weight_sync import make_resharding, make_weight_sync
from turnppo_jax.rollout.sampler import Sampler, SamplerSettings
from turnppo_jax.rollout.sampling import sample_tokens

# Meshes with their rows of a micro-batch: of 8, 2 and 4 devices, in 1, 2 and 4 micro-batches. The last has fewer rows
# than devices, which then all compute the same ones.
LEARNERS = {(2, 2, 2): 8, (1, 1, 2): 4, (1, 4, 1): 2}
# Fewer key/value heads than tensor; heads that tensor does not divide; slots alone.
SAMPLERS = ((2, 1, 4), (1, 1, 8), (8, 1, 1))


def learners():
    """By mesh: the largest differences to one device with one micro-batch."""
    one = mc.learner_step(mc.ONE)
    out = {}
    for shape, micro_rows in LEARNERS.items():
        got = mc.learner_step(shape, micro_rows)
        names = ("gradient", "parameters", "logprobs")
        out[str(shape)] = {name: mc.largest_difference(got[name], one[name]) for name in names} | {
            "metrics": max(abs(got["metrics"][n] - x) / (1 + abs(x)) for n, x in one["metrics"].items()),
            "micro-batches": got["batch"]["batch/micro_batches"],
            "rows": got["batch"]["batch/rows"],
            "compiled": got["compiled"],
        }
    return out


def samplers():
    """By mesh: whether the ids are those of one device, how far log-probs are, and programs beyond its."""
    one = mc.sampled_ids(mc.ONE)
    assert len({tuple(ids) for turns in one["ids"] for ids in turns}) == 16
    settings = SamplerSettings(num_slots=8, context_length=64, prefill_rows=2)
    stranger = Sampler(mc.TIED, mc.mesh_of((4, 1, 1)), settings, eos_ids=(7,))
    try:
        stranger.prefill(np.zeros(8), np.array([0, 2, -1, -1, -1, -1, -1, -1]), np.zeros((8, 16)), np.zeros(8))
    except ValueError as error:
        out = {"refused": str(error)}
    for shape in SAMPLERS:
        got = mc.sampled_ids(shape)
        same = got["ids"] == one["ids"]
        out[str(shape)] = {
            "same": same,
            "logprobs": float(np.abs(got["logprobs"] - one["logprobs"]).max()) if same else math.inf,
            "programs": got["programs"] - one["programs"],
        }
    return out


def sampler_collectives():
    """By mesh and program: bytes of the largest collective over those of the cache."""
    settings = SamplerSettings(num_slots=8, context_length=2048, decode_chunk=4, prefill_chunk=16, prefill_rows=2)
    out = {}
    for shape in ((2, 1, 4), (4, 1, 2)):
        programs, cache_bytes = mc.sampler_programs(shape, settings)
        for name, lowered in programs.items():
            found = collectives(lowered.compile().as_text())
            out[f"{shape} {name}"] = max(c.bytes for c in found) / cache_bytes
    return out


def update_collectives():
    """Of a bfloat16 update: kinds, types and shapes of what crosses devices."""
    text = partitioned_text(mc.update_program(mc.mesh_of((2, 2, 2)), compute_dtype="bfloat16", remat="full"))
    return [(c.kind, c.dtype, list(c.shape)) for c in collectives(text)]


def draws_from_a_split_vocabulary():
    """By mesh: whether equal logits, split over tensor, give the ids of one device, and how far log-probs are."""
    rng = np.random.default_rng(0)
    logits = np.where(rng.random((8, 1000)) < 0.1, -np.inf, rng.normal(size=(8, 1000)) * 3).astype(np.float32)
    uniforms = rng.random(8).astype(np.float32)

    def drawn(mesh):
        def draw(logits, uniforms, temperature, top_p, top_k):
            logits = constrain(constrain(logits, ("rows", "vocab"), mesh), ("draws",), mesh)
            return sample_tokens(logits, uniforms, temperature=temperature, top_p=top_p, top_k=top_k)

        draw = jax.jit(draw)
        settings = [(1.0, 1.0, 0), (0.7, 0.9, 0), (1.3, 1.0, 20), (0.0, 1.0, 0)]
        return [
            jax.device_get(draw(logits, uniforms, np.float32(t), np.float32(p), np.int32(k))) for t, p, k in settings
        ]

    one, out = drawn(None), {}
    for shape in ((2, 1, 4), (1, 1, 8)):
        pairs = list(zip(drawn(mc.mesh_of(shape)), one))
        out[str(shape)] = {
            "same": all(np.array_equal(got[0], want[0]) for got, want in pairs),
            "logprobs": max(float(np.abs(got[1] - want[1]).max()) for got, want in pairs),
        }
    return out


def weights():
    """Weights that go from the training mesh to a rollout mesh."""
    training = mc.mesh_of((1, 4, 2))
    target = rollout_mesh(training, data=4, tensor=2)
    params = shard(training, mc.actor_params())
    out = jax.device_get(make_weight_sync(mc.SIZES, training, target, "bfloat16")(params))
    cast = jax.tree.map_with_path(
        lambda path, x: x if path[-1].key == "scale" else x.astype(jnp.bfloat16), mc.actor_params()
    )
    placed = make_weight_sync(mc.SIZES, training, target, "float32")(params)
    resharding = make_resharding(mc.SIZES, training, target, "bfloat16")
    text = partitioned_text(resharding.lower(mc.on(training, decoder_shapes(mc.SIZES))))
    return {
        "cast": all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (out, cast)))),
        "placed": jax.tree.map(lambda x: x.sharding, placed) == shardings(target, params),
        "values": mc.largest_difference(placed, params),
        "types": sorted({c.dtype for c in collectives(text)}),
        "same mesh is free": make_weight_sync(mc.SIZES, training, training, "float32")(params) is params,
    }


def tables():
    """Where the table puts the weights of published models, whose heads tensor=4 does not always divide."""
    # 0.5B has 14 query and 2 key/value heads: tensor=4 divides neither.
    odd = shardings(mc.mesh_of((1, 1, 4)), decoder_shapes(SIZES["qwen2.5-0.5b"]))
    attention = odd["layers"]["attention"]
    assert attention["q"]["kernel"].spec == attention["o"]["kernel"].spec == attention["k"]["bias"].spec == P()
    assert odd["layers"]["mlp"]["up"]["kernel"].spec == P(None, None, "tensor")
    # 1.5B has 12 query and 2 key/value heads: the queries are split, the keys replicated, in the cache twice each.
    mesh = mc.mesh_of((1, 1, 4))
    attention = shardings(mesh, decoder_shapes(SIZES["qwen2.5-1.5b"]))["layers"]["attention"]
    assert attention["q"]["kernel"].spec == P(None, None, "tensor")
    assert attention["k"]["kernel"].spec == P()
    cache = jax.eval_shape(lambda: init_cache(SIZES["qwen2.5-1.5b"], 8, 256, mesh=mesh))
    assert cache.k.shape[3] == 4 and shardings(mesh, {"cache": cache})["cache"].k.spec == P(None, None, None, "tensor")
    cache = jax.eval_shape(lambda: init_cache(SIZES["qwen2.5-1.5b"], 8, 256))
    placed = shardings(mc.mesh_of((2, 2, 2)), {"cache": cache})["cache"]
    assert placed.k.spec == P(None, None, ("data", "fsdp"), "tensor")
    assert placed.lengths.spec == P(("data", "fsdp"))
    again = shardings(mc.mesh_of((1, 4, 1)), decoder_shapes(SIZES["qwen2.5-0.5b"]))
    assert again["embed"]["embedding"].spec == P(None, "fsdp")
    return True


def forked_slots():
    """Whether `copy_prefix` between data shards gives what one device gives, and its largest collective in slots."""
    mesh = mc.mesh_of((4, 1, 2))
    rng = np.random.default_rng(0)
    cache = jax.tree.map(
        lambda x: jnp.asarray(rng.integers(1, 9, x.shape), x.dtype), init_cache(mc.TIED, 8, 128, mesh=mesh)
    )
    placed = jax.device_put(cache, shardings(mesh, {"cache": cache})["cache"])
    fork = jax.jit(lambda cache: copy_prefix(cache, 1, 6, 4, mesh))
    got, want = fork(placed), copy_prefix(cache, 1, 6, 4)
    moved = max(c.bytes for c in collectives(fork.lower(placed).compile().as_text()))
    same = all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)))
    return {"same": same, "slots": moved / (cache.k.nbytes / cache.num_slots)}


def main():
    assert len(jax.devices()) == 8
    jax.config.update("jax_disable_most_optimizations", True)
    checks = (
        learners, samplers, sampler_collectives, update_collectives, draws_from_a_split_vocabulary, weights, tables,
        forked_slots,
    )  # fmt: skip
    chosen = [check for check in checks if check.__name__ in sys.argv[1:] or not sys.argv[1:]]
    print(json.dumps({check.__name__: check() for check in chosen}))


if __name__ == "__main__":
    main()

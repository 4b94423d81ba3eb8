"""Run as a program: compiles kernels, prefill and decode for TPUs that are not there; prints what the compiler says.

Arguments are names of `KERNELS` and `SAMPLERS`; without any, all. Needs libtpu.
"""

import functools
import json
import os
import re
import sys
import time

# Before jax starts: no TPU is looked for, no metadata server asked, and other processes may hold the library too.
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
}

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from turnppo_jax.models.cache import cache_shardings, init_cache
from turnppo_jax.models.decoder import decoder_shapes
from turnppo_jax.models.ragged_attention import ragged_attend
from turnppo_jax.models.ragged_schedule import make_schedule
from turnppo_jax.models.ragged_write import make_spans, ragged_write
from turnppo_jax.models.sizes import ModelSizes
from turnppo_jax.models.splash_attention import splash_attention
from turnppo_jax.parallel.mesh import make_mesh
from turnppo_jax.parallel.sharding import shardings
from turnppo_jax.rollout.sampler import SamplerSettings, make_decode, make_empty_cache, make_prefill

TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")
# Query heads, key/value heads, head size of Qwen2.5-3B, 7B and 0.5B.
HEADS = {"3b": (16, 2, 128), "7b": (28, 4, 128), "0.5b": (14, 2, 64)}
# The compiler's quick mode: the same kernels and partitioning, less searching.
QUICK = {"exec_time_optimization_effort": -1.0}


@functools.cache
def devices(topology):
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


def splash(heads, kv_heads, head_dim, dtype=jnp.bfloat16, length=1024):
    """Values and gradients of one row."""

    def step(q, k, v, segment_ids, d_out):
        out, pull_back = jax.vjp(lambda *qkv: splash_attention(*qkv, segment_ids), q, k, v)
        return out, pull_back(d_out)

    q, k = ((1, length, n, head_dim) for n in (heads, kv_heads))
    return jax.jit(step), [(q, dtype), (k, dtype), (k, dtype), ((1, length), jnp.int32), (q, dtype)], 0


def ragged(heads, kv_heads, head_dim, dtype=jnp.bfloat16, *, rows, queries):
    """Writing and attending for new tokens of slots of 4,096 positions."""
    sizes = ModelSizes(
        "qwen2", 8, 8, heads * head_dim, 4, heads, kv_heads, head_dim, 8, 1e6, 1e-6, True, True, False, 9
    )
    cache = jax.eval_shape(lambda: init_cache(sizes, 64, 4096, dtype, attention="ragged"))

    def step(k, v, slots, positions, q, new_k, new_v):
        k, v = ragged_write(k, v, jnp.int32(1), make_spans(k, slots, positions), new_k, new_v)
        return k, v, ragged_attend(k, v, jnp.int32(1), make_schedule(k, slots, positions, heads), q, kv_heads)

    stacked, new = (cache.k.shape, dtype), ((rows, queries, kv_heads, head_dim), dtype)
    arguments = [stacked, stacked, ((rows,), jnp.int32), ((rows, queries), jnp.int32)]
    arguments += [((rows, queries, heads, head_dim), dtype), new, new]
    return jax.jit(step, donate_argnums=(0, 1)), arguments, 2 * cache.k.size * cache.k.dtype.itemsize


_MAKERS = {
    "splash": splash,
    "decode": functools.partial(ragged, rows=64, queries=1),
    "prefill": functools.partial(ragged, rows=4, queries=256),
}
_WHERE = (("3b", TOPOLOGIES[0]), ("3b", TOPOLOGIES[1]), ("7b", TOPOLOGIES[2]), ("0.5b", TOPOLOGIES[0]))
KERNELS = {
    f"{kind} {model} {topology}": (make, HEADS[model], topology)
    for kind, make in _MAKERS.items()
    for model, topology in _WHERE
} | {
    "splash in float32": (functools.partial(splash, dtype=jnp.float32, length=256), HEADS["3b"], TOPOLOGIES[0]),
    "prefill in float32": (
        functools.partial(ragged, dtype=jnp.float32, rows=2, queries=16),
        HEADS["3b"],
        TOPOLOGIES[0],
    ),
}
SAMPLERS = ("sampler's decode", "sampler's prefill")


def compile_kernel(name):
    """The compiled program, and the bytes of its donated cache."""
    make, heads, topology = KERNELS[name]
    device = devices(topology)[0]
    program, arguments, cache_bytes = make(*heads)
    place = SingleDeviceSharding(device)
    shapes = [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in arguments]
    return program.lower(*shapes).compile(compiler_options=QUICK), cache_bytes


def compile_sampler(name):
    """The sampler's program of a shallow model on four chips, slots over two and heads over two."""
    sizes = ModelSizes("qwen2", 1024, 1024, 2048, 4, 16, 2, 128, 1024, 1e6, 1e-6, True, True, False, 4096)
    mesh = make_mesh(2, 1, 2, devices=list(devices(TOPOLOGIES[0])))
    settings = SamplerSettings(num_slots=32, context_length=4096, prefill_rows=2, compute_dtype="bfloat16")
    whole = NamedSharding(mesh, PartitionSpec())

    def placed(tree, places):
        return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, places)

    def ints(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), decoder_shapes(sizes))
    params = placed(params, shardings(mesh, params))
    cache = jax.eval_shape(make_empty_cache(sizes, mesh, settings))
    places = cache_shardings(mesh, cache)
    cache_bytes = 2 * np.prod(places.k.shard_shape(cache.k.shape)) * 2
    cache = placed(cache, places)
    slots, rows = settings.num_slots, 4
    if name == SAMPLERS[0]:
        numbers = (ints(dtype=jnp.float32), ints(dtype=jnp.float32), ints())
        keys = ints(slots, 2, dtype=jnp.uint32)
        arguments = (params, cache, ints(slots), ints(slots), ints(slots), keys, ints(2), numbers)
        lowered = make_decode(sizes, mesh, settings).lower(*arguments)
    else:
        arguments = (params, cache, ints(slots), ints(rows), ints(rows, 256), ints(rows))
        lowered = make_prefill(sizes, mesh, settings).lower(*arguments)
    return lowered.compile(compiler_options=QUICK), int(cache_bytes)


_BYTES = {"bf16": 2, "f32": 4, "s32": 4, "u32": 4, "pred": 1}
_RESULT = re.compile(r"= (\(?[a-z0-9]+\[.*?) ([a-z][a-z0-9-]*)\(")
# What passes a buffer on without moving a byte of it, and the kernels, which own theirs.
_STILL = ("parameter", "tuple", "get-tuple-element", "bitcast", "while", "custom-call", "conditional", "call")


def largest_moved(text):
    """Bytes of the largest array that an instruction of a compiled program makes anew, and the instruction."""
    largest = (0, "")
    for line in text.splitlines():
        result = _RESULT.search(line)
        if result and result[2] not in _STILL:
            for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", result[1]):
                size = _BYTES.get(dtype, 4) * int(np.prod([int(n) for n in shape.split(",") if n] or [1]))
                largest = max(largest, (size, line.strip()[:200]))
    return largest


def main(names):
    for name in names or [*KERNELS, *SAMPLERS]:
        begin = time.process_time()
        compiled, cache_bytes = compile_sampler(name) if name in SAMPLERS else compile_kernel(name)
        memory = compiled.memory_analysis()
        text = compiled.as_text()
        moved, line = largest_moved(text)
        found = {
            "program": name,
            "seconds": round(time.process_time() - begin, 2),
            "cache": cache_bytes,
            "aliased": memory.alias_size_in_bytes,
            "temporary": memory.temp_size_in_bytes,
            "moved": moved,
            "line": line,
            "kernels": sorted(set(re.findall(r"%(splash\w+?|ragged_\w+?)[.\d]* = ", text))),
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

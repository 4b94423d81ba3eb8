"""The sampler's programs over shapes alone, on one host: no weights exist."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from turnppo_jax.models.sizes import ModelSizes
from turnppo_jax.planning.programs import Program
from turnppo_jax.planning.rollout_load import RolloutLoad
from turnppo_jax.planning.states import States, replicated
from turnppo_jax.planning.topology import Topology
from turnppo_jax.rollout import sampler
from turnppo_jax.settings import RunSettings


def rollout_programs(
    settings: RunSettings, sizes: ModelSizes, topology: Topology, mesh: Mesh, states: States, load: RolloutLoad
) -> list[Program]:
    """What `rollout.sampler.Sampler` runs: the largest prefill and the decode program.

    Args:
      settings: of the run.
      sizes: of the model.
      topology: of one host.
      mesh: of the sampler, over its devices.
      states: of the models; those of the sampler on that mesh.
      load: of the host.
    """
    options = settings.sampler
    slots, length = options.num_slots, options.prefill_chunk
    rows = options.prefill_rows * options.data_shards(mesh)
    # Attention in plain jax loops over the blocks of the cache that are live; the kernels have no such loop.
    blocks = (float(math.ceil(load.mean_context / states.cache.block)),)
    common = {
        "phase": "rollout",
        "topology": topology,
        "mesh": mesh,
        "holds": ("rollout weights", "cache"),
        "params": states.rollout,
        "dynamic": blocks,
        "branch": int(settings.rollout.top_p < 1 or settings.rollout.top_k > 0),
    }
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    of_prefill = ints((slots,)), ints((rows,)), ints((rows, length)), ints((rows,))
    keys, sampling = jax.ShapeDtypeStruct((slots, 2), jnp.uint32), (jnp.float32(1), jnp.float32(1), jnp.int32(0))
    of_decode = ints((slots,)), ints((slots,)), ints((slots,)), keys, ints((2,)), sampling
    return [
        Program(
            "prefill",
            function=sampler.make_prefill(sizes, mesh, options),
            arguments=(states.rollout, states.cache, *replicated(mesh, of_prefill)),
            runs=load.prefill_calls(rows),
            loops=blocks,
            **common,
        ),
        Program(
            "decode",
            function=sampler.make_decode(sizes, mesh, options),
            arguments=(states.rollout, states.cache, *replicated(mesh, of_decode)),
            runs=load.decode_steps / options.decode_chunk,
            loops=(options.decode_chunk, *blocks),
            **common,
        ),
    ]

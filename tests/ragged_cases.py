"""A decoder whose cache is read and written by the emulated TPU kernels, against rows without a cache."""

import dataclasses
import functools

import jax
import numpy as np

from tests.model_fixtures import hidden_states, random_params, random_tokens, small_sizes, whole_row
from turnppo_jax.models import cache_attention
from turnppo_jax.models.cache import cache_shardings, init_cache
from turnppo_jax.models.decoder import bind
from turnppo_jax.parallel.sharding import shard


def emulate():
    """Puts the emulated kernels under the name "ragged"; returns what stood there."""
    ragged = cache_attention.CACHE_ATTENTION["ragged"]
    cache_attention.CACHE_ATTENTION["ragged"] = dataclasses.replace(
        ragged,
        write=functools.partial(cache_attention.write_ragged, interpret=True),
        attend=functools.partial(cache_attention.attend_ragged, interpret=True),
    )
    return ragged


def largest_error(mesh=None, **changes):
    """Of hidden states: two turns in slots 3 and 0 of four, prompts in pieces of 12 across a block's end, decoding.

    The call has a row for each slot; those of the others are dummies.
    """
    sizes = small_sizes("qwen2", **changes)
    params = random_params(sizes)
    texts = {3: random_tokens(sizes, 142, seed=1), 0: random_tokens(sizes, 21, seed=2)}
    expected = {
        slot: np.asarray(hidden_states(params, sizes, t[None], *whole_row(len(t)))[0]) for slot, t in texts.items()
    }
    cache = init_cache(sizes, 4, 256, mesh=mesh, attention="ragged")
    if mesh is not None:
        params, cache = shard(mesh, params), jax.device_put(cache, cache_shardings(mesh, cache))
    prefill = jax.jit(lambda params, *args: bind(params, sizes, mesh).prefill(*args))
    decode = jax.jit(lambda params, *args: bind(params, sizes, mesh).decode(*args))
    at, worst = dict.fromkeys(texts, 0), 0.0
    for prompts in ({3: 126, 0: 5}, {3: 7, 0: 9}):
        while any(prompts.values()):
            slots, counts = np.full(4, -1, np.int32), np.zeros(4, np.int32)
            tokens = np.zeros((4, 12), np.int32)
            for slot, left in prompts.items():
                count = min(12, left)
                slots[slot], counts[slot] = slot, count
                tokens[slot, :count] = texts[slot][at[slot] : at[slot] + count]
                at[slot] += count
                prompts[slot] -= count
            cache = prefill(params, cache, slots, tokens, counts)
        for _ in range(3):
            tokens, active = np.zeros(4, np.int32), np.zeros(4, bool)
            for slot, text in texts.items():
                tokens[slot], active[slot] = text[at[slot]], True
            hidden, cache = decode(params, cache, tokens, active)
            for slot in texts:
                worst = max(worst, float(np.abs(np.asarray(hidden[slot]) - expected[slot][at[slot]]).max()))
                at[slot] += 1
    np.testing.assert_array_equal(cache.lengths, [at[0], 0, 0, at[3]])
    return worst

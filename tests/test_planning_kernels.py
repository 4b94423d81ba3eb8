"""Costs of the Pallas kernels against counts by hand, and against what the cache says that it reads."""

import functools

import jax
import jax.numpy as jnp
import pytest

from turnppo_jax.models.cache import init_cache
from turnppo_jax.models.cache_traffic import decode_traffic
from turnppo_jax.models.decoder import bind, decoder_shapes
from turnppo_jax.models.sizes import SIZES
from turnppo_jax.models.splash_attention import block_size, splash_attention
from turnppo_jax.planning.flops import traced_flops
from turnppo_jax.planning.kernel_costs import costs


@pytest.mark.parametrize("rows", [1, 3])
def test_splash_attention_computes_the_blocks_up_to_the_diagonal(rows):
    length, heads, kv_heads, head_dim = 1536, 8, 2, 128
    q = jax.ShapeDtypeStruct((rows, length, heads, head_dim), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((rows, length, kv_heads, head_dim), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    side = block_size(length)
    blocks = length // side
    pairs = rows * heads * blocks * (blocks + 1) // 2
    product, matrix = 2 * side * side * head_dim, side * head_dim * 2
    whole = rows * heads * length * head_dim * 2

    forward = traced_flops(jax.make_jaxpr(splash_attention)(q, k, k, ids), kernel_costs=costs())
    assert forward.kernels == pairs * 2 * product  # scores, and their mean of the values
    # Keys and values once a pair, queries and results once; the gradient's two kernels read the latter twice.
    assert pairs * 2 * matrix + 2 * whole <= forward.kernel_bytes <= pairs * 2 * matrix + 3 * whole

    @functools.partial(jax.grad, argnums=(0, 1, 2))
    def gradient(q, k, v, ids):
        return jnp.sum(splash_attention(q, k, v, ids).astype(jnp.float32))

    both = traced_flops(jax.make_jaxpr(gradient)(q, k, k, ids), kernel_costs=costs())
    # Scores again in each of two kernels; of queries: dP and dQ; of keys and values: dV, dP and dK.
    assert both.kernels == pairs * (2 + 3 + 4) * product
    assert pairs * 3 * 2 * matrix < both.kernel_bytes < pairs * 3 * 2 * matrix + 12 * whole


def test_decoding_reads_the_live_cache_and_rewrites_tiles():
    sizes, slots, capacity, live = SIZES["qwen3-1.7b"], 4, 1024, 300
    cache = jax.eval_shape(lambda: init_cache(sizes, slots, capacity, jnp.bfloat16, attention="ragged"))
    params = decoder_shapes(sizes, jnp.bfloat16)

    def step(params, cache, tokens):
        model = bind(params, sizes)
        return model.decode(cache, tokens, tokens >= 0, compute_dtype=jnp.bfloat16)

    jaxpr = jax.make_jaxpr(step)(params, cache, jax.ShapeDtypeStruct((slots,), jnp.int32))
    moved = traced_flops(jaxpr, kernel_costs=costs(live)).kernel_bytes
    told = decode_traffic(sizes, cache, [live] * slots)
    # What the cache says it fetches, the rewritten tiles read and written, and queries, results and new keys.
    least = told.fetched_cache + 2 * told.rewritten_cache
    assert least < moved < 1.05 * least
    assert told.fetched_cache == 2 * 28 * slots * 384 * 8 * 128 * 2  # 300 positions are three blocks of 128
    longer = traced_flops(jaxpr, kernel_costs=costs(live + 128)).kernel_bytes
    assert longer - moved == told.fetched_cache / 3

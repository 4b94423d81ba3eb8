"""Small models and rows for the tests of the model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from turnppo_jax.models.decoder import bind, decoder_shapes
from turnppo_jax.models.sizes import SIZES

FAMILIES = ("qwen2", "qwen3", "llama")


def small_sizes(family="qwen3", **changes):
    """Two layers, width 32, odd sizes where they may be odd; untied for llama."""
    small = {
        "vocab_size": 50, "num_token_ids": 47, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 8, "intermediate_size": 40,
    }  # fmt: skip
    return dataclasses.replace(SIZES[f"tiny-{family}"], **(small | changes))


def random_params(sizes, seed=0):
    """Every leaf random: norm scales and biases too, so that a wrong one shows. By numpy: nothing to compile."""
    rng = np.random.default_rng(seed)

    def draw(path, shape):
        name, noise = path[-1].key, rng.normal(size=shape.shape)
        if name == "scale":
            return jnp.asarray(1 + 0.2 * noise, jnp.float32)
        if name == "kernel":
            return jnp.asarray(noise * sizes.hidden_size**-0.5, jnp.float32)
        return jnp.asarray(0.2 * noise, jnp.float32)

    return jax.tree.map_with_path(draw, decoder_shapes(sizes))


def random_tokens(sizes, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, sizes.num_token_ids, shape).astype(np.int32)


@functools.cache
def _hidden_program(sizes, options):
    def run(params, *row):
        return bind(params, sizes).hidden_states(*row, **dict(options))

    return jax.jit(run)


def hidden_states(params, sizes, *row, **options):
    """`Decoder.hidden_states` of (tokens, positions, segment_ids), compiled once for each sizes and options."""
    return _hidden_program(sizes, tuple(sorted(options.items())))(params, *row)


def whole_row(length, start=0):
    """positions [1, T], segment_ids [1, T] of one document."""
    return start + jnp.arange(length, dtype=jnp.int32)[None], jnp.ones((1, length), jnp.int32)

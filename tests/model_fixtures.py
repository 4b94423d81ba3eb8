"""Small models and rows for the tests of the model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from turnppo_jax.models.decoder import init_decoder
from turnppo_jax.models.sizes import SIZES

FAMILIES = ("qwen2", "qwen3", "llama")


def small_sizes(family="qwen3", **changes):
    """Two layers, width 32, odd sizes where they may be odd; untied for llama."""
    small = dict(
        vocab_size=50, num_token_ids=47, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        intermediate_size=40,
    )  # fmt: skip
    return dataclasses.replace(SIZES[f"tiny-{family}"], **(small | changes))


def random_params(sizes, seed=0):
    """Every leaf random: norm scales and biases too, so that a wrong one shows."""
    params = init_decoder(sizes, jax.random.key(seed))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 1000), len(leaves))
    noisy = [leaf + 0.2 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys)]
    return jax.tree.unflatten(tree, noisy)


def random_tokens(sizes, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, sizes.num_token_ids, shape).astype(np.int32)


def whole_row(length, start=0):
    """positions [1, T], segment_ids [1, T] of one document."""
    return start + jnp.arange(length, dtype=jnp.int32)[None], jnp.ones((1, length), jnp.int32)

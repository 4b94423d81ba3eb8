"""The attention implementations against the dense reference, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from turnppo_jax.models.attention import ATTENTION, attention_by_name, einsum_attention


def inputs(length, heads, kv_heads, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(length), 3)
    q, k, v = (
        jax.random.normal(key, (2, length, count, 16), dtype) for key, count in zip(keys, (heads, kv_heads, kv_heads))
    )
    # Two documents and padding; the second row is one document.
    segment_ids = np.ones((2, length), np.int32)
    segment_ids[0, length // 3 :] = 2
    segment_ids[0, length - length // 4 :] = 0
    return q, k, v, jnp.asarray(segment_ids)


# "splash" runs on TPUs alone; see test_splash_attention.
ANYWHERE = [name for name in ATTENTION if name != "splash"]


@pytest.mark.parametrize("name", [name for name in ANYWHERE if name != "einsum"])
@pytest.mark.parametrize(("length", "heads", "kv_heads"), [(7, 2, 2), (64, 4, 2), (150, 6, 2), (700, 2, 1)])
def test_values_and_gradients_equal_the_dense_reference(name, length, heads, kv_heads):
    *qkv, segment_ids = inputs(length, heads, kv_heads)
    real = (segment_ids > 0)[..., None, None]  # what stands at padding means nothing

    def scalar(attention, q, k, v):
        out = jnp.where(real, attention(q, k, v, segment_ids), 0)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32).reshape(out.shape))), out

    results = []
    for attention in (ATTENTION[name], einsum_attention):
        grads, out = jax.jit(jax.grad(lambda *a, f=attention: scalar(f, *a), argnums=(0, 1, 2), has_aux=True))(*qkv)
        results.append((out, *grads))
    for ours, reference in zip(*results, strict=True):
        # float32 sums of up to 700 terms of size 1: some 1e-5 of rounding.
        np.testing.assert_allclose(ours, reference, atol=5e-5)


@pytest.mark.parametrize("name", ANYWHERE)
def test_bfloat16_stays_bfloat16_and_close(name):
    *qkv, segment_ids = inputs(96, 4, 2, jnp.bfloat16)
    out = attention_by_name(name)(*qkv, segment_ids)
    exact = einsum_attention(*(x.astype(jnp.float32) for x in qkv), segment_ids)
    assert out.dtype == jnp.bfloat16
    real = np.asarray(segment_ids) > 0
    # The weights and the result are rounded to 8 bits of mantissa.
    np.testing.assert_allclose(np.asarray(out, np.float32)[real], np.asarray(exact)[real], atol=0.03)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown attention 'flash'; known: auto, blocked, einsum, splash"):
        attention_by_name("flash")

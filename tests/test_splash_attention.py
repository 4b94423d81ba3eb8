"""Splash attention, emulated, against the dense reference: values and gradients of packed rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernel_products import kernel_precisions
from turnppo_jax.models import splash_attention as splash
from turnppo_jax.models.attention import choose_attention, einsum_attention
from turnppo_jax.models.decoder import bind
from turnppo_jax.models.splash_attention import block_size, splash_attention
from turnppo_jax.parallel.mesh import make_mesh
from turnppo_jax.training.forward import ForwardSettings

emulated = functools.partial(splash_attention, interpret=True)


def packed(length, heads, kv_heads, head_dim, rows=2, dtype=np.float32):
    """q, k, v and segment ids: two documents and padding in the first row, one document in the last."""
    rng = np.random.default_rng(length + heads)
    q, k, v = (rng.normal(size=(rows, length, n, head_dim)).astype(dtype) for n in (heads, kv_heads, kv_heads))
    segment_ids = np.ones((rows, length), np.int32)
    segment_ids[0, length // 3 :] = 2
    segment_ids[0, length - length // 4 :] = 0
    return q, k, v, segment_ids


@functools.cache
def _step(attention, mesh):
    def scalar(q, k, v, segment_ids):
        out = attention(q, k, v, segment_ids, mesh)
        weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32).reshape(out.shape))
        real = (segment_ids > 0)[..., None, None]
        return jnp.sum(jnp.where(real, out.astype(jnp.float32), 0) * weights), out

    return jax.jit(jax.grad(scalar, argnums=(0, 1, 2), has_aux=True))


def values_and_gradients(attention, q, k, v, segment_ids, mesh=None):
    """Output, with zeros at padding, and the gradients of a sum of it that weighs every entry differently."""
    grads, out = _step(attention, mesh)(q, k, v, segment_ids)
    out, *grads = (np.asarray(x, np.float32) for x in (out, *grads))
    assert np.isfinite(out).all()  # at padding too
    return [np.where((segment_ids > 0)[..., None, None], out, 0), *grads]


@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "head_dim"), [(128, 2, 2, 64), (256, 4, 2, 128), (256, 8, 1, 16)]
)
def test_values_and_gradients_equal_the_dense_reference(length, heads, kv_heads, head_dim, monkeypatch):
    monkeypatch.setattr(splash, "_LARGEST_BLOCK", 128)  # several blocks a row
    _step.cache_clear()  # compiled with another block
    case = packed(length, heads, kv_heads, head_dim)
    ours, reference = (values_and_gradients(f, *case) for f in (emulated, einsum_attention))
    for found, expected in zip(ours, reference, strict=True):
        # float32 sums of up to 256 * 8 terms of size 1.
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


def test_bfloat16_against_the_reference_in_float32():
    case = packed(128, 4, 2, 64, dtype=jnp.bfloat16)
    ours = values_and_gradients(emulated, *case)
    exact = values_and_gradients(einsum_attention, *(x.astype(np.float32) for x in case[:3]), case[3])
    # The scaled queries, the weights and the result are rounded to 8 bits, 2 ** -9 of their size each; the reference
    # in bfloat16 rounds as often. What is rounded is of size 1 (result) to 8 (gradients are sums over a group of 2
    # heads and as many queries as see a key, of terms below 1): errors of some 2 ** -9 of the largest.
    for found, expected in zip(ours, exact, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=2**-7 * np.abs(expected).max())


def test_documents_and_padding_do_not_see_each_other():
    q, k, v, segment_ids = packed(128, 2, 1, 64)
    base = values_and_gradients(emulated, q, k, v, segment_ids)
    changed = [x.copy() for x in (q, k, v)]
    first = segment_ids[0] == 1
    for x in changed:
        x[0, ~first] = 3 * x[0, ~first] + 1
    again = values_and_gradients(emulated, *changed, segment_ids)
    for before, after in zip(base, again):
        np.testing.assert_array_equal(before[0, first], after[0, first])
    for gradient in base[1:]:
        assert not gradient[0, segment_ids[0] == 0].any()


def test_rows_that_are_no_multiple_of_128_name_the_field():
    case = packed(96, 2, 2, 64)
    with pytest.raises(ValueError, match=r"rows of T=96 tokens \(config.rows.tokens\); allowed: a multiple of 128"):
        emulated(*case)


@pytest.mark.parametrize(
    ("length", "side"), [(128, 128), (512, 512), (4096, 512), (15360, 512), (1152, 384), (640, 128)]
)
def test_blocks_divide_the_row(length, side):
    assert block_size(length) == side
    assert length % side == 0


def test_float32_products_ask_for_full_precision():
    # A TPU rounds float32 operands to bfloat16 unless asked not to; no CPU shows it.
    def step(q, k, v, segment_ids):
        out, pull_back = jax.vjp(lambda q, k, v: splash_attention(q, k, v, segment_ids), q, k, v)
        return pull_back(out)

    highest = (jax.lax.Precision.HIGHEST,) * 2
    kernels = kernel_precisions(step, *packed(128, 2, 1, 64))
    assert sorted(map(len, kernels)) == [2, 3, 4]  # forward, gradients of queries, of keys and values
    assert all(precision == highest for kernel in kernels for precision in kernel)
    assert kernel_precisions(step, *packed(128, 2, 1, 64, dtype=jnp.bfloat16))[0] == [None, None]


def test_auto_takes_the_kernels_where_they_run():
    cpu = make_mesh(devices=jax.devices()[:1])
    assert choose_attention("auto", cpu, 256) == choose_attention("auto", None, 256) == "blocked"
    assert choose_attention("einsum", cpu, 7) == "einsum"
    with pytest.raises(ValueError, match="attention='splash' on cpu devices; allowed there: auto, blocked, einsum"):
        choose_attention("splash", cpu, 256)
    assert ForwardSettings().attention == "auto"
    with pytest.raises(ValueError, match="unknown attention 'flash'; known: auto, blocked, einsum, splash"):
        ForwardSettings(attention="flash")


def test_a_decoder_on_cpu_refuses_the_tpu_kernels_by_name():
    from tests.model_fixtures import random_params, random_tokens, small_sizes, whole_row

    sizes = small_sizes()
    model = bind(random_params(sizes), sizes, make_mesh(devices=jax.devices()[:1]))
    with pytest.raises(ValueError, match="attention='splash' on cpu devices"):
        model.hidden_states(random_tokens(sizes, 1, 128), *whole_row(128), attention="splash")

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model_fixtures import FAMILIES, hidden_states, random_params, random_tokens, small_sizes, whole_row
from tests.model_oracle import forward
from turnppo_jax.models.attention import ATTENTION
from turnppo_jax.models.decoder import (
    REMAT_POLICIES,
    bind,
    decoder_shapes,
    init_decoder,
    rotary_table,
)
from turnppo_jax.models.parameters import cast_weights


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("theta", "start"), [(1e4, 0), (5e6, 4990)])
def test_forward_equals_the_float64_oracle(family, theta, start):
    sizes = small_sizes(family, rope_theta=theta)
    params, tokens = random_params(sizes), random_tokens(sizes, 1, 11)
    positions, segment_ids = whole_row(11, start)
    hidden = hidden_states(params, sizes, tokens, positions, segment_ids)
    model = bind(params, sizes)
    expected_hidden, expected_logits = forward(params, sizes, tokens[0], np.asarray(positions[0]))
    # Two layers of float32 sums over at most 40 terms of order 1: 2e-5. At position 5,000 float32 angles are off by
    # up to 2.4e-4, which turns into as much in a head's scores.
    tolerance = 2e-5 if start == 0 else 1e-3
    np.testing.assert_allclose(hidden[0], expected_hidden, rtol=0, atol=tolerance)
    np.testing.assert_allclose(model.logits(hidden)[0], expected_logits, rtol=0, atol=3 * tolerance)


def test_theta_and_positions_reach_the_rotation():
    tokens = random_tokens(small_sizes(), 1, 9)
    positions, segment_ids = whole_row(9)
    params = random_params(small_sizes())

    def run(theta, positions):
        return hidden_states(params, small_sizes(rope_theta=theta), tokens, positions, segment_ids)

    base = run(1e4, positions)
    assert float(jnp.max(jnp.abs(base - run(5e6, positions)))) > 1e-2
    assert float(jnp.max(jnp.abs(base - run(1e4, 2 * positions)))) > 1e-2
    # The rotation is relative: shifting a whole document changes nothing but rounding (angles up to 1,000: 6e-5).
    np.testing.assert_allclose(base, run(1e4, positions + 1000), rtol=0, atol=1e-3)


def test_positions_above_256_are_not_rounded():
    sizes = small_sizes(rope_theta=1e4)
    cos, _ = rotary_table(jnp.array([257, 1001, 4097], jnp.int32), sizes)
    assert cos.dtype == jnp.float32
    # bfloat16 would round 257 to 256, 1001 to 1000 and 4097 to 4096 (KNOWN_FAULTS 30).
    np.testing.assert_allclose(cos[:, 0, 0], np.cos([257.0, 1001.0, 4097.0]), atol=1e-6)
    assert np.all(np.abs(cos[:, 0, 0] - np.cos([256.0, 1000.0, 4096.0])) > 0.1)


# "splash" runs on TPUs alone; see test_splash_attention.
@pytest.mark.parametrize("attention", [name for name in ATTENTION if name != "splash"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_alone_and_documents_do_not_leak(attention, family):
    sizes = small_sizes(family)
    params = random_params(sizes)
    tokens = random_tokens(sizes, 1, 16)
    positions = jnp.array([[*range(5), *range(8), 0, 0, 0]], jnp.int32)
    segment_ids = jnp.array([[1] * 5 + [2] * 8 + [0] * 3], jnp.int32)

    @jax.jit
    def run(tokens, positions, segment_ids):
        model = bind(params, sizes)
        return model.logits(model.hidden_states(tokens, positions, segment_ids, attention=attention))

    packed = run(tokens, positions, segment_ids)
    assert np.all(np.isfinite(packed[..., : sizes.num_token_ids]))  # padding included
    alone = run(tokens[:, 5:13], positions[:, 5:13], jnp.ones((1, 8), jnp.int32))
    # float32 sums of another length: a few units in the last place of logits of order 1
    np.testing.assert_allclose(packed[:, 5:13], alone, rtol=0, atol=1e-5)
    changed = tokens.copy()
    changed[:, :5] = (tokens[:, :5] + 7) % sizes.num_token_ids
    changed[:, 13:] = 3
    other = run(changed, positions, segment_ids)
    np.testing.assert_array_equal(other[:, 5:13], packed[:, 5:13])
    assert np.max(np.abs(other[:, :5, :47] - packed[:, :5, :47])) > 1e-2


def test_causal():
    sizes = small_sizes()
    tokens = random_tokens(sizes, 1, 10)
    params = random_params(sizes)
    before = hidden_states(params, sizes, tokens, *whole_row(10))
    changed = tokens.copy()  # jax may still be reading the array itself
    changed[0, 6] = (tokens[0, 6] + 1) % sizes.num_token_ids
    after = hidden_states(params, sizes, changed, *whole_row(10))
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert np.max(np.abs(before[:, 6:] - after[:, 6:])) > 1e-2


def test_garbage_token_ids_under_padding_stay_finite():
    sizes = small_sizes()
    tokens = jnp.array([[3, 4, -1, 10**6]], jnp.int32)
    segment_ids = jnp.array([[1, 1, 0, 0]], jnp.int32)
    hidden = hidden_states(random_params(sizes), sizes, tokens, jnp.zeros((1, 4), jnp.int32), segment_ids)
    assert np.all(np.isfinite(hidden))


def test_ids_that_no_token_has_are_minus_infinity():
    sizes = small_sizes()
    logits = bind(random_params(sizes), sizes).logits(jnp.ones((2, sizes.hidden_size)))
    assert logits.shape == (2, 50) and logits.dtype == jnp.float32
    assert np.all(np.isneginf(logits[:, 47:])) and np.all(np.isfinite(logits[:, :47]))


def test_remat_changes_no_value_and_no_gradient():
    sizes = small_sizes("qwen2")
    params, tokens = random_params(sizes), random_tokens(sizes, 2, 7)
    positions, segment_ids = (jnp.tile(x, (2, 1)) for x in whole_row(7))

    def loss(params, remat):
        hidden = bind(params, sizes).hidden_states(tokens, positions, segment_ids, remat=remat)
        return jnp.sum(jnp.sin(hidden))

    values = {name: jax.jit(jax.value_and_grad(lambda p, n=name: loss(p, n)))(params) for name in REMAT_POLICIES}
    for name in REMAT_POLICIES:
        # The same sums, fused differently: a few units in the last place.
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), values[name], values["none"])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_gets_a_gradient(family):
    sizes = small_sizes(family, num_token_ids=50)
    params, tokens = random_params(sizes), np.arange(50, dtype=np.int32)[None]

    def loss(params):
        model = bind(params, sizes)
        return jnp.sum(jnp.sin(model.logits(model.hidden_states(tokens, *whole_row(50)))))

    gradients = jax.jit(jax.grad(loss))(params)
    jax.tree.map_with_path(lambda path, g: None if np.any(g != 0) else pytest.fail(str(path)), gradients)


def test_tied_embedding_gets_gradient_from_both_uses():
    sizes = small_sizes("qwen2")
    params, tokens = random_params(sizes), random_tokens(sizes, 1, 6)

    def loss(embedding, head):
        model = bind(params | {"embed": {"embedding": embedding}}, sizes)
        hidden = model.hidden_states(tokens, *whole_row(6))
        return jnp.sum(jnp.sin(bind(params | {"embed": {"embedding": head}}, sizes).logits(hidden)[..., :47]))

    embedding = params["embed"]["embedding"]
    one, two = jax.jit(jax.grad(loss, (0, 1)))(embedding, embedding)
    both = jax.jit(jax.grad(lambda e: loss(e, e)))(embedding)
    assert np.any(one != 0) and np.any(two != 0)
    np.testing.assert_allclose(both, one + two, rtol=1e-5, atol=1e-5)


def test_bfloat16_compute_keeps_state_norms_and_logits_float32():
    sizes = small_sizes("qwen2")
    params, tokens = random_params(sizes), random_tokens(sizes, 1, 12)

    def run(dtype):
        hidden = hidden_states(params, sizes, tokens, *whole_row(12), compute_dtype=dtype)
        return hidden, bind(params, sizes).logits(hidden)

    wide, wide_logits = run(jnp.float32)
    hidden, logits = run(jnp.bfloat16)
    assert hidden.dtype == jnp.bfloat16 and logits.dtype == jnp.float32
    # bfloat16 keeps 8 bits: a per cent or two of values of order 1 after two layers; and it must differ.
    assert 1e-4 < float(jnp.max(jnp.abs(hidden.astype(jnp.float32) - wide))) < 0.3
    assert float(jnp.mean(jnp.abs(logits[..., :47] - wide_logits[..., :47]))) < 0.1

    def loss(params):
        hidden = bind(params, sizes).hidden_states(tokens, *whole_row(12), compute_dtype=jnp.bfloat16)
        return jnp.sum(hidden.astype(jnp.float32) ** 3)

    gradients = jax.jit(jax.grad(loss))(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype(jnp.float32)}


def test_one_cast_copy_and_norm_scales_stay_float32():
    cast = cast_weights(random_params(small_sizes("qwen3"))["layers"], jnp.bfloat16)
    dtypes = {jax.tree_util.keystr(path): leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(cast)}
    assert {dtype for path, dtype in dtypes.items() if "scale" in path} == {jnp.dtype(jnp.float32)}
    assert {dtype for path, dtype in dtypes.items() if "scale" not in path} == {jnp.dtype(jnp.bfloat16)}
    sizes = small_sizes("qwen3")
    lowered = jax.jit(lambda p, t: bind(p, sizes).hidden_states(t, *whole_row(4), compute_dtype=jnp.bfloat16)).lower(
        decoder_shapes(sizes), jax.ShapeDtypeStruct((1, 4), jnp.int32)
    )
    text = lowered.as_text()
    loop = text[text.index("stablehlo.while") :]
    # Inside the scan no float32 weight is cast again: the stacked kernels that enter it are bfloat16.
    assert f"tensor<2x{sizes.hidden_size}x{sizes.intermediate_size}xbf16>" in loop
    assert f"tensor<2x{sizes.hidden_size}x{sizes.intermediate_size}xf32>" not in loop.split("do {", 1)[1]


def test_programs_lower_from_shapes_alone():
    sizes = small_sizes()
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    program = jax.jit(lambda p, *row: bind(p, sizes).hidden_states(*row))
    assert program.lower(decoder_shapes(sizes), tokens, tokens, tokens).out_info.shape == (2, 8, 32)


def test_compile_size_does_not_grow_with_depth():
    def size(layers):
        sizes = small_sizes(num_layers=layers)
        tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
        program = jax.jit(lambda p, *row: bind(p, sizes).hidden_states(*row))
        return len(program.lower(decoder_shapes(sizes), tokens, tokens, tokens).as_text().splitlines())

    assert size(2) == size(12)


def test_init():
    sizes = small_sizes("qwen2", hidden_size=64, num_layers=3)
    init = jax.jit(init_decoder, static_argnums=0)
    params = init(sizes, jax.random.key(0))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), params) == jax.tree.map(
        lambda a: (a.shape, a.dtype), decoder_shapes(sizes)
    )
    attention = params["layers"]["attention"]
    assert np.all(params["layers"]["mlp_norm"]["scale"] == 1) and np.all(attention["k"]["bias"] == 0)
    # 3 * 64 * 4 * 8 draws and more: the sample deviation is within 3 per cent
    np.testing.assert_allclose(np.std(attention["q"]["kernel"]), 64**-0.5, rtol=0.03)
    np.testing.assert_allclose(np.std(attention["o"]["kernel"]), (32 * 6) ** -0.5, rtol=0.03)
    np.testing.assert_allclose(np.std(params["embed"]["embedding"]), 0.02, rtol=0.03)
    again = init(sizes, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, params, again)
    # Keys follow the path: a head more changes no other parameter.
    untied = init(dataclasses.replace(sizes, tie_word_embeddings=False), jax.random.key(0))
    np.testing.assert_array_equal(untied["embed"]["embedding"], params["embed"]["embedding"])
    assert np.any(untied["lm_head"]["kernel"] != params["embed"]["embedding"])
    assert np.any(attention["q"]["kernel"][0] != attention["q"]["kernel"][1])


def test_errors_name_what_is_known():
    sizes = small_sizes("llama")
    params = random_params(sizes)
    tokens = random_tokens(sizes, 1, 4)
    with pytest.raises(ValueError, match=r"unknown attention 'flash'; known: .*einsum"):
        bind(params, sizes).hidden_states(tokens, *whole_row(4), attention="flash")
    with pytest.raises(ValueError, match="unknown remat 'some'; known: none, dots, full"):
        bind(params, sizes).hidden_states(tokens, *whole_row(4), remat="some")
    with pytest.raises(ValueError, match=r"allowed: three arrays of one shape \[B, T\]"):
        bind(params, sizes).hidden_states(tokens, *whole_row(5))
    headless = {name: tree for name, tree in params.items() if name != "lm_head"}
    with pytest.raises(ValueError, match="has no head"):
        bind(headless, sizes).logits(jnp.ones((1, 32)))

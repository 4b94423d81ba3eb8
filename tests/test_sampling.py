"""Drawing tokens: the kept sets against a stable sort, the drawn frequencies, the reported log-probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from turnppo_jax.rollout.sampling import _restrict, sample_tokens

draw = jax.jit(sample_tokens)
restrict = jax.jit(_restrict)


def kept_by_sorting(probabilities, top_p, top_k):
    """Independent: sort (stable, falling), cut by rank, renormalise, cut by the mass before."""
    order = np.argsort(-probabilities, kind="stable")
    limit = top_k if top_k > 0 else len(order)
    order = order[:limit]
    mass = probabilities[order].astype(np.float64)
    before = np.cumsum(mass) - mass
    kept = order[(before < top_p * mass.sum()) | (top_p >= 1)]
    return set(kept.tolist())


def kept(probabilities, top_p, top_k):
    weights = np.asarray(probabilities, np.float32) / np.max(probabilities)
    left = restrict(jnp.asarray(weights[None], jnp.float32), jnp.float32(top_p), jnp.int32(top_k))[0]
    return set(np.flatnonzero(np.asarray(left)).tolist())


@pytest.mark.parametrize(
    ("probabilities", "top_p", "top_k", "expected"),
    [
        ([0.5, 0.3, 0.15, 0.05], 0.6, 0, {0, 1}),  # the mass before the second is .5 < .6
        ([0.5, 0.25, 0.125, 0.125], 0.75, 0, {0, 1}),  # exactly .75 before the third: not kept
        ([0.5, 0.3, 0.15, 0.05], 1e-6, 0, {0}),  # the best always survives
        ([0.25, 0.25, 0.25, 0.25], 0.5, 0, {0, 1}),  # ties go by index
        ([0.1, 0.4, 0.1, 0.4], 1.0, 3, {0, 1, 3}),
        ([0.4, 0.3, 0.2, 0.1], 0.5, 2, {0}),  # renormalised to .571, .429: .571 before the second is not below .5
        ([0.4, 0.3, 0.2, 0.1], 0.58, 2, {0, 1}),
        ([0.4, 0.3, 0.2, 0.1], 1.0, 99, {0, 1, 2, 3}),
    ],
)
def test_kept_sets_a_person_can_check(probabilities, top_p, top_k, expected):
    assert kept(probabilities, top_p, top_k) == expected


def test_kept_set_equals_the_stable_sort_on_random_rows():
    rng = np.random.default_rng(0)
    for _ in range(200):
        size = int(rng.choice([5, 128, 300]))  # few sizes: each compiles once
        # Powers of two make ties common and every sum exact, so the comparison has no rounding in it.
        weights = 2.0 ** -rng.integers(0, 12, size)
        top_p, top_k = rng.choice([0.1, 0.5, 0.75, 0.9375, 1.0]), int(rng.choice([0, 1, 3, 50]))
        assert kept(weights, top_p, top_k) == kept_by_sorting(weights / weights.max(), top_p, top_k)


@pytest.mark.parametrize("size", [7, 128, 300, 1000])
def test_inverting_the_cumulative_sum_hits_every_token_as_often_as_it_should(size):
    rng = np.random.default_rng(size)
    logits = rng.normal(size=size).astype(np.float32) * 2
    logits[rng.random(size) < 0.3] = -np.inf  # ids that no token has
    rows = 20_000
    uniforms = (np.arange(rows) + 0.5) / rows  # a grid: frequencies are then exact to one step of the grid
    tokens, logprobs = draw(
        jnp.broadcast_to(logits, (rows, size)), jnp.asarray(uniforms, jnp.float32), temperature=1.0, top_p=1.0, top_k=0
    )
    probabilities = np.exp(logits.astype(np.float64) - np.max(logits))
    probabilities /= probabilities.sum()
    frequencies = np.bincount(np.asarray(tokens), minlength=size) / rows
    # One grid step at each end of a token's interval, plus float32 rounding of the sums.
    np.testing.assert_allclose(frequencies, probabilities, atol=2 / rows + 1e-5)
    assert not np.isinf(logits[np.asarray(tokens)]).any()
    np.testing.assert_allclose(np.asarray(logprobs), np.log(probabilities[np.asarray(tokens)]), atol=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_the_logprob_is_that_of_the_whole_vocabulary_at_the_temperature(temperature):
    logits = jnp.asarray([[2.0, 0.0, -1.0]], jnp.float32)
    _, full = draw(logits, jnp.zeros(1), temperature=temperature, top_p=1.0, top_k=0)
    token, cut = draw(logits, jnp.zeros(1), temperature=temperature, top_p=0.3, top_k=0)
    expected = jax.nn.log_softmax(logits[0] / temperature)[0]
    assert int(token[0]) == 0
    np.testing.assert_allclose([full[0], cut[0]], [expected, expected], rtol=1e-6)


def test_known_value_at_half_temperature():
    _, logprob = draw(jnp.asarray([[2.0, 0.0]]), jnp.zeros(1), temperature=0.5, top_p=1.0, top_k=0)
    np.testing.assert_allclose(logprob, [-0.0181], atol=1e-4)


def test_temperature_zero_is_greedy_and_finite():
    logits = jnp.asarray([[1.0, 3.0, 2.0], [5.0, -1.0, 0.0]], jnp.float32)
    tokens, logprobs = draw(logits, jnp.asarray([0.99, 0.5]), temperature=0.0, top_p=1.0, top_k=0)
    assert tokens.tolist() == [1, 0]
    np.testing.assert_allclose(
        logprobs, [jax.nn.log_softmax(logits[0])[1], jax.nn.log_softmax(logits[1])[0]], rtol=1e-6
    )


def test_the_ends_of_the_unit_interval_stay_inside_the_kept_set():
    logits = jnp.asarray([[-jnp.inf, 0.0, 0.0, -jnp.inf]] * 2, jnp.float32)
    tokens, _ = draw(
        logits, jnp.asarray([0.0, np.nextafter(np.float32(1), np.float32(0))]), temperature=1.0, top_p=1.0, top_k=0
    )
    assert tokens.tolist() == [1, 2]


def test_settings_are_traced_so_one_program_serves_all():
    fresh = jax.jit(lambda *a, **k: sample_tokens(*a, **k))
    for temperature, top_p, top_k in [(1.0, 1.0, 0), (0.5, 0.9, 0), (0.0, 1.0, 5), (1.3, 0.1, 2)]:
        fresh(
            jnp.zeros((2, 9)),
            jnp.zeros(2),
            temperature=np.float32(temperature),
            top_p=np.float32(top_p),
            top_k=np.int32(top_k),
        )
    assert fresh._cache_size() == 1

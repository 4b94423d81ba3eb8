"""The cross-entropy critic, and KL estimates whose gradient is another's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import kernel_oracle
from tests.learner_cases import quick_compilation  # noqa: F401  (a fixture of this module)
from turnppo_jax import kernels


def test_cross_entropy_equals_the_printed_form_and_ignores_garbage():
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(0, 2, size=(3, 5)).astype(np.float32), rng.random((3, 5)).astype(np.float32)
    targets[0, :2] = 0.0, 1.0
    weights = np.where(rng.random((3, 5)) < 0.6, rng.random((3, 5)), 0).astype(np.float32)
    f = jax.jit(jax.value_and_grad(kernels.value_cross_entropy, has_aux=True))
    (loss, metrics), gradient = f(*(kernel_oracle.poison(x, weights != 0, rng) for x in (logits, targets)), weights)
    want, errors = 0.0, []
    want_gradient = np.zeros((3, 5))
    for place in np.argwhere(weights != 0):
        x, r, w = (float(array[tuple(place)]) for array in (logits, targets, weights))
        v = 1 / (1 + np.exp(-x))
        want -= w * (r * np.log(v) + (1 - r) * np.log(1 - v))
        want_gradient[tuple(place)] = w * (v - r)
        errors.append(v - r)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(gradient, want_gradient, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(metrics["error_mean"], np.mean(errors), rtol=1e-4)
    np.testing.assert_allclose(metrics["error_square_mean"], np.mean(np.square(errors)), rtol=1e-4)
    assert metrics["num_entries"] == np.count_nonzero(weights)


def test_cross_entropy_golden():
    """V = 1/2: log 2 whatever the target; sure and wrong by 100: loss 100, gradient 1, no overflow; beyond 1: as 1."""
    loss = jax.value_and_grad(lambda x, r: kernels.value_cross_entropy(jnp.stack([x]), jnp.stack([r]), [1.0])[0])
    for target in (0.0, 0.3, 1.0):
        np.testing.assert_allclose(loss(0.0, target), (np.log(2), 0.5 - target), rtol=1e-5)
    np.testing.assert_allclose(loss(100.0, 0.0), (100.0, 1.0), rtol=1e-6)
    np.testing.assert_allclose(loss(-100.0, 1.0), (100.0, -1.0), rtol=1e-6)
    np.testing.assert_allclose(loss(1.0, 1.5), loss(1.0, 1.0))
    with pytest.raises(ValueError, match=r"value_cross_entropy: targets has shape \(2,\)"):
        kernels.value_cross_entropy([0.0], [0.0, 1.0], [1.0])


@pytest.mark.parametrize("normalizer, fitted", [("turns", 5.0), ("tokens", 5.0), ("trajectories", 10 / 1.2)])
def test_what_a_critic_learns_of_a_state_that_episodes_leave_for_one_turn_or_five(normalizer, fitted):
    """From one state an episode of one turn has return 10, one of five turns 0: E[R] = 5, E[R/N] / E[1/N] = 25/3."""
    turn_ids = np.array([[0, -1, -1, -1, -1], [0, 1, 2, 3, 4]])
    mask, returns = turn_ids >= 0, np.zeros((2, 5), np.float32)
    returns[0, 0] = 10
    weights = kernels.loss_weights(turn_ids, mask, level="turn", normalizer=normalizer)

    def loss(value):
        values = jnp.zeros((2, 5)).at[:, 0].set(value)
        return kernels.value_loss(values, values, returns, weights)[0]

    np.testing.assert_allclose(jax.grad(loss)(fitted), 0.0, atol=1e-6)
    assert jax.grad(loss)(fitted + 1) > 0.1 and jax.grad(loss)(fitted - 1) < -0.1


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_straight_through_has_its_own_value_and_the_gradient_of_k2(kind):
    rng = np.random.default_rng(1)
    new, ref = -rng.random((2, 2, 4)).astype(np.float32)
    mask = np.array([[1, 1, 0, 1], [0, 1, 1, 0]])
    new[mask == 0], ref[mask == 0] = np.nan, np.inf

    def total(x, **settings):
        estimate = kernels.kl_penalty(x, ref, mask, **settings)
        return jnp.sum(estimate), estimate

    (_, estimate), gradient = jax.value_and_grad(total, has_aux=True)(new, kind=kind, straight_through=True)
    np.testing.assert_array_equal(estimate, kernels.kl_penalty(new, ref, mask, kind=kind))
    np.testing.assert_allclose(gradient, np.where(mask, new - ref, 0), rtol=1e-5)


def test_only_k2_has_the_gradient_of_the_divergence():
    """Over the whole distribution: E[∇k2] = ∇KL(p ‖ q), E[∇k1] = 0, E[∇k3] = ∇KL(q ‖ p); p = softmax(z)."""
    z, q = jnp.array([0.3, -0.2, 0.5]), jnp.array([0.2, 0.5, 0.3])
    p = jax.nn.softmax(z)

    def mean_gradient(**settings):
        def surrogate(z):
            estimate = kernels.kl_penalty(jax.nn.log_softmax(z)[None], jnp.log(q)[None], jnp.ones((1, 3)), **settings)
            return jnp.sum(p * estimate[0])

        return jax.grad(surrogate)(z)

    forward = jax.grad(lambda z: jnp.sum(jax.nn.softmax(z) * (jax.nn.log_softmax(z) - jnp.log(q))))(z)
    backward = jax.grad(lambda z: -jnp.sum(q * jax.nn.log_softmax(z)))(z)
    np.testing.assert_allclose(mean_gradient(kind="k2"), forward, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(mean_gradient(kind="k3", straight_through=True), forward, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(mean_gradient(kind="k1"), np.zeros(3), atol=1e-6)
    np.testing.assert_allclose(mean_gradient(kind="k3"), backward, rtol=1e-4, atol=1e-6)

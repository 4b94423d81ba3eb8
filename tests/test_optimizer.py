"""Schedules, the steps that a NaN must not spoil, and precision."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from turnppo_jax.training.optimizer import OptimizerConfig, apply_gradients, init_state, learning_rate, make_optimizer

PARAMS = {"layer": {"kernel": jnp.array([1.0, -2.0]), "scale": jnp.array([1.0])}}
GRADS = {"layer": {"kernel": jnp.array([0.3, 0.1]), "scale": jnp.array([-0.2])}}


def test_schedules_count_optimizer_steps():
    """Fault 48: a warm-up of 10 ends after 10 steps, and a warm-up as long as the run is no error."""
    cfg = OptimizerConfig(learning_rate=2.0, warmup_steps=10, total_steps=30, schedule="linear")
    np.testing.assert_allclose(learning_rate(cfg, 0), 0.2, rtol=1e-6)
    np.testing.assert_allclose(learning_rate(cfg, 9), 2.0, rtol=1e-6)
    np.testing.assert_allclose(learning_rate(cfg, 20), 1.0, rtol=1e-6)
    assert learning_rate(cfg, 30) == learning_rate(cfg, 99) == 0
    cosine = dataclasses.replace(cfg, schedule="cosine")
    np.testing.assert_allclose(learning_rate(cosine, 15), 1 + np.cos(np.pi / 4), rtol=1e-5)
    whole = OptimizerConfig(learning_rate=1.0, warmup_steps=5, total_steps=5, schedule="cosine")
    np.testing.assert_allclose([float(learning_rate(whole, s)) for s in range(5)], [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-6)
    assert learning_rate(OptimizerConfig(learning_rate=1e-6), 10**6) == np.float32(1e-6)


def test_first_steps_by_hand():
    """Adam's first step is lr · g / (|g| + ε) whatever the size of g; decay touches kernels alone."""
    cfg = OptimizerConfig(learning_rate=0.1, warmup_steps=2, weight_decay=0.5, max_grad_norm=None)
    optimizer = make_optimizer(cfg)
    state, metrics = apply_gradients(optimizer, init_state(optimizer, PARAMS), GRADS, jnp.float32(1.0))
    np.testing.assert_allclose(
        state.params["layer"]["kernel"], [1 - 0.05 * (1 + 0.5), -2 - 0.05 * (1 - 1.0)], rtol=1e-5
    )
    np.testing.assert_allclose(state.params["layer"]["scale"], [1 + 0.05], rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], np.sqrt(0.09 + 0.01 + 0.04), rtol=1e-5)
    np.testing.assert_allclose(metrics["update_rms"], np.sqrt((0.075**2 + 0 + 0.05**2) / 3), rtol=1e-5)
    state, _ = apply_gradients(optimizer, state, GRADS, jnp.float32(1.0))
    np.testing.assert_allclose(state.params["layer"]["scale"], [1 + 0.05 + 0.1], rtol=1e-5)  # warm-up is over
    assert state.step == 2


def test_the_clip_is_by_global_norm_and_epsilon_is_a_field():
    # with a huge ε, Adam's step is lr · g / ε: proportional to the clipped gradient
    cfg = OptimizerConfig(learning_rate=1.0, eps=1e6, max_grad_norm=0.01)
    optimizer = make_optimizer(cfg)
    state, metrics = apply_gradients(optimizer, init_state(optimizer, PARAMS), GRADS, jnp.float32(0.0))
    norm = np.sqrt(0.14)
    change = np.asarray(state.opt_state[1].mu["layer"]["kernel"]) / 0.1
    np.testing.assert_allclose(change, np.array([0.3, 0.1]) * 0.01 / norm, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)  # before the clip


@pytest.mark.parametrize("bad", ["loss", "gradient", "infinity"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(bad):
    """Fault 25: one NaN through a global-norm clip would make every leaf NaN."""
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1, warmup_steps=3))
    apply = jax.jit(lambda s, g, loss: apply_gradients(optimizer, s, g, loss))
    state, _ = apply(init_state(optimizer, PARAMS), GRADS, jnp.float32(1.0))
    grads = jax.tree.map(jnp.array, GRADS)
    if bad != "loss":
        grads["layer"]["scale"] = jnp.array([np.nan if bad == "gradient" else np.inf])
    after, metrics = apply(state, grads, jnp.float32(np.nan if bad == "loss" else 1.0))
    assert after.skipped == 1 and after.step == 1 and metrics["applied"] == 0 and metrics["update_rms"] == 0
    jax.tree.map(np.testing.assert_array_equal, (after.params, after.opt_state), (state.params, state.opt_state))
    onward, _ = apply(after, GRADS, jnp.float32(1.0))
    straight, _ = apply(state, GRADS, jnp.float32(1.0))
    jax.tree.map(np.testing.assert_array_equal, onward.params, straight.params)


def test_small_steps_are_not_swallowed():
    """Fault 23: 100 Adam steps of 1e-6 move float32 weights by 1e-4; in bfloat16 they would not move at all."""
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-6))
    params = {"kernel": jnp.array([1.0, 0.02, 0.5])}
    state = init_state(optimizer, params)
    apply = jax.jit(lambda s: apply_gradients(optimizer, s, {"kernel": jnp.ones(3)}, jnp.float32(0.0))[0])
    for _ in range(100):
        state = apply(state)
    # each step of 1e-6 on a weight of 1.0 is rounded to a multiple of 6e-8
    np.testing.assert_allclose(state.params["kernel"] - params["kernel"], -1e-4, rtol=0.05)


def test_moments_in_bfloat16_leave_the_parameters_float32():
    optimizer = make_optimizer(OptimizerConfig(moment_dtype="bfloat16"))
    state, _ = apply_gradients(optimizer, init_state(optimizer, PARAMS), GRADS, jnp.float32(0.0))
    assert state.opt_state[1].mu["layer"]["kernel"].dtype == jnp.bfloat16
    assert state.params["layer"]["kernel"].dtype == jnp.float32


def test_wrong_fields_are_named():
    for change, message in [
        ({"schedule": "step"}, "schedule='step'; allowed: constant, linear, cosine"),
        ({"schedule": "cosine"}, "total_steps=0 with schedule='cosine'"),
        ({"betas": (0.9, 1.0)}, "betas="),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0; allowed: above 0, or None"),
        ({"moment_dtype": "float16"}, "moment_dtype='float16'"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
    ]:
        with pytest.raises(ValueError, match=message.replace("(", r"\(")):
            OptimizerConfig(**change)

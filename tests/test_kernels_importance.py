"""Importance weights of tokens, turns and trajectories against a count, and their metrics."""

import functools

import jax
import numpy as np
import pytest

from tests import kernel_oracle, objective_oracle
from tests.learner_cases import quick_compilation  # noqa: F401  (a fixture of this module)
from turnppo_jax import kernels


@functools.cache
def rows():
    """Two trajectories in row 0, one over rows 1 and 2, an empty row 3; gaps of about .4 a token."""
    rng = np.random.default_rng(0)
    turn_ids, turn_mask = kernel_oracle.ragged_rows(rng, length=16)
    trajectory_ids = np.full(turn_mask.shape, -1)
    trajectory_ids[0], trajectory_ids[1], trajectory_ids[2] = [7, 7, 3, 3, 3], 20, 20
    trajectory_ids[~turn_mask] = -1
    behavior = -rng.random(turn_ids.shape).astype(np.float32)
    old = (behavior + rng.normal(0, 0.4, size=behavior.shape)).astype(np.float32)
    return rng, turn_ids, turn_mask, trajectory_ids, old, behavior


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("pooling", ["product", "geometric_mean"])
@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
def test_weights_equal_the_count_and_ignore_garbage(level, pooling, mode):
    rng, turn_ids, turn_mask, trajectory_ids, old, behavior = rows()
    low, high = 0.8, 1.1
    want, ratios, bounded = objective_oracle.importance(
        old, behavior, turn_ids, trajectory_ids, level, pooling, mode, low, high
    )
    sampled = turn_ids >= 0
    weights, metrics = jax.jit(
        functools.partial(
            kernels.importance_weights, num_turns=turn_mask.shape[1], level=level, pooling=pooling, mode=mode,
            low=low, high=high,
        )
    )(
        kernel_oracle.poison(old, sampled, rng), kernel_oracle.poison(behavior, sampled, rng), turn_ids,
        trajectory_ids=trajectory_ids,
    )  # fmt: skip
    by_token = weights if level == "token" else kernels.broadcast_turns(weights, turn_ids)
    np.testing.assert_allclose(by_token, want, rtol=1e-5, atol=1e-7)
    assert not np.any(np.asarray(weights)[~(sampled if level == "token" else turn_mask)])
    assert (
        metrics["num_units"] == len(ratios) == {"token": sampled.sum(), "turn": turn_mask.sum(), "sequence": 3}[level]
    )
    np.testing.assert_allclose(metrics["mean"], bounded.mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["square_mean"], np.square(bounded).mean(), rtol=1e-5)
    cut = np.mean((ratios < low) | (ratios > high))
    np.testing.assert_allclose(metrics["cut_share"], cut, rtol=1e-5)
    assert cut > 0


def test_golden():
    """Ratios 1/2 and 4: the product is 2, the mean of the logarithms √2; bounds are of the unit's own ratio."""
    old, behavior, ids = np.log([[1.0, 4.0]]), np.log([[2.0, 1.0]]), np.array([[0, 0]])
    weights = functools.partial(kernels.importance_weights, old, behavior, ids, 1)
    np.testing.assert_allclose(weights(level="token")[0], [[0.5, 2.0]], rtol=1e-6)  # 4 is truncated to 2
    np.testing.assert_allclose(weights(level="token", mode="mask")[0], [[0.5, 0.0]], rtol=1e-6)
    np.testing.assert_allclose(weights(level="token", low=0.8)[0], [[0.8, 2.0]], rtol=1e-6)
    np.testing.assert_allclose(weights(level="turn", high=3.0)[0], [[2.0]], rtol=1e-6)
    np.testing.assert_allclose(weights(level="sequence", pooling="geometric_mean")[0], [[2**0.5]], rtol=1e-6)


def test_nothing_sampled_and_extreme_gaps_stay_finite():
    nothing = np.full((2, 3), np.nan, np.float32)
    for level in ("token", "turn", "sequence"):
        weights, metrics = kernels.importance_weights(nothing, nothing, np.full((2, 3), -1), 2, level=level)
        assert not np.any(weights) and all(value == 0 for value in metrics.values())
    weights, _ = kernels.importance_weights([[-200.0, 0.0]], [[0.0, -200.0]], [[0, 1]], 2, level="turn", high=1e9)
    np.testing.assert_allclose(weights, [[np.exp(-20), np.exp(20)]], rtol=1e-5)  # clamped before exp


def test_wrong_arguments_are_named():
    f = functools.partial(kernels.importance_weights, np.zeros((1, 2)), np.zeros((1, 2)), np.zeros((1, 2), int), 1)
    with pytest.raises(ValueError, match=r"level='row' is not known; choose one of 'token', 'turn', 'sequence'"):
        f(level="row")
    with pytest.raises(ValueError, match=r"mode='drop' is not known; choose one of 'truncate', 'mask'"):
        f(level="token", mode="drop")
    with pytest.raises(ValueError, match=r"low=3, high=2.0; allowed: 0 <= low < high"):
        f(level="token", low=3)

"""Ratios of turns, tokens and sequences under the clip, CISPO and REINFORCE; the weight of the clipping bias."""

import functools

import jax
import numpy as np
import pytest

from tests import kernel_oracle, objective_oracle
from tests.learner_cases import quick_compilation  # noqa: F401  (a fixture of this module)
from turnppo_jax import kernels

# Weighted sums of some dozens of float32 numbers of size up to e^2.
TOLERANCE = {"rtol": 3e-5, "atol": 3e-6}
LEVELS = ("turn", "token", "sequence")


@functools.cache
def minibatch(seed=0):
    """Rows of several turns, two trajectories in row 0, one row without any; ratios from about 1/2 to 2."""
    rng = np.random.default_rng(seed)
    turn_ids, turn_mask = kernel_oracle.ragged_rows(rng, length=16)
    trajectory_ids = np.full(turn_mask.shape, -1)
    trajectory_ids[0], trajectory_ids[1], trajectory_ids[2] = [7, 7, 3, 3, 3], 20, 5
    trajectory_ids[~turn_mask] = -1
    old = -rng.random(turn_ids.shape).astype(np.float32)
    logprobs = (old + rng.normal(0, 0.4, size=old.shape)).astype(np.float32)
    advantages = {
        "turn": rng.normal(size=turn_mask.shape).astype(np.float32),
        "token": rng.normal(size=turn_ids.shape).astype(np.float32),
    }
    importance = {
        "turn": rng.choice([0.0, 0.5, 1.5], size=turn_mask.shape).astype(np.float32),
        "token": rng.choice([0.0, 0.5, 1.5], size=turn_ids.shape).astype(np.float32),
    }
    return rng, turn_ids, turn_mask, trajectory_ids, logprobs, old, advantages, importance


def loss_level(ratio_level, advantage_level):
    return "turn" if advantage_level == "turn" and ratio_level != "token" else "token"


def weights_of(level, normalizer="trajectories", seed=0):
    _, turn_ids, turn_mask, trajectory_ids, *_ = minibatch(seed)
    return np.asarray(
        kernels.loss_weights(turn_ids, turn_mask, level=level, normalizer=normalizer, trajectory_ids=trajectory_ids)
    )


def gradient_of(f, *arguments, **settings):
    """((loss, metrics), gradient by the log-probs)."""
    return jax.jit(jax.value_and_grad(functools.partial(f, **settings), has_aux=True))(*arguments)


@pytest.mark.parametrize("advantage_level", ["turn", "token"])
@pytest.mark.parametrize("ratio_level", LEVELS)
@pytest.mark.parametrize(
    ("objective", "pooling", "dual"),
    [("clip", "geometric_mean", None), ("clip", "product", 1.5), ("cispo", "product", None),
     ("reinforce", "geometric_mean", None)],
)  # fmt: skip
def test_loss_and_gradient_equal_the_loop_and_ignore_garbage(objective, pooling, dual, ratio_level, advantage_level):
    rng, turn_ids, turn_mask, trajectory_ids, logprobs, old, advantages, importance = minibatch()
    level = loss_level(ratio_level, advantage_level)
    weights, m, advantage = weights_of(level), importance[level], advantages[advantage_level]
    want, want_gradient, bias = objective_oracle.objective(
        logprobs, old, turn_ids, trajectory_ids, advantage, weights, m, ratio_level=ratio_level,
        advantage_level=advantage_level, pooling=pooling, low=0.1, high=0.3, dual=dual, name=objective,
    )  # fmt: skip
    sampled = turn_ids >= 0
    counted = {"turn": turn_mask, "token": sampled}
    (loss, metrics), gradient = gradient_of(
        kernels.policy_loss, kernel_oracle.poison(logprobs, sampled, rng), kernel_oracle.poison(old, sampled, rng),
        turn_ids, kernel_oracle.poison(advantage, counted[advantage_level], rng), weights, ratio_level=ratio_level,
        advantage_level=advantage_level, ratio_pooling=pooling, clip_low=0.1, clip_high=0.3, dual_clip=dual,
        objective=objective, importance=kernel_oracle.poison(m, counted[level], rng),
        trajectory_ids=trajectory_ids, num_turns=turn_mask.shape[1],
    )  # fmt: skip
    np.testing.assert_allclose(loss, want, **TOLERANCE)
    np.testing.assert_allclose(gradient, want_gradient, **TOLERANCE)
    np.testing.assert_allclose(metrics["clip_bias"], bias, **TOLERANCE)
    assert all(np.isfinite(value) for value in metrics.values())
    assert np.abs(want_gradient).max() > 1e-2 and (objective != "clip" or abs(bias) > 1e-3)
    # what importance weighs 0 is still a part of its turn, of the ratio and of the metrics
    assert metrics["num_entries"] == counted[level].sum()


@pytest.mark.parametrize(
    ("ratio_level", "advantage_level", "pooling"),
    [("turn", "turn", "geometric_mean"), ("turn", "token", "product"), ("token", "turn", "product"),
     ("sequence", "turn", "product"), ("sequence", "token", "geometric_mean")],
)  # fmt: skip
def test_at_ratio_one_all_objectives_have_the_same_gradient(ratio_level, advantage_level, pooling):
    _, turn_ids, turn_mask, trajectory_ids, _, old, advantages, _ = minibatch(1)
    weights = weights_of(loss_level(ratio_level, advantage_level), seed=1)
    gradients = [
        gradient_of(
            kernels.policy_loss, old, old.copy(), turn_ids, advantages[advantage_level], weights, objective=objective,
            ratio_level=ratio_level, advantage_level=advantage_level, ratio_pooling=pooling,
            trajectory_ids=trajectory_ids, num_turns=turn_mask.shape[1],
        )[1]
        for objective in ("clip", "cispo", "reinforce")
    ]  # fmt: skip
    assert np.abs(gradients[0]).max() > 1e-2
    for other in gradients[1:]:
        np.testing.assert_allclose(other, gradients[0], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("normalizer", ["trajectories", "trajectory_tokens"])
def test_gspo_over_trajectories_of_several_turns(normalizer):
    """1/M Σ_i min(s_i A_i, clip(s_i) A_i), s_i = (π/π_old)^(1/|y_i|), for packed trajectories (arXiv 2507.18071)."""
    _, turn_ids, turn_mask, trajectory_ids, logprobs, old, *_ = minibatch(2)
    trajectories = sorted(set(trajectory_ids[turn_mask].tolist()))
    by_trajectory = dict(zip(trajectories, kernels.group_advantages([0.2, 1.0, 0.0, 0.7], np.zeros(4, int)).tolist()))
    advantages = np.vectorize(lambda i: by_trajectory.get(i, 0.0))(trajectory_ids).astype(np.float32)
    want, want_gradient = 0.0, np.zeros(turn_ids.shape)
    for i in trajectories:
        tokens = [
            (b, t) for b, row in enumerate(turn_ids) for t, turn in enumerate(row)
            if turn >= 0 and trajectory_ids[b, turn] == i
        ]  # fmt: skip
        s = np.exp(np.mean([float(logprobs[p]) - float(old[p]) for p in tokens]))
        a, near = by_trajectory[i], np.clip(s, 0.95, 1.02)
        want -= min(s * a, near * a) / len(trajectories)
        if s * a <= near * a:
            for p in tokens:
                want_gradient[p] = -s * a / (len(tokens) * len(trajectories))
    level = "turn" if normalizer == "trajectories" else "token"
    by_token = np.where(turn_ids >= 0, np.take_along_axis(advantages, np.maximum(turn_ids, 0), axis=1), 0)
    (loss, metrics), gradient = gradient_of(
        kernels.policy_loss, logprobs, old, turn_ids, advantages if level == "turn" else by_token,
        weights_of(level, normalizer, 2), ratio_level="sequence", advantage_level=level, clip_low=0.05, clip_high=0.02,
        ratio_pooling="geometric_mean", trajectory_ids=trajectory_ids, num_turns=turn_mask.shape[1],
    )  # fmt: skip
    np.testing.assert_allclose(loss, want, **TOLERANCE)
    np.testing.assert_allclose(gradient, want_gradient, **TOLERANCE)
    cut = sum(not np.any(want_gradient[trajectory_of(turn_ids, trajectory_ids) == i]) for i in trajectories)
    assert 0 < cut < len(trajectories) == metrics["num_sequences"]
    np.testing.assert_allclose(metrics["clip_fraction_sequence"], cut / len(trajectories))


def trajectory_of(turn_ids, trajectory_ids):
    """[B, T]: the trajectory of each sampled token, -1 elsewhere."""
    return np.where(turn_ids >= 0, np.take_along_axis(trajectory_ids, np.maximum(turn_ids, 0), axis=1), -1)


def test_gspo_is_one_turn_and_at_ratio_one_the_token_gradient():
    """One turn a row: "sequence" = "turn". At ratio 1: the gradient of the token ratio with 1/(M n_i) a token."""
    turn_ids = np.array([[-1, 0, 0, 0, -1], [0, 0, -1, -1, -1], [-1, -1, 0, 0, 0]])
    rng = np.random.default_rng(3)
    old = -rng.random(turn_ids.shape).astype(np.float32)
    logprobs = (old + rng.normal(0, 0.3, size=old.shape)).astype(np.float32)
    advantages, mask = rng.normal(size=(3, 1)).astype(np.float32), np.ones((3, 1))
    weights = {
        (level, normalizer): kernels.loss_weights(turn_ids, mask, level=level, normalizer=normalizer)
        for level, normalizer in (("turn", "trajectories"), ("token", "trajectory_tokens"))
    }
    whole, turn = (
        gradient_of(
            kernels.policy_loss, logprobs, old, turn_ids, advantages, weights["turn", "trajectories"],
            ratio_level=level, advantage_level="turn", ratio_pooling="geometric_mean",
        )
        for level in ("sequence", "turn")
    )  # fmt: skip
    np.testing.assert_allclose(whole[0][0], turn[0][0], rtol=1e-6)
    np.testing.assert_allclose(whole[1], turn[1], rtol=1e-6)
    _, turn_ids, turn_mask, trajectory_ids, _, old, *_ = minibatch(2)
    constant = np.where(turn_mask, trajectory_ids, 0).astype(np.float32)  # one advantage a trajectory
    gradients = [
        gradient_of(
            kernels.policy_loss, old, old.copy(), turn_ids, constant, weights_of(level, normalizer, 2),
            ratio_level=ratio_level, advantage_level="turn", ratio_pooling="geometric_mean",
            trajectory_ids=trajectory_ids,
        )[1]
        for ratio_level, level, normalizer in (
            ("sequence", "turn", "trajectories"), ("token", "token", "trajectory_tokens"),
        )
    ]  # fmt: skip
    np.testing.assert_allclose(*gradients, rtol=1e-5, atol=1e-7)


def test_a_sequence_is_an_index_of_the_row():
    ids = kernels.sequence_ids([[0, -1, 1, 2, 2, 3]], [[900, 5, 900, -1]])
    np.testing.assert_array_equal(ids, [[0, -1, 1, 0, 0, -1]])
    total = kernels.sum_by_trajectory([[1.0, 2.0, np.nan], [4.0, np.inf, 8.0]], [[70, 3, -1], [70, -5, 70]])
    np.testing.assert_array_equal(total, [[13, 2, 0], [13, 0, 13]])


def test_cispo_keeps_the_gradient_that_the_clip_cuts():
    """One token, ρ = e^.5, A = 2: the clip gives 0, CISPO −A · 1.2, REINFORCE −A."""
    arguments = np.array([[-0.5]]), np.array([[-1.0]]), np.array([[0]]), np.array([[2.0]]), np.array([[1.0]])
    for objective, want in (("clip", 0.0), ("cispo", -2.4), ("reinforce", -2.0)):
        (_, metrics), gradient = gradient_of(kernels.policy_loss, *arguments, objective=objective)
        np.testing.assert_allclose(gradient, [[want]], rtol=1e-6)
        assert metrics["clip_fraction_turn"] == (objective != "reinforce")
        np.testing.assert_allclose(metrics["clip_bias"], 2 * np.exp(0.5) * (objective == "clip"), rtol=1e-6)


def test_the_clipping_bias_scales_down_and_never_up():
    np.testing.assert_allclose(kernels.clip_bias_scale(0.0), 1.0)
    np.testing.assert_allclose([kernels.clip_bias_scale(x) for x in (0.25, -0.25, 3.0)], [0.8, 0.8, 0.25])


def test_wrong_arguments_are_named():
    x, ids, one = np.zeros((1, 3)), np.zeros((1, 3), int), np.ones((1, 1))
    with pytest.raises(ValueError, match=r"objective='ppo' is not known; choose one of 'clip', 'cispo', 'reinforce'"):
        kernels.policy_loss(x, x, ids, one, one, objective="ppo")
    with pytest.raises(ValueError, match=r"dual_clip=3.0 with objective='cispo', which allows only None"):
        kernels.policy_loss(x, x, ids, one, one, objective="cispo", dual_clip=3.0)
    with pytest.raises(ValueError, match=r"ratio_level='row' is not known"):
        kernels.policy_loss(x, x, ids, one, one, ratio_level="row")
    with pytest.raises(ValueError, match=r"importance has shape \(1, 3\), but advantages asks for \(1, 1\)"):
        kernels.policy_loss(x, x, ids, one, one, importance=x)
    with pytest.raises(ValueError, match=r"trajectory_ids has shape \(1, 2\), but the turns asks for \(1, 1\)"):
        kernels.policy_loss(x, x, ids, one, one, ratio_level="sequence", trajectory_ids=[[0, 0]])

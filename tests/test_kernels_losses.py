"""Loss weights, the clipped objective at all levels, the value loss and the KL estimates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import kernel_oracle
from turnppo_jax import kernels

# Weighted sums of some dozens of float32 numbers of size up to e^2.
TOLERANCE = {"rtol": 3e-5, "atol": 3e-6}
NORMALIZERS = ("trajectory_tokens", "tokens", "turns", "trajectories")


def _minibatch(seed=0):
    """Rows of several turns; two trajectories share row 0, one spans rows 1 and 2, row 3 is padding."""
    rng = np.random.default_rng(seed)
    turn_ids, turn_mask = kernel_oracle.ragged_rows(rng)
    trajectory_ids = np.full(turn_mask.shape, -1)
    trajectory_ids[0], trajectory_ids[1], trajectory_ids[2] = [7, 7, 9, 9, 9], 20, 20
    trajectory_ids[~turn_mask] = -1
    old = -rng.random(turn_ids.shape).astype(np.float32)
    logprobs = (old + rng.normal(0, 0.3, size=old.shape)).astype(np.float32)
    advantages = {
        "turn": rng.normal(size=turn_mask.shape).astype(np.float32),
        "token": rng.normal(size=turn_ids.shape).astype(np.float32),
    }
    return rng, turn_ids, turn_mask, trajectory_ids, logprobs, old, advantages


def test_weights_golden():
    """Trajectory 0: turns of 1 and 3 tokens; trajectory 1: one turn of 2 tokens. M = 2, N = 3, n = 6."""
    turn_ids = np.array([[0, -1, 1, 1, 1], [-1, 0, 0, -1, -1]])
    turn_mask = np.array([[1, 1], [1, 0]])
    of_turn = {
        "trajectory_tokens": [[1 / 8, 1 / 8], [1 / 4, 0]],
        "tokens": [[1 / 6, 1 / 6], [1 / 6, 0]],
        "turns": [[1 / 3, 1 / 3], [1 / 3, 0]],
        "trajectories": [[1 / 4, 1 / 4], [1 / 2, 0]],
    }
    of_token = {
        "trajectory_tokens": [[1 / 8, 0, 1 / 8, 1 / 8, 1 / 8], [0, 1 / 4, 1 / 4, 0, 0]],
        "tokens": [[1 / 6, 0, 1 / 6, 1 / 6, 1 / 6], [0, 1 / 6, 1 / 6, 0, 0]],
        "turns": [[1 / 3, 0, 1 / 9, 1 / 9, 1 / 9], [0, 1 / 6, 1 / 6, 0, 0]],
        "trajectories": [[1 / 4, 0, 1 / 12, 1 / 12, 1 / 12], [0, 1 / 4, 1 / 4, 0, 0]],
    }
    for normalizer in NORMALIZERS:
        for level, want in (("turn", of_turn), ("token", of_token)):
            got = kernels.loss_weights(turn_ids, turn_mask, level=level, normalizer=normalizer)
            np.testing.assert_allclose(got, want[normalizer], rtol=1e-6, err_msg=f"{level} {normalizer}")


@pytest.mark.parametrize("level", ["turn", "token"])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_weights_equal_the_count(level, normalizer):
    for seed in range(3):
        _, turn_ids, turn_mask, trajectory_ids, *_ = _minibatch(seed)
        turn_mask[1, 0] = False  # a turn that a mask takes out, its tokens still named
        got = kernels.loss_weights(
            turn_ids, turn_mask, level=level, normalizer=normalizer, trajectory_ids=trajectory_ids
        )
        want = kernel_oracle.weights(turn_ids, turn_mask, level, normalizer, trajectory_ids)
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_aggregations_by_name():
    """Fault 20: losses [[3], [1, 1, 1]]: token mean 1.5, mean of sequence means 2."""
    losses, turn_ids = np.array([[3, 0, 0], [1, 1, 1.0]]), np.array([[0, -1, -1], [0, 0, 0]])
    for normalizer, want in {"tokens": 1.5, "trajectory_tokens": 2.0, "trajectories": 2.0, "turns": 2.0}.items():
        weights = kernels.loss_weights(turn_ids, np.ones((2, 1)), level="token", normalizer=normalizer)
        np.testing.assert_allclose(np.sum(losses * weights), want, rtol=1e-6, err_msg=normalizer)


def test_an_empty_row_does_not_count():
    """Fault 1: one empty row beside one of three tokens with loss 1 gives 1, not 1/2."""
    turn_ids = np.array([[-1, -1, -1], [0, 0, 0]])
    for normalizer in NORMALIZERS:
        for mask in ([[1], [1]], [[0], [1]]):
            weights = kernels.loss_weights(turn_ids, np.array(mask), level="token", normalizer=normalizer)
            np.testing.assert_allclose(np.sum(weights), 1.0, rtol=1e-6)


def test_a_batch_without_tokens_gives_loss_and_gradient_zero():
    turn_ids, turn_mask = np.full((2, 3), -1), np.zeros((2, 2))
    nothing = np.full((2, 3), np.nan, np.float32)

    def loss(logprobs):
        return kernels.turn_ppo_loss(logprobs, nothing, turn_ids, np.full((2, 2), np.nan), turn_mask)

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(nothing)
    assert value == 0 and not np.any(gradient)
    assert all(np.isfinite(m) for m in metrics.values())


def test_padding_rows_change_nothing():
    """Fault 6: 3 rows and the same 3 beside a padding row: loss, gradient and every metric."""
    _, turn_ids, turn_mask, trajectory_ids, logprobs, old, advantages = _minibatch()

    def run(rows):
        def loss(logprobs):
            return kernels.turn_ppo_loss(
                logprobs, old[rows], turn_ids[rows], advantages["turn"][rows], turn_mask[rows],
                trajectory_ids=trajectory_ids[rows],
            )  # fmt: skip

        return jax.value_and_grad(loss, has_aux=True)(logprobs[rows])

    (padded, metrics), gradient = run(slice(0, 4))
    (alone, metrics_alone), gradient_alone = run(slice(0, 3))
    np.testing.assert_allclose(padded, alone, rtol=1e-6)
    np.testing.assert_allclose(gradient[:3], gradient_alone, rtol=1e-6)
    assert not np.any(gradient[3])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), metrics, metrics_alone)


@pytest.mark.parametrize("dual_clip", [None, 1.5])
@pytest.mark.parametrize("pooling", ["product", "geometric_mean"])
@pytest.mark.parametrize("ratio_level", ["turn", "token"])
@pytest.mark.parametrize("advantage_level", ["turn", "token"])
def test_policy_loss_equals_the_loop_and_ignores_garbage(ratio_level, advantage_level, pooling, dual_clip):
    rng, turn_ids, turn_mask, trajectory_ids, logprobs, old, advantages = _minibatch(3)
    level = "turn" if ratio_level == advantage_level == "turn" else "token"
    weights = kernels.loss_weights(
        turn_ids, turn_mask, level=level, normalizer="trajectories", trajectory_ids=trajectory_ids
    )
    f = functools.partial(
        kernels.policy_loss, ratio_level=ratio_level, advantage_level=advantage_level, ratio_pooling=pooling,
        clip_low=0.1, clip_high=0.3, dual_clip=dual_clip,
    )  # fmt: skip
    advantage = advantages[advantage_level]
    clean = jax.value_and_grad(f, has_aux=True)(logprobs, old, turn_ids, advantage, weights)
    want = kernel_oracle.policy_loss(
        logprobs, old, turn_ids, advantage, np.asarray(weights), ratio_level, advantage_level, pooling, 0.1, 0.3,
        dual_clip,
    )  # fmt: skip
    np.testing.assert_allclose(clean[0][0], want, **TOLERANCE)

    sampled = turn_ids >= 0
    counted = turn_mask if advantage_level == "turn" else sampled
    poisoned = jax.jit(jax.value_and_grad(f, has_aux=True))(
        kernel_oracle.poison(logprobs, sampled, rng), kernel_oracle.poison(old, sampled, rng), turn_ids,
        kernel_oracle.poison(advantage, counted, rng), weights,
    )  # fmt: skip
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), clean, poisoned)
    assert np.abs(clean[1]).max() > 0 and not np.any(clean[1][~sampled])


def test_gradient_equals_finite_differences():
    _, turn_ids, turn_mask, trajectory_ids, logprobs, old, advantages = _minibatch(5)
    weights = np.asarray(
        kernels.loss_weights(turn_ids, turn_mask, level="turn", normalizer="tokens", trajectory_ids=trajectory_ids)
    )
    gradient = jax.grad(kernels.policy_loss, has_aux=True)(logprobs, old, turn_ids, advantages["turn"], weights)[0]
    b, t = np.argwhere(turn_ids >= 0)[3]

    def at(shift):
        moved = logprobs.astype(np.float64)
        moved[b, t] += shift
        return kernel_oracle.policy_loss(
            moved, old, turn_ids, advantages["turn"], weights, "turn", "turn", "product", 0.2, 0.2, None
        )

    np.testing.assert_allclose(gradient[b, t], (at(1e-6) - at(-1e-6)) / 2e-6, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("pooling", "normalizer"),
    [("product", "trajectory_tokens"), ("product", "tokens"), ("geometric_mean", "turns"),
     ("geometric_mean", "trajectories")],
)  # fmt: skip
def test_at_ratio_one_turn_and_token_gradients_are_equal(pooling, normalizer):
    _, turn_ids, turn_mask, trajectory_ids, _, old, advantages = _minibatch(2)
    gradients = []
    for ratio_level, level in (("turn", "turn"), ("token", "token")):
        weights = kernels.loss_weights(
            turn_ids, turn_mask, level=level, normalizer=normalizer, trajectory_ids=trajectory_ids
        )
        f = functools.partial(
            kernels.policy_loss, ratio_level=ratio_level, advantage_level="turn", ratio_pooling=pooling
        )
        gradients.append(jax.grad(f, has_aux=True)(old, old, turn_ids, advantages["turn"], weights)[0])
    np.testing.assert_allclose(*gradients, rtol=1e-5, atol=1e-8)
    assert np.abs(gradients[0]).max() > 1e-3


def test_one_token_a_turn_is_token_ppo():
    rng = np.random.default_rng(4)
    turn_ids = np.array([[0, -1, 1, 2, -1], [-1, 0, -1, -1, 1]])
    turn_mask = np.array([[1, 1, 1], [1, 1, 0]])
    old = -rng.random((2, 5)).astype(np.float32)
    logprobs = (old + rng.normal(0, 0.4, size=(2, 5))).astype(np.float32)
    by_turn = rng.normal(size=(2, 3)).astype(np.float32)
    by_token = np.asarray(kernels.broadcast_turns(by_turn, turn_ids))
    for normalizer in NORMALIZERS:
        results = []
        for level, advantages in (("turn", by_turn), ("token", by_token)):
            weights = kernels.loss_weights(turn_ids, turn_mask, level=level, normalizer=normalizer)
            f = functools.partial(kernels.policy_loss, ratio_level=level, dual_clip=3.0)
            results.append(jax.value_and_grad(f, has_aux=True)(logprobs, old, turn_ids, advantages, weights))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), *results)


def test_one_turn_with_group_advantage_is_gspo():
    """GSPO in its own words: 1/G Σ min(s A, clip(s) A), s = (π/π_old)^(1/|y|), A by group (arXiv 2507.18071)."""
    rng = np.random.default_rng(8)
    turn_ids = np.array([[-1, 0, 0, 0, -1], [0, 0, -1, -1, -1], [-1, -1, 0, 0, 0], [0, 0, 0, 0, 0]])
    old = -rng.random(turn_ids.shape)
    logprobs = old + rng.normal(0, 0.3, size=old.shape)
    scores = np.array([1.0, 0.0, 0.5, 2.0])
    want = 0.0
    for i in range(4):
        s = np.exp(np.mean((logprobs - old)[i][turn_ids[i] == 0]))
        a = (scores[i] - scores.mean()) / scores.std(ddof=1)
        want -= min(s * a, np.clip(s, 0.9, 1.1) * a) / 4
    advantages = kernels.group_advantages(scores, np.zeros(4, int))[:, None]
    loss, _ = kernels.turn_ppo_loss(
        logprobs, old, turn_ids, advantages, np.ones((4, 1)), clip_low=0.1, clip_high=0.1,
        ratio_pooling="geometric_mean", normalizer="trajectories",
    )  # fmt: skip
    np.testing.assert_allclose(loss, want, **TOLERANCE)


def test_clip_golden():
    """One turn of two tokens, log-ratios .1 and .1: ρ = e^.2 = 1.2214 > 1.2 though no token is beyond 1.2."""
    arguments = np.array([[-0.9, -0.9]]), np.array([[-1.0, -1.0]]), np.array([[0, 0]])
    loss, metrics = kernels.policy_loss(*arguments, [[2.0]], [[1.0]])
    np.testing.assert_allclose(loss, -2.4, rtol=1e-6)
    assert metrics["clip_fraction_turn"] == metrics["clip_fraction_positive"] == 1
    assert metrics["clip_fraction_token"] == metrics["clip_fraction_negative"] == 0
    np.testing.assert_allclose(metrics["turn_log_ratio_mean"], 0.2, rtol=1e-5)
    np.testing.assert_allclose(metrics["approx_kl"], np.exp(0.1) - 1.1, rtol=1e-4)
    # a bad turn that became likelier is never cut by the plain clip, and is by the dual clip
    loss, metrics = kernels.policy_loss(*arguments, [[-2.0]], [[1.0]])
    np.testing.assert_allclose(loss, 2 * np.exp(0.2), rtol=1e-6)
    loss, metrics = kernels.policy_loss(*arguments, [[-2.0]], [[1.0]], dual_clip=1.1)
    np.testing.assert_allclose(loss, 2.2, rtol=1e-6)
    assert metrics["dual_clip_fraction"] == 1


def test_extreme_ratios_stay_finite():
    """Log-ratios are clamped to 20 before exp: float32 overflows at 88."""
    for sign in (1.0, -1.0):
        (loss, _), gradient = jax.value_and_grad(kernels.policy_loss, has_aux=True)(
            np.full((1, 4), sign * 100.0), np.zeros((1, 4)), np.zeros((1, 4), int), np.array([[-1.0]]), np.ones((1, 1))
        )
        assert np.isfinite(loss) and np.isfinite(gradient).all()
    np.testing.assert_allclose(kernels.kl_penalty([[-200.0]], [[0.0]], [[1]]), np.exp(20) - 21, rtol=1e-5)


def test_metrics_join_by_count():
    """Fault 53: micro-batches of 1 and 3 tokens with clip flags 1 and 0, 0, 0 make .25, not .5."""
    turn_ids = np.array([[0, -1, -1], [0, 0, 0]])
    log_ratios = np.array([[1.0, 0, 0], [0, 0, 0]])
    parts = [
        kernels.policy_loss(
            log_ratios[b : b + 1], 0 * log_ratios[b : b + 1], turn_ids[b : b + 1], np.ones((1, 3)),
            (turn_ids[b : b + 1] >= 0) / 4, ratio_level="token",
        )[1]
        for b in range(2)
    ]  # fmt: skip
    flags = sum(m["clip_fraction_token"] * m["num_tokens"] for m in parts)
    assert flags / sum(m["num_tokens"] for m in parts) == 0.25


def test_scalar_reaches_each_turn_at_its_own_span():
    """Fault 16: two rows whose responses stand elsewhere both learn from their advantage."""
    turn_ids = np.array([[-1, -1, 0, 0], [-1, 0, 0, -1]])
    gradient = jax.grad(lambda lp: kernels.turn_ppo_loss(lp, lp, turn_ids, jnp.ones((2, 1)), np.ones((2, 1)))[0])(
        np.zeros((2, 4), np.float32)
    )
    # the same array is new and old: the gradient through it cancels, so the old one must be held fixed
    np.testing.assert_array_equal(gradient, 0)
    gradient = jax.grad(
        lambda lp: kernels.turn_ppo_loss(lp, np.zeros((2, 4)), turn_ids, jnp.ones((2, 1)), np.ones((2, 1)))[0]
    )(np.zeros((2, 4), np.float32))
    np.testing.assert_allclose(gradient, np.where(turn_ids >= 0, -0.25, 0))


def test_value_clip_golden():
    """Fault 18, its numbers: old .5, new 1, return .9, clip .2 gives .02 and clip fraction 1."""
    loss, metrics = kernels.value_loss([1.0], [0.5], [0.9], [1.0], clip=0.2)
    np.testing.assert_allclose(loss, 0.02, rtol=1e-5)
    assert metrics["clip_fraction"] == 1
    loss, metrics = kernels.value_loss([1.0], None, [0.9], [1.0])
    np.testing.assert_allclose(loss, 0.005, rtol=1e-5)
    assert metrics["clip_fraction"] == 0
    gradient = jax.grad(kernels.value_loss, (0, 1), has_aux=True)(
        *(np.array([x]) for x in (1.0, 0.5, 0.9, 1.0)), clip=0.2
    )[0]
    np.testing.assert_allclose(gradient[0], 0.0)  # cut: V moved past old + .2


def test_value_loss_under_poison():
    rng = np.random.default_rng(0)
    values, old, returns, weights = rng.normal(size=(4, 3, 5)).astype(np.float32)
    weights = np.where(rng.random((3, 5)) < 0.5, np.abs(weights), 0).astype(np.float32)
    f = jax.value_and_grad(functools.partial(kernels.value_loss, clip=0.5), has_aux=True)
    clean = f(values, old, returns, weights)
    poisoned = f(*(kernel_oracle.poison(x, weights != 0, rng) for x in (values, old, returns)), weights)
    jax.tree.map(np.testing.assert_array_equal, clean, poisoned)
    moved = old + np.clip(values - old, -0.5, 0.5)
    want = 0.5 * np.sum(weights * np.maximum((values - returns) ** 2, (moved - returns) ** 2))
    np.testing.assert_allclose(clean[0][0], want, rtol=1e-5)


def test_kl_estimates():
    """Fault 22: sign, gradient, and nothing from tokens outside the mask."""
    new, ref, mask = np.array([[-1.0, -2.0, np.nan]]), np.array([[-1.0, -1.5, 3.0]]), np.array([[1, 1, 0]])
    d = -0.5
    for kind, want in {"k1": d, "k2": d * d / 2, "k3": np.exp(-d) - 1 + d}.items():
        np.testing.assert_allclose(kernels.kl_penalty(new, ref, mask, kind=kind), [[0, want, 0]], rtol=1e-5)
        gradient = jax.grad(lambda x, kind=kind: jnp.sum(kernels.kl_penalty(x, ref, mask, kind=kind)))(new)
        assert gradient[0, 2] == 0 and gradient[0, 1] != 0
    # k3 summed over the distribution p = [.7, .3] against [.4, .6] is the divergence itself
    p, q = np.array([0.7, 0.3]), np.array([0.4, 0.6])
    estimate = kernels.kl_penalty(np.log(p)[None], np.log(q)[None], np.ones((1, 2)))
    np.testing.assert_allclose(np.sum(p * estimate), np.sum(p * np.log(p / q)), rtol=1e-5)


def test_jit_vmap_and_types_give_the_same():
    _, turn_ids, turn_mask, trajectory_ids, logprobs, old, advantages = _minibatch(9)

    def f(logprobs, old, turn_ids, advantages, turn_mask, trajectory_ids):
        return kernels.turn_ppo_loss(logprobs, old, turn_ids, advantages, turn_mask, trajectory_ids=trajectory_ids)

    arguments = logprobs, old, turn_ids, advantages["turn"], turn_mask, trajectory_ids
    want = f(*arguments)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, jax.jit(f)(*arguments), want)
    stacked = [np.stack([x, x]) for x in arguments]
    jax.tree.map(lambda a, b: close(a[1], b), jax.vmap(f)(*stacked), want)
    low = f(jnp.asarray(logprobs, jnp.bfloat16), jnp.asarray(old, jnp.bfloat16), *arguments[2:])
    assert low[0].dtype == jnp.float32
    wide = f(logprobs.astype(np.float64), old.astype(np.float64), turn_ids.astype(np.int64), *arguments[3:])
    close(wide[0], want[0])


def test_wrong_arguments_are_named():
    x, ids = np.zeros((1, 3)), np.zeros((1, 3), int)
    with pytest.raises(ValueError, match="normalizer='mean' is not known; choose one of 'trajectory_tokens'"):
        kernels.loss_weights(ids, np.ones((1, 1)), level="turn", normalizer="mean")
    with pytest.raises(ValueError, match=r"dual_clip=0.5 must be above 1"):
        kernels.policy_loss(x, x, ids, np.ones((1, 1)), np.ones((1, 1)), dual_clip=0.5)
    with pytest.raises(ValueError, match=r"weights has shape \(1, 1\), but the token level asks for \(1, 3\)"):
        kernels.policy_loss(x, x, ids, np.ones((1, 1)), np.ones((1, 1)), ratio_level="token", advantage_level="turn")
    with pytest.raises(ValueError, match="kind='k4' is not known"):
        kernels.kl_penalty(x, x, ids, kind="k4")

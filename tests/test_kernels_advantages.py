"""GAE over turns and tokens, returns and group advantages against reference numbers and loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import kernel_oracle
from turnppo_jax import kernels

# Recursions of at most 24 terms of size 1 to 10 in float32.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}
REWARDS, VALUES = np.array([[-0.1, -0.2, 10.9]]), np.array([[0.5, 0.8, 0.2]])


def test_golden_turn_gae():
    """Reference numbers of algorithms.md, section 1.5."""
    advantages, returns = kernels.turn_gae(REWARDS, VALUES, np.ones((1, 3)), gamma=0.99, gae_lambda=0.9)
    np.testing.assert_allclose(advantages, [[7.971945, 8.731700, 10.7]], rtol=1e-6)
    np.testing.assert_allclose(returns, [[8.471945, 9.531700, 10.9]], rtol=1e-6)
    monte_carlo = kernels.discounted_returns(REWARDS, np.ones((1, 3)), gamma=0.99)
    np.testing.assert_allclose(monte_carlo, [[10.385090, 10.591, 10.9]], rtol=1e-6)


def test_golden_by_hand():
    """gamma 1/2, lambda 1: two turns, then a bootstrap of 8 after the second."""
    advantages, returns = kernels.turn_gae(
        [[1.0, 2.0]], [[4.0, 6.0]], [[1, 1]], gamma=0.5, gae_lambda=1.0, bootstrap_values=[[99.0, 8.0]]
    )
    np.testing.assert_allclose(returns, [[1 + 0.5 * 6, 6.0]])  # 2 + 8/2 = 6; 1 + 6/2 = 4
    np.testing.assert_allclose(advantages, [[0.0, 0.0]], atol=1e-6)


def _random_turns(seed):
    rng = np.random.default_rng(seed)
    shape = (5, 9)
    rewards, values, bootstrap = rng.normal(size=(3, *shape)).astype(np.float32)
    mask = rng.random(shape) < 0.7
    mask[4] = False
    ends = mask & (rng.random(shape) < 0.3)
    for b in range(4):  # the last masked-in turn of a row always ends
        if mask[b].any():
            ends[b, np.flatnonzero(mask[b])[-1]] = True
    return rng, rewards, values, bootstrap, mask, ends


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("packed", [False, True])
def test_turn_gae_equals_the_loop(seed, packed):
    rng, rewards, values, bootstrap, mask, ends = _random_turns(seed)
    ends = ends if packed else None
    poisoned = [kernel_oracle.poison(x, mask, rng) for x in (rewards, values, bootstrap)]
    got = kernels.turn_gae(*poisoned[:2], mask, gamma=0.9, gae_lambda=0.8, turn_last=ends, bootstrap_values=poisoned[2])
    want = kernel_oracle.gae(rewards, values, mask, 0.9, 0.8, ends, bootstrap)
    jax.tree.map(functools.partial(np.testing.assert_allclose, **TOLERANCE), got, want)
    returns = kernels.discounted_returns(poisoned[0], mask, gamma=0.9, turn_last=ends, bootstrap_values=poisoned[2])
    want_returns = kernel_oracle.gae(rewards, np.zeros_like(values), mask, 0.9, 1.0, ends, bootstrap)[1]
    np.testing.assert_allclose(returns, want_returns, **TOLERANCE)


def _random_tokens(seed):
    rng = np.random.default_rng(seed)
    shape = (4, 24)
    rewards, values, bootstrap = rng.normal(size=(3, *shape)).astype(np.float32)
    segments = np.zeros(shape, np.int32)
    for b, cuts in enumerate([(8, 15, 22), (3, 20, 24), (24, 24, 24), (0, 0, 0)]):
        for number, (start, stop) in enumerate(zip((0, *cuts), cuts)):
            segments[b, start:stop] = number + 1
    mask = (rng.random(shape) < 0.6) & (segments > 0)
    return rng, rewards, values, bootstrap, mask, segments


def _rewards_of_sampled(rewards, mask, segments):
    """Each skipped position's reward on the sampled token before it, in the same segment."""
    moved = np.where(mask, rewards, 0.0)
    for b, t in zip(*np.nonzero(~mask & (segments > 0))):
        before = [u for u in range(t) if mask[b, u] and segments[b, u] == segments[b, t]]
        if before:
            moved[b, before[-1]] += rewards[b, t]
    return moved


@pytest.mark.parametrize("seed", range(4))
def test_token_gae_equals_the_loop(seed):
    rng, rewards, values, bootstrap, mask, segments = _random_tokens(seed)
    ends = kernel_oracle.segment_ends(mask, segments)
    moved = _rewards_of_sampled(rewards, mask, segments)
    want = kernel_oracle.gae(moved, values, mask, 0.95, 0.9, ends, bootstrap)
    got = kernels.token_gae(
        kernel_oracle.poison(rewards, segments > 0, rng),
        kernel_oracle.poison(values, mask, rng),
        mask.astype(np.int32),
        gamma=0.95,
        gae_lambda=0.9,
        segment_ids=segments,
        bootstrap_values=kernel_oracle.poison(bootstrap, ends, rng),
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, **TOLERANCE), got, want)
    one_by_one = kernels.discounted_returns(rewards, mask, gamma=0.95, segment_ids=segments, bootstrap_values=bootstrap)
    np.testing.assert_allclose(
        one_by_one, kernel_oracle.gae(moved, 0 * values, mask, 0.95, 1.0, ends, bootstrap)[1], **TOLERANCE
    )


def test_packed_trajectories_equal_rows_of_their_own():
    _, rewards, values, _, mask, segments = _random_tokens(7)
    packed = kernels.token_gae(rewards, values, mask, gamma=0.9, gae_lambda=0.7, segment_ids=segments)[0]
    for b, segment in [(0, 1), (0, 2), (1, 2)]:
        inside = segments[b] == segment
        alone = kernels.token_gae(
            rewards[b : b + 1, inside], values[b : b + 1, inside], mask[b : b + 1, inside], gamma=0.9, gae_lambda=0.7
        )[0]
        np.testing.assert_allclose(packed[b, inside], alone[0], **TOLERANCE)


def test_reward_after_the_last_token_is_kept():
    """Fault 13: a reward that stands on an observation belongs to the sampled token before it."""
    returns = kernels.token_gae([[0, 0, 0, 1.0]], np.zeros((1, 4)), [[0, 1, 1, 0]], gamma=1.0, gae_lambda=1.0)[1]
    np.testing.assert_allclose(returns, [[0, 1, 1, 0]])


def test_environment_tokens_inside_do_not_shorten_the_row():
    """Fault 61: 7 tokens, 3 of them the environment's, the last turn included."""
    mask = np.array([[1, 0, 0, 0, 1, 1, 1]])
    rewards = np.array([[0, 0, 0, 0, 0, 0, 2.0]])
    advantages, _ = kernels.token_gae(rewards, np.zeros((1, 7)), mask, gamma=1.0, gae_lambda=1.0)
    np.testing.assert_allclose(advantages, 2.0 * mask)


def test_fractional_rewards_survive_integer_neighbours():
    """Fault 58: .25, .9, 1.5, -.7 must not take the type of the token ids."""
    rewards = np.array([[0.25, 0.9, 1.5, -0.7]])
    values = np.zeros((1, 4), np.int32)
    for estimate in (kernels.turn_gae, kernels.token_gae):
        advantages, returns = estimate(rewards, values, np.ones((1, 4), np.int32), gamma=0.0, gae_lambda=0.9)
        assert advantages.dtype == returns.dtype == jnp.float32
        np.testing.assert_allclose(returns, rewards, rtol=1e-6)


def test_reductions():
    _, rewards, values, bootstrap, mask, ends = _random_turns(11)
    common = {"turn_last": ends, "bootstrap_values": bootstrap}
    # λ = 1: returns are the discounted returns, whatever V is
    returns = kernels.turn_gae(rewards, values, mask, gamma=0.9, gae_lambda=1.0, **common)[1]
    np.testing.assert_allclose(returns, kernels.discounted_returns(rewards, mask, gamma=0.9, **common), **TOLERANCE)
    # γ = λ = 1 and V = 0: the reward to go
    advantages, _ = kernels.turn_gae(rewards, 0 * values, np.ones_like(mask), gamma=1.0, gae_lambda=1.0)
    to_go = np.cumsum(rewards[:, ::-1].astype(np.float64), axis=1)[:, ::-1]
    np.testing.assert_allclose(advantages, to_go, **TOLERANCE)
    # one token a turn: turns are tokens
    by_turn = kernels.turn_gae(rewards, values, np.ones_like(mask), gamma=0.9, gae_lambda=0.8)
    by_token = kernels.token_gae(rewards, values, np.ones_like(mask), gamma=0.9, gae_lambda=0.8)
    jax.tree.map(functools.partial(np.testing.assert_allclose, **TOLERANCE), by_turn, by_token)


@pytest.mark.parametrize("estimate", [kernels.turn_gae, kernels.token_gae])
def test_gradients_under_poison(estimate):
    rng, rewards, values, _, mask, _ = _random_turns(3)
    # finite garbage on a skipped reward of token_gae would count, so rewards hold NaN and infinities there
    garbage = np.where(mask, rewards, rng.choice([np.nan, np.inf, -np.inf], size=mask.shape)).astype(np.float32)

    def total(rewards, values):
        advantages, returns = estimate(rewards, values, mask, gamma=0.9, gae_lambda=0.8)
        return jnp.sum(jnp.sin(advantages) + returns * advantages)

    clean = jax.value_and_grad(total, (0, 1))(np.where(mask, rewards, 0).astype(np.float32), values)
    poisoned = jax.value_and_grad(total, (0, 1))(garbage, kernel_oracle.poison(values, mask, rng))
    np.testing.assert_allclose(clean[0], poisoned[0])
    for want, got in zip(clean[1], poisoned[1]):
        np.testing.assert_allclose(np.where(mask, got, 0), np.where(mask, want, 0), rtol=1e-6)
        assert np.isfinite(got).all()


@pytest.mark.parametrize("estimate", [kernels.turn_gae, kernels.token_gae])
def test_jit_vmap_and_types_give_the_same(estimate):
    _, rewards, values, _, mask, _ = _random_turns(5)
    f = functools.partial(estimate, gamma=0.9, gae_lambda=0.8)
    want = f(rewards, values, mask)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    jax.tree.map(close, jax.jit(f)(rewards, values, mask), want)
    jax.tree.map(close, jax.vmap(f)(rewards, values, mask), want)
    stacked = jax.tree.map(lambda *x: np.stack(x), *[(rewards, values, mask)] * 3)
    jax.tree.map(lambda a, b: close(a[1], b), jax.vmap(f)(*stacked), want)
    low = f(jnp.asarray(rewards, jnp.bfloat16), jnp.asarray(values, jnp.bfloat16), mask.astype(np.int8))
    assert low[0].dtype == jnp.float32
    # inputs rounded to 8 bits (relative 2^-9), summed over a handful of turns
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=0.05), low, want)


def test_rows_permute_with_their_input():
    """Fault 17: outputs belong to their own row."""
    _, rewards, values, _, mask, _ = _random_turns(6)
    order = np.array([3, 0, 4, 1, 2])
    for estimate in (kernels.turn_gae, kernels.token_gae):
        straight = estimate(rewards, values, mask, gamma=0.9, gae_lambda=0.8)[0]
        permuted = estimate(rewards[order], values[order], mask[order], gamma=0.9, gae_lambda=0.8)[0]
        np.testing.assert_array_equal(permuted, straight[order])


def test_nothing_sampled_gives_zeros():
    """Fault 1 and 12: an episode without a turn is a row of zeros."""
    for estimate in (kernels.turn_gae, kernels.token_gae):
        results = estimate(*np.full((2, 2, 3), np.nan), np.zeros((2, 3)), gamma=0.9, gae_lambda=0.8)
        np.testing.assert_array_equal(np.stack(results), np.zeros((2, 2, 3)))


def test_turn_counts_differ():
    """Fault 12: scores [[0, 1], [1]]; the second turn of the longer one counts."""
    returns = kernels.discounted_returns([[0, 1.0], [1.0, 0]], [[1, 1], [1, 0]], gamma=1.0)
    np.testing.assert_array_equal(returns, [[1, 1], [1, 0]])


def test_values_beyond_the_mask_are_not_read():
    """Fault 17: value mask [1, 1, 0] of two sampled tokens; what stands beyond the end changes nothing."""
    first, second = (
        kernels.token_gae([[0.0, 1.0, 0.0]], [[0.3, 0.4, beyond]], [[1, 1, 0]], gamma=0.9, gae_lambda=0.5)[0]
        for beyond in (0.0, 55.0)
    )
    np.testing.assert_array_equal(first, second)


def test_group_golden():
    """Groups {0, 1} and {2, 4}: sample deviation is .7071 and 1.4142."""
    scores, groups = np.array([0.0, 2.0, 1.0, 4.0]), np.array([3, 8, 3, 8])
    np.testing.assert_allclose(kernels.group_advantages(scores, groups), [-0.7071068, -0.7071068, 0.7071068, 0.7071068])
    np.testing.assert_allclose(kernels.group_advantages(scores, groups, scale="none"), [-0.5, -1, 0.5, 1])
    np.testing.assert_allclose(
        kernels.group_advantages(scores, groups, scale="none", baseline="leave_one_out"), [-1, -2, 1, 2]
    )


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_group_equals_the_loop(scale, baseline):
    rng = np.random.default_rng(0)
    groups, scores = rng.integers(-1, 4, size=17), rng.normal(size=17).astype(np.float32)
    got = kernels.group_advantages(np.where(groups < 0, np.nan, scores), groups, scale=scale, baseline=baseline)
    for i in range(17):
        members = [scores[j] for j in range(17) if groups[j] == groups[i] and groups[i] >= 0]
        others = [scores[j] for j in range(17) if groups[j] == groups[i] and (baseline == "mean" or j != i)]
        want = 0.0
        if len(members) > 1:
            want = scores[i] - np.mean(others)
            want /= np.std(members, ddof=1) if scale == "std" else 1.0
        np.testing.assert_allclose(got[i], want, **TOLERANCE)


def test_equal_groups_and_groups_of_one_are_exactly_zero():
    scores = np.array([0.1, 0.1, 0.1, 7.3, 1e6 + 0.1, 1e6 + 0.1, 1e6 + 0.1], np.float32)
    for scale in ("std", "none"):
        for baseline in ("mean", "leave_one_out"):
            got = kernels.group_advantages(scores, np.array([0, 0, 0, 1, 2, 2, 2]), scale=scale, baseline=baseline)
            np.testing.assert_array_equal(got, np.zeros(7))
    gradient = jax.grad(lambda s: jnp.sum(kernels.group_advantages(s, np.zeros(7, int)) * jnp.arange(7)))(scores * 0)
    assert np.isfinite(gradient).all()


def test_the_same_rewards_in_another_order_are_equal_scores():
    """Four steps at -.1 and a solved room, summed as they came: the sums differ by rounding, the scores do not."""
    orders = np.float32([[-0.1, -0.1, -0.1, 10.9], [10.9, -0.1, -0.1, -0.1], [-0.1, 10.9, -0.1, -0.1]])
    scores = np.array([functools.reduce(np.add, order) for order in orders])
    assert len(set(scores)) > 1
    for scale in ("std", "none"):
        np.testing.assert_array_equal(kernels.group_advantages(scores, [0, 0, 0], scale=scale), np.zeros(3))


def test_a_long_trajectory_counts_once():
    """Fault 15: trajectory of 3 turns with score 1 beside one of 1 turn with score 0: baseline .5."""
    advantages = kernels.group_advantages([1.0, 0.0], [0, 0], scale="none")
    np.testing.assert_allclose(advantages, [0.5, -0.5])
    turns = np.array([[0, 0, 0], [1, -1, -1]])  # both broadcast to their own turns
    np.testing.assert_allclose(np.where(turns >= 0, np.asarray(advantages)[turns], 0), [[0.5, 0.5, 0.5], [-0.5, 0, 0]])


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"turn_gae: turn_mask has shape \(1, 2\), but turn_rewards asks for \(1, 3\)"):
        kernels.turn_gae(REWARDS, VALUES, np.ones((1, 2)), gamma=1.0, gae_lambda=1.0)
    with pytest.raises(ValueError, match="baseline='median' is not known"):
        kernels.group_advantages([1.0], [0], baseline="median")

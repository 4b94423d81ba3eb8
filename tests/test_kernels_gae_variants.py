"""Bi-level GAE, decoupled and length-adaptive lambda, the sequence critic: against loops, by reduction, under masks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import advantage_oracle, kernel_oracle
from turnppo_jax import kernels

# Recursions of at most 24 terms of size 1 in float32.
TOLERANCE = {"rtol": 5e-5, "atol": 5e-5}
close = functools.partial(np.testing.assert_allclose, **TOLERANCE)
both_close = functools.partial(jax.tree.map, close)
bi_level_gae = jax.jit(kernels.bi_level_gae, static_argnames="anchor")
decoupled_gae = jax.jit(kernels.decoupled_gae, static_argnames="level")
turn_gae, token_gae = jax.jit(kernels.turn_gae), jax.jit(kernels.token_gae)


def _ragged(seed):
    """Rows of turns of 1 to 4 tokens with gaps, one row without any; turn rewards and bootstraps, token values."""
    rng = np.random.default_rng(seed)
    turn_ids, turn_mask = kernel_oracle.ragged_rows(rng)
    rewards, bootstrap = rng.normal(size=(2, *turn_mask.shape)).astype(np.float32)
    values = rng.normal(size=turn_ids.shape).astype(np.float32)
    ends = turn_mask & (rng.random(turn_mask.shape) < 0.4)
    for row in range(len(ends)):
        if turn_mask[row].any():
            ends[row, np.flatnonzero(turn_mask[row])[-1]] = True
    return rng, rewards, values, turn_ids, turn_mask, ends, bootstrap


def _token_rewards(rewards, turn_ids):
    """[B, T]: each turn's reward on its last token."""
    result = np.zeros(turn_ids.shape, np.float32)
    for b, ids in enumerate(turn_ids):
        for turn in set(ids) - {-1}:
            result[b, np.flatnonzero(ids == turn)[-1]] = rewards[b, turn]
    return result


# --- bi-level GAE


@pytest.mark.parametrize("anchor", ["first", "last"])
@pytest.mark.parametrize("packed", [False, True])
def test_bi_level_equals_the_loop(packed, anchor):
    for seed in range(3):
        rng, rewards, values, turn_ids, turn_mask, ends, bootstrap = _ragged(seed)
        last = turn_mask & (np.cumsum(turn_mask[:, ::-1], axis=1)[:, ::-1] == 1)
        poison = functools.partial(kernel_oracle.poison, rng=rng)
        got = bi_level_gae(
            poison(rewards, turn_mask),
            poison(values, turn_ids >= 0),
            turn_ids,
            gamma=0.97,
            turn_gamma=0.9,
            gae_lambda=0.8,
            turn_lambda=0.7,
            anchor=anchor,
            turn_last=ends if packed else None,
            bootstrap_values=poison(bootstrap, ends if packed else last),
        )
        ends = ends if packed else None
        want = advantage_oracle.bi_level(rewards, values, turn_ids, 0.97, 0.9, 0.8, 0.7, anchor, ends, bootstrap)
        both_close(got, want)


def test_bi_level_golden():
    """Two turns of two tokens, γ_turn 1/2, all else 1: turn 2 returns 4, turn 1 returns 1 + 4/2 = 3.

    Each token's advantage is its turn's return minus its own value.
    """
    got = bi_level_gae(
        np.array([[1.0, 4.0]]),
        np.array([[0.5, 0.25, 2.0, 1.0]]),
        np.array([[0, 0, 1, 1]]),
        gamma=1.0,
        turn_gamma=0.5,
        gae_lambda=1.0,
    )
    np.testing.assert_allclose(got[1], [[3, 3, 4, 4]], rtol=1e-6)
    np.testing.assert_allclose(got[0], [[2.5, 2.75, 2, 3]], rtol=1e-6)


@pytest.mark.parametrize("anchor", ["first", "last"])
def test_bi_level_is_token_gae_when_nothing_is_discounted(anchor):
    _, rewards, values, turn_ids, *_ = _ragged(4)
    ones = {"gamma": 1.0, "gae_lambda": 1.0}
    got = bi_level_gae(rewards, values, turn_ids, turn_gamma=1.0, anchor=anchor, **ones)
    both_close(got, token_gae(_token_rewards(rewards, turn_ids), values, turn_ids >= 0, **ones))
    # and not when turns are discounted apart
    other = bi_level_gae(rewards, values, turn_ids, turn_gamma=0.9, anchor=anchor, **ones)
    assert np.abs(np.asarray(other[0]) - got[0]).max() > 0.01


@pytest.mark.parametrize("anchor", ["first", "last"])
def test_bi_level_of_one_turn_is_token_gae(anchor):
    _, rewards, values, turn_ids, *_ = _ragged(5)
    one = np.where(turn_ids == 0, 0, -1)
    got = bi_level_gae(rewards[:, :1], values, one, gamma=0.9, turn_gamma=0.3, gae_lambda=0.8, anchor=anchor)
    want = token_gae(_token_rewards(rewards, one), values, one == 0, gamma=0.9, gae_lambda=0.8)
    both_close(got, want)


def test_bi_level_of_one_token_a_turn_is_turn_gae():
    rng = np.random.default_rng(6)
    rewards, values = rng.normal(size=(2, 3, 6)).astype(np.float32)
    turn_ids = np.broadcast_to(np.arange(6), (3, 6))
    for anchor in ("first", "last"):
        got = bi_level_gae(
            rewards, values, turn_ids, gamma=0.2, turn_gamma=0.9, gae_lambda=0.1, turn_lambda=0.8, anchor=anchor
        )
        both_close(got, turn_gae(rewards, values, np.ones((3, 6)), gamma=0.9, gae_lambda=0.8))


def test_a_turn_without_reward_keeps_its_border():
    """Borders from rewards would join a turn of reward 0 to the next and discount the two as one."""
    rewards, values, turn_ids = np.array([[0.0, 0.0, 8.0]]), np.zeros((1, 6)), np.array([[0, 0, 1, 1, 2, 2]])
    got = bi_level_gae(rewards, values, turn_ids, gamma=1.0, turn_gamma=0.5, gae_lambda=1.0)
    np.testing.assert_allclose(got[0], [[2, 2, 4, 4, 8, 8]])


def test_the_first_anchor_reads_the_state_before_the_action():
    """At λ_turn = 0 the turn's target is r + γ_turn V of the next turn at its anchor, and at no other token."""
    zero = {"gamma": 1.0, "turn_gamma": 1.0, "gae_lambda": 1.0, "turn_lambda": 0.0}
    values, turn_ids = np.array([[0.0, 0.0, 3.0, 7.0]]), np.array([[0, 0, 1, 1]])
    for anchor, seen in (("first", 3.0), ("last", 7.0)):
        got = bi_level_gae(np.array([[1.0, 0.0]]), values, turn_ids, anchor=anchor, **zero)
        np.testing.assert_allclose(got[0][0, :2], [1 + seen, 1 + seen])


# --- decoupled and length-adaptive lambda


@pytest.mark.parametrize(("level", "kernel"), [("turn", kernels.turn_gae), ("token", kernels.token_gae)])
def test_equal_lambdas_are_gae(level, kernel):
    _, rewards, values, _, mask, ends, bootstrap = _ragged(7)
    values = values[:, : mask.shape[1]]
    options = {"gamma": 0.9, "bootstrap_values": bootstrap}
    packing = {"turn_last": ends} if level == "turn" else {"segment_ids": 1 + np.cumsum(ends, axis=1) - ends}
    want = jax.jit(kernel)(rewards, values, mask, gae_lambda=0.8, **options, **packing)
    decoupled = functools.partial(decoupled_gae, rewards, values, mask, level=level, **options, **packing)
    both_close(decoupled(policy_lambda=0.8, value_lambda=0.8), want)
    by_row = np.full(4, 0.8, np.float32)
    both_close(decoupled(policy_lambda=by_row, value_lambda=by_row), want)


@pytest.mark.parametrize("level", ["turn", "token"])
def test_decoupled_equals_the_loop_row_by_row(level):
    for seed in range(3):
        rng, rewards, values, _, mask, *_ = _ragged(seed)
        values = values[:, : mask.shape[1]]
        own = rng.random(4).astype(np.float32)
        got = decoupled_gae(
            # finite garbage on a skipped reward of the token level would count
            np.where(mask, rewards, np.nan),
            kernel_oracle.poison(values, mask, rng),
            mask,
            level=level,
            gamma=0.95,
            policy_lambda=own,
            value_lambda=0.6,
        )
        for b in range(4):
            row = slice(b, b + 1)
            close(got[0][row], kernel_oracle.gae(rewards[row], values[row], mask[row], 0.95, own[b])[0])
            close(got[1][row], kernel_oracle.gae(rewards[row], values[row], mask[row], 0.95, 0.6)[1])


def test_a_value_lambda_of_one_gives_the_discounted_returns():
    _, rewards, values, _, mask, ends, bootstrap = _ragged(8)
    values = values[:, : mask.shape[1]]
    options = {"gamma": 0.9, "turn_last": ends, "bootstrap_values": bootstrap}
    _, got = decoupled_gae(rewards, values, mask, level="turn", policy_lambda=0.5, **options)
    close(got, kernels.discounted_returns(rewards, mask, **options))


def test_length_adaptive_lambda_golden():
    """α = .05: 100 tokens give 1 − 1/5, 1,000 give 1 − 1/50; at 20 and below nothing is carried."""
    got = kernels.length_adaptive_lambda([0, 1, 20, 40, 100, 1000])
    np.testing.assert_allclose(got, [0, 0, 0, 0.5, 0.8, 0.98], rtol=1e-6)
    assert got.dtype == jnp.float32
    # The weights λ^t sum to α l, which is what the formula is for.
    length_adaptive = float(kernels.length_adaptive_lambda(400, alpha=0.1))
    np.testing.assert_allclose(np.sum(length_adaptive ** np.arange(4000)), 40.0, rtol=1e-4)


def test_vapo_is_the_two_together():
    _, rewards, values, turn_ids, *_ = _ragged(9)
    mask, token_rewards = turn_ids >= 0, _token_rewards(rewards, turn_ids)
    adaptive = kernels.length_adaptive_lambda(mask.sum(axis=1), alpha=0.4)
    got, _ = decoupled_gae(token_rewards, values, mask, level="token", gamma=1.0, policy_lambda=adaptive)
    for b in range(4):
        own = max(0.0, 1.0 - 1.0 / max(0.4 * mask[b].sum(), 1e-9))
        row = slice(b, b + 1)
        close(got[row], kernel_oracle.gae(token_rewards[row], values[row], mask[row], 1.0, own)[0])


# --- the sequence critic


def test_sequence_critic_is_the_first_advantage_of_undiscounted_turn_gae():
    _, rewards, values, _, mask, *_ = _ragged(10)
    values = values[:, : mask.shape[1]]
    scores = np.where(mask, rewards, 0).sum(axis=1)
    got = np.asarray(kernels.sequence_critic_advantages(scores, values[:, 0], mask))
    want = turn_gae(rewards, values, mask, gamma=1.0, gae_lambda=1.0)[0][:, :1]
    assert mask[:3, 0].all()  # so that the first column is the first turn
    close(got, np.where(mask, want, 0.0))
    one = turn_gae(scores[:, None], values[:, :1], mask[:, :1], gamma=0.3, gae_lambda=0.2)[0]
    close(kernels.sequence_critic_advantages(scores, values[:, 0], mask[:, :1]), one)


# --- all of them


def _bi_level(rewards, values, turn_ids, mask):
    return kernels.bi_level_gae(rewards, values, turn_ids, gamma=0.97, turn_gamma=0.9, gae_lambda=0.8)


def _decoupled(rewards, values, turn_ids, mask):
    own = jnp.linspace(0.2, 1.0, 4)
    values = values[:, : mask.shape[1]]
    return kernels.decoupled_gae(rewards, values, mask, level="turn", gamma=0.9, policy_lambda=own, value_lambda=0.7)


def _sequence(rewards, values, turn_ids, mask):
    advantages = kernels.sequence_critic_advantages(rewards[:, 0], values[:, 0], mask)
    return advantages, advantages


@pytest.mark.parametrize("estimate", [_bi_level, _decoupled, _sequence])
def test_jit_gradients_and_poison(estimate):
    rng, rewards, values, turn_ids, mask, *_ = _ragged(11)
    values_read = turn_ids >= 0
    if estimate is _decoupled:
        values_read = np.pad(mask, [(0, 0), (0, values.shape[1] - mask.shape[1])])
    elif estimate is _sequence:
        values_read = np.broadcast_to(mask.any(1)[:, None], values.shape)

    def total(rewards, values):
        results = estimate(rewards, values, turn_ids, mask)
        return jnp.sum(jnp.sin(results[0]) + results[0] * results[1]), results

    slope = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))
    clean, clean_gradient = slope(rewards, values)
    garbage = kernel_oracle.poison(rewards, mask, rng), kernel_oracle.poison(values, values_read, rng)
    bad, bad_gradient = slope(*garbage)
    jax.tree.map(np.testing.assert_array_equal, bad, clean)
    for got, want in zip(bad_gradient, clean_gradient):
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
        estimate(rewards, values, turn_ids, mask),
        clean[1],
    )
    low = jax.eval_shape(
        estimate, jnp.asarray(rewards, jnp.bfloat16), jnp.asarray(values, jnp.bfloat16), turn_ids, mask
    )
    assert all(x.dtype == jnp.float32 for x in low)


def test_nothing_sampled_gives_zeros():
    """Faults 1 and 12: a row without a turn is a row of zeros."""
    nothing = np.full((2, 3), np.nan)
    for results in (
        bi_level_gae(nothing, nothing, np.full((2, 3), -1), gamma=0.9, turn_gamma=0.9, gae_lambda=0.9),
        decoupled_gae(nothing, nothing, nothing * 0 > 0, level="token", gamma=0.9, policy_lambda=np.ones(2)),
        (kernels.sequence_critic_advantages(nothing[:, 0], nothing[:, 0], np.zeros((2, 3))),),
    ):
        np.testing.assert_array_equal(np.stack(results), np.zeros((len(results), 2, 3)))


def test_wrong_arguments_are_named():
    ids, numbers = np.zeros((2, 3), int), np.zeros((2, 3))
    common = {"gamma": 1.0, "turn_gamma": 1.0, "gae_lambda": 1.0}
    with pytest.raises(ValueError, match="anchor='middle' is not known; choose one of 'first', 'last'"):
        kernels.bi_level_gae(numbers, numbers, ids, anchor="middle", **common)
    with pytest.raises(ValueError, match=r"bi_level_gae: turn_rewards has shape \(1, 3\), turn_ids \(2, 3\)"):
        kernels.bi_level_gae(numbers[:1], numbers, ids, **common)
    with pytest.raises(ValueError, match=r"token_values has shape \(2, 2\)"):
        kernels.bi_level_gae(numbers, numbers[:, :2], ids, **common)
    decoupled = functools.partial(kernels.decoupled_gae, numbers, numbers, numbers, gamma=1.0)
    with pytest.raises(ValueError, match="level='word' is not known"):
        decoupled(level="word", policy_lambda=1.0)
    with pytest.raises(ValueError, match="segment_ids is given, but level='turn'"):
        decoupled(level="turn", policy_lambda=1.0, segment_ids=ids)
    with pytest.raises(ValueError, match="turn_last is given, but level='token'"):
        decoupled(level="token", policy_lambda=1.0, turn_last=ids)
    with pytest.raises(ValueError, match=r"policy_lambda has shape \(3,\)"):
        decoupled(level="token", policy_lambda=np.ones(3))
    with pytest.raises(ValueError, match="alpha=0 must be above 0"):
        kernels.length_adaptive_lambda(4, alpha=0)
    with pytest.raises(ValueError, match=r"sequence_critic_advantages: values has shape \(3,\)"):
        kernels.sequence_critic_advantages([1.0, 2.0], np.ones(3), numbers)

"""Advantages without a critic, over returns and turns, and all by name: against loops, by reduction, under masks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import advantage_oracle as oracle
from tests.advantage_cases import KERNELS, call, eager
from turnppo_jax import kernels

# Sums of at most 55 terms of size 1 in float32, divided by deviations that these seeds keep above 0.1.
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}
close = functools.partial(np.testing.assert_allclose, **TOLERANCE)
SEEDS = range(3)


# --- whitened returns, REINFORCE++ with baseline, ReMax


def test_whitened_returns_golden():
    """Returns to go 3, 2 and 1 (a reward of 1 a turn): mean 2, sample deviation 1."""
    got = kernels.whitened_returns([[1.0, 1.0, 1.0]], [[1, 1, 1]], gamma=1.0)
    np.testing.assert_allclose(got, [[1.0, 0.0, -1.0]], atol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_whitened_returns_equal_the_loop(seed):
    table = oracle.ragged_table(seed)
    want = oracle.whitened(oracle.returns(table["turn_rewards"], table["turn_mask"], 0.9), table["turn_mask"])
    close(call("whitened_returns", oracle.poisoned(table), gamma=0.9), want)


def test_whitened_returns_of_packed_rows_are_those_of_trajectories():
    rewards, mask = np.array([[1.0, 2.0, -1.0, 5.0, 0.5]]), np.ones((1, 5))
    last = np.array([[0, 1, 0, 0, 1]], bool)
    whitened = jax.jit(functools.partial(kernels.whitened_returns, gamma=0.5))
    packed = whitened(rewards, mask, turn_last=last)
    by_segment = whitened(rewards, mask, segment_ids=np.array([[1, 1, 2, 2, 2]]))
    apart = whitened(np.array([[1.0, 2.0, 0], [-1.0, 5.0, 0.5]]), np.array([[1, 1, 0], [1, 1, 1]]))
    close(packed[0], np.concatenate([apart[0, :2], apart[1]]))
    close(by_segment, packed)


def test_padding_segments_stay_out_of_the_statistics():
    """Fault 14: a position of segment 0 counts nowhere, even if the mask is set there."""
    got = kernels.whitened_returns([[1.0, 3.0, 9.0]], [[1, 1, 1]], gamma=0.0, segment_ids=[[1, 1, 0]])
    np.testing.assert_allclose(got, [[-0.7071068, 0.7071068, 0.0]], rtol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_baseline_equals_the_loop(seed):
    table = oracle.ragged_table(seed)
    present = table["turn_mask"] & (table["group_ids"] >= 0)[:, None]
    centred = oracle.group(table["scores"], table["group_ids"], "none")
    want = oracle.whitened(np.where(present, centred[:, None], 0.0), present)
    close(call("reinforce_baseline_advantages", oracle.poisoned(table)), want)


def test_reinforce_baseline_has_one_scale_for_all_groups():
    """Groups {0, 1} and {0, 100}: GRPO gives both ±.7071, the baseline form keeps them 1 : 100."""
    got = kernels.reinforce_baseline_advantages([0.0, 1.0, 0.0, 100.0], [0, 0, 1, 1], np.ones((4, 1)))[:, 0]
    np.testing.assert_allclose(got[3] / got[1], 100.0, rtol=1e-5)


def test_remax_golden_and_loop():
    got = kernels.remax_advantages([[1.0, 2.0], [4.0, np.nan]], [[1, 1], [1, 0]], [0.5, 5.0])
    np.testing.assert_allclose(got, [[2.5, 1.5], [-1.0, 0.0]])
    table = oracle.ragged_table(1)
    want = oracle.returns(table["turn_rewards"], table["turn_mask"], 1.0) - table["scores"][:, None]
    close(call("remax_advantages", table), np.where(table["turn_mask"], want, 0.0))


# --- turn-index groups and MT-GRPO


@pytest.mark.parametrize("absent", ["skip", "zero"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["std", "none"])
def test_turn_index_equals_the_loop(scale, baseline, absent):
    for seed in SEEDS:
        table = oracle.ragged_table(seed)
        mask, groups = table["turn_mask"], table["group_ids"]
        options = {"scale": scale, "baseline": baseline, "absent": absent}
        want = oracle.by_turn_index(oracle.returns(table["turn_rewards"], mask, 0.9), mask, groups, **options)
        close(call("turn_index_advantages", oracle.poisoned(table), gamma=0.9, **options), want)


def test_turn_index_golden():
    """Two members; only the second plays turn 2, with return 4: nobody to compare with, or 4 against 0 and 4."""
    rewards, mask = [[1.0, 0.0], [-1.0, 4.0]], [[1, 0], [1, 1]]
    options = {"gamma": 1.0, "scale": "none"}
    np.testing.assert_allclose(kernels.turn_index_advantages(rewards, mask, [5, 5], **options), [[-1, 0], [1, 0]])
    zero = kernels.turn_index_advantages(rewards, mask, [5, 5], absent="zero", **options)
    np.testing.assert_allclose(zero, [[-1, 0], [1, 2]])


def test_one_turn_is_the_group_advantage():
    """GRPO, Dr. GRPO and RLOO are turn-index groups of one turn; MT-GRPO of one turn without turn reward is GRPO."""
    table = oracle.ragged_table(5)
    scores, groups = table["scores"], table["group_ids"]
    one = np.ones((len(scores), 1))
    for options in ({}, {"scale": "none"}, {"scale": "none", "baseline": "leave_one_out"}):
        want = kernels.group_advantages(scores, groups, **options)
        got = kernels.turn_index_advantages(scores[:, None], one, groups, gamma=0.7, **options)
        np.testing.assert_array_equal(got[:, 0], want)
    mt_grpo = kernels.mt_grpo_advantages(scores, np.zeros_like(one), one, groups)
    np.testing.assert_array_equal(mt_grpo[:, 0], kernels.group_advantages(scores, groups))


@pytest.mark.parametrize("seed", SEEDS)
def test_mt_grpo_equals_the_printed_sum(seed):
    table = oracle.ragged_table(seed)
    mask, groups = table["turn_mask"], table["group_ids"]
    of_turn = oracle.by_turn_index(table["turn_rewards"].astype(np.float64), mask, groups, "std")
    of_outcome = oracle.group(table["scores"], groups, "std")
    want = np.zeros(mask.shape)
    for m, k in oracle.entries(mask):
        last = mask[m].sum() - 1
        want[m, k] = sum(0.5 * 0.9 ** (j - k) * of_turn[m, j] for j in range(k, last + 1))
        want[m, k] += 0.9 ** (last - k) * of_outcome[m]
    close(call("mt_grpo_advantages", oracle.poisoned(table), gamma=0.9, turn_weight=0.5), want)


def test_mt_grpo_of_two_turns_is_the_case_of_the_paper():
    """Before the tool result A^O + c A^I, after it A^O."""
    rewards, outcome, groups = np.array([[1.0, 0], [0.0, 0], [0.5, 0]]), np.array([0.0, 1.0, 1.0]), np.zeros(3, int)
    table = {"scores": outcome, "turn_rewards": rewards, "turn_mask": np.ones((3, 2)), "group_ids": groups}
    got = call("mt_grpo_advantages", table, turn_weight=2.0)
    of_outcome = kernels.group_advantages(outcome, groups)
    of_turn = kernels.group_advantages(rewards[:, 0], groups)
    close(got[:, 0], of_outcome + 2.0 * of_turn)
    close(got[:, 1], of_outcome)


# --- all of them


@pytest.mark.parametrize("name", KERNELS)
def test_jit_and_types_give_the_same(name):
    table = oracle.ragged_table(7)
    want = call(name, table, **KERNELS[name])
    assert want.dtype == jnp.float32
    whole = table | {"turn_mask": table["turn_mask"].astype(np.int8), "group_ids": table["group_ids"].astype(np.int8)}
    np.testing.assert_allclose(eager(name, whole, **KERNELS[name]), want, rtol=1e-5, atol=1e-6)
    low = table | {field: jnp.asarray(table[field], jnp.bfloat16) for field in ("scores", "turn_rewards")}
    assert jax.eval_shape(functools.partial(eager, name, **KERNELS[name]), low).dtype == jnp.float32


@pytest.mark.parametrize("name", KERNELS)
def test_values_and_gradients_under_poison(name):
    table = oracle.ragged_table(8)
    poisoned = oracle.poisoned(table)
    if name == "remax_advantages":  # no groups there: a greedy score is read wherever a turn is
        poisoned["scores"] = np.where(table["turn_mask"].any(1), table["scores"], np.nan)

    def total(x, of):
        got = eager(name, of | x, **KERNELS[name])
        return jnp.sum(jnp.sin(got) * jnp.arange(got.size).reshape(got.shape)), got

    slope = jax.jit(jax.value_and_grad(total, has_aux=True))
    results = []
    for of in (table, poisoned):
        results.append(slope({field: of[field] for field in ("scores", "turn_rewards")}, of))
    (clean, clean_gradient), (bad, bad_gradient) = results
    np.testing.assert_array_equal(bad[1], clean[1])
    assert np.all(np.asarray(bad[1])[~table["turn_mask"]] == 0)
    for want, got in zip(jax.tree.leaves(clean_gradient), jax.tree.leaves(bad_gradient)):
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in KERNELS if name not in ("remax_advantages", "mt_grpo_advantages")])
def test_nothing_to_compare_is_exactly_zero(name):
    """Groups of one, equal scores (large, so that rounding shows), equal anchors, an empty mask: zeros, no NaN."""
    table = oracle.ragged_table(9)
    # One turn a trajectory: with more, returns to go differ between the turns and are no equal scores.
    equal = {field: table[field][:, :1] for field in ("turn_rewards", "turn_mask", "anchor_ids")}
    equal |= {"turn_rewards": np.full((11, 1), 1e6 + 0.1), "scores": np.full(11, 1e6 + 0.1, np.float32)}
    gradient = jax.grad(lambda x: jnp.sum(call(name, table | equal | x, **KERNELS[name]) * jnp.arange(11.0)[:, None]))
    for group_ids in (np.arange(11), np.zeros(11, int)):
        same = table | equal | {"group_ids": group_ids}
        np.testing.assert_array_equal(call(name, same, **KERNELS[name]), np.zeros((11, 1)))
    slopes = gradient({field: jnp.asarray(equal[field], jnp.float32) for field in ("scores", "turn_rewards")})
    assert all(np.isfinite(slope).all() for slope in jax.tree.leaves(slopes))
    if name != "whitened_returns":  # which knows no groups
        alone = table | {"group_ids": np.arange(11)}
        if name not in (
            "gigpo_advantages",
            "hgpo_advantages",
        ):  # a state seen twice by one trajectory is a group of two
            np.testing.assert_array_equal(call(name, alone, **KERNELS[name]), np.zeros((11, 5)))


@pytest.mark.parametrize("name", KERNELS)
def test_an_empty_mask_gives_zeros(name):
    table = oracle.ragged_table(9)
    empty = table | {"turn_mask": np.zeros((11, 5)), "turn_rewards": np.full((11, 5), np.nan)}
    np.testing.assert_array_equal(call(name, empty, **KERNELS[name]), np.zeros((11, 5)))


@pytest.mark.parametrize("name", KERNELS)
def test_lines_permute_with_their_input(name):
    """Fault 16 and 17: a number stays with its own line; padding lines of no group change nothing (fault 6)."""
    table = oracle.ragged_table(10)
    order = np.random.default_rng(0).permutation(11)
    got = call(name, {field: x[order] for field, x in table.items()}, **KERNELS[name])
    want = call(name, table, **KERNELS[name])
    np.testing.assert_allclose(got, np.asarray(want)[order], rtol=1e-4, atol=1e-5)
    padding = {"scores": 5.0, "turn_rewards": 5.0, "turn_mask": 0, "group_ids": -1, "anchor_ids": 0}
    padded = {field: np.concatenate([x, np.full_like(x[:3], padding[field])]) for field, x in table.items()}
    got = call(name, padded, **KERNELS[name])
    np.testing.assert_allclose(got[:11], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[11:], np.zeros((3, 5)))


def test_wrong_arguments_are_named():
    table = oracle.ragged_table(0)
    cases = [
        ("whitened_returns", {"turn_mask": np.ones((11, 4))}, {}, r"whitened_returns: mask has shape \(11, 4\)"),
        ("reinforce_baseline_advantages", {"turn_mask": np.ones((3, 4))}, {}, r"scores has shape \(11,\)"),
        ("remax_advantages", {"scores": np.ones(3)}, {}, r"remax_advantages: greedy_scores has shape \(3,\)"),
        ("turn_index_advantages", {}, {"absent": "drop"}, r"absent='drop' is not known; choose one of 'skip', 'zero'"),
        ("turn_index_advantages", {}, {"scale": "mad"}, "scale='mad' is not known"),
        ("mt_grpo_advantages", {"scores": np.ones(3)}, {}, r"mt_grpo_advantages: scores has shape \(3,\)"),
        ("gigpo_advantages", {"anchor_ids": np.ones((11, 1), int)}, {}, r"gigpo_advantages: anchor_ids has shape"),
        ("gigpo_advantages", {}, {"scale": "mad"}, "gigpo_advantages: scale='mad' is not known"),
        ("hgpo_advantages", {}, {"history_length": -1}, "history_length=-1 must be at least 0"),
    ]
    for name, arrays, options, message in cases:
        with pytest.raises(ValueError, match=message):
            eager(name, table | arrays, **(KERNELS[name] | options))

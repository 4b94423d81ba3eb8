"""GiGPO and HGPO: step advantages among turns that saw the same, against loops and by reduction."""

import functools

import numpy as np
import pytest

from tests import advantage_oracle as oracle
from tests.advantage_cases import KERNELS, call
from turnppo_jax import kernels

# Sums of at most 55 terms of size 1 in float32, divided by deviations that these seeds keep above 0.1.
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}
close = functools.partial(np.testing.assert_allclose, **TOLERANCE)
SEEDS = range(3)


def test_gigpo_golden():
    """Two trajectories of one prompt start in state 7, with returns 1 and 3; state 8 and 9 are seen once each."""
    got = kernels.gigpo_advantages(
        [1.0, 3.0], [[1.0, 0], [1.0, 2.0]], np.ones((2, 2)), [0, 0], [[7, 8], [7, 9]], gamma=1.0, step_weight=0.5
    )
    np.testing.assert_allclose(got, [[-1 - 0.5, -1], [1 + 0.5, 1]])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scale", ["std", "none"])
def test_gigpo_equals_the_loop(scale, seed):
    table = oracle.ragged_table(seed)
    mask, groups = table["turn_mask"], table["group_ids"]
    returns = oracle.returns(table["turn_rewards"], mask, 0.95)
    episode = np.where(mask, oracle.group(table["scores"], groups, scale)[:, None], 0.0)
    want = episode + 0.7 * oracle.step(returns, mask, groups, table["anchor_ids"], 1, scale)
    close(call("gigpo_advantages", oracle.poisoned(table), step_weight=0.7, scale=scale), want)


def test_gigpo_of_weight_zero_is_the_group_advantage():
    table = oracle.ragged_table(2)
    want = np.where(table["turn_mask"], kernels.group_advantages(table["scores"], table["group_ids"])[:, None], 0.0)
    np.testing.assert_array_equal(call("gigpo_advantages", table, step_weight=0.0, scale="std"), want)


def test_gigpo_with_the_turn_index_as_anchor_is_turn_index_groups():
    table = oracle.ragged_table(3)
    columns = np.broadcast_to(np.arange(5), table["turn_mask"].shape)
    got = call("gigpo_advantages", table | {"anchor_ids": columns, "scores": np.zeros(11)}, scale="std")
    close(got, call("turn_index_advantages", table, gamma=0.95))


def test_a_long_trajectory_counts_once_in_the_episode_part():
    """Fault 15: three turns with score 1 beside one turn with score 0: baseline .5, not .75."""
    mask = [[1, 1, 1], [1, 0, 0]]
    got = kernels.gigpo_advantages([1.0, 0.0], np.zeros((2, 3)), mask, [0, 0], np.full((2, 3), -1))
    np.testing.assert_allclose(got, [[0.5, 0.5, 0.5], [-0.5, 0, 0]])


@pytest.mark.parametrize(
    ("length", "alpha", "scale", "base"), [(0, 1.0, "std", True), (1, 0.0, "none", True), (3, 2.0, "std", False)]
)
def test_hgpo_equals_the_loop(length, alpha, scale, base):
    for seed in SEEDS:
        table = oracle.ragged_table(seed, num_anchors=2)
        holes = np.random.default_rng(seed).random((11, 5)) < 0.2  # histories skip them
        table["turn_mask"] &= ~holes
        mask, groups = table["turn_mask"], table["group_ids"]
        returns = oracle.returns(table["turn_rewards"], mask, 0.95)
        scores = table["scores"] if base else None
        want = oracle.hierarchy(returns, mask, groups, table["anchor_ids"], length, alpha, scale, scores)
        options = {"history_length": length, "alpha": alpha, "scale": scale, "base": base}
        close(call("hgpo_advantages", oracle.poisoned(table), **options), want)


def test_hgpo_golden():
    """State 5 in turn 2 of three trajectories with returns 0, 2, 7; the first two came from 1, the third from 2.

    Level 1: mean 3, so -3, -1, 4; level 2: mean 1 of the first two, so -1, 1, and nothing for the third.
    Weights 2 : 3.
    """
    got = kernels.hgpo_advantages(
        [[0.0, 0], [0, 2.0], [0, 7.0]],
        np.ones((3, 2)),
        [0, 0, 0],
        [[1, 5], [1, 5], [2, 5]],
        history_length=1,
        gamma=1.0,
    )
    np.testing.assert_allclose(got[:, 1], [(2 * -3 + 3 * -1) / 5, (2 * -1 + 3 * 1) / 5, 4.0], rtol=1e-6)
    # Turn 1 has no earlier observation: state 1 with returns 0 and 2, state 2 alone.
    np.testing.assert_allclose(got[:, 0], [-1.0, 1.0, 0.0], rtol=1e-6)


def test_hgpo_of_one_level_is_the_step_part_of_gigpo():
    table = oracle.ragged_table(4)
    for scale in ("std", "none"):
        step = call("gigpo_advantages", table | {"scores": np.zeros(11)}, scale=scale)
        got = call("hgpo_advantages", table, history_length=0, scale=scale)
        np.testing.assert_array_equal(got, step)


def test_hgpo_leaves_out_a_level_at_the_mean():
    """Returns .1, .2, .3: the middle one is at the mean of level 1, so that its trajectory decides alone."""
    table = {
        "turn_rewards": np.float32([[0.1], [0.2], [0.3]]),
        "turn_mask": np.ones((3, 1)),
        "group_ids": np.zeros(3, int),
        "anchor_ids": np.full((3, 1), 5),
        "scores": np.float32([0.0, 1.0, 5.0]),
    }
    got = call("hgpo_advantages", table, history_length=0, base=True)
    np.testing.assert_allclose(got[1, 0], 1.0 - 2.0, rtol=1e-5)


def test_anchors_do_not_reach_across_prompts():
    """The same state in the same turn of every trajectory, but each trajectory the only one of its prompt."""
    columns = np.broadcast_to(np.arange(5), (11, 5))
    alone = oracle.ragged_table(6) | {"group_ids": np.arange(11), "anchor_ids": columns}
    for name in ("gigpo_advantages", "hgpo_advantages"):
        np.testing.assert_array_equal(call(name, alone, **KERNELS[name]), np.zeros((11, 5)))


def test_many_turns_are_compared_in_blocks():
    """More turns than one block holds (256), not a multiple of it."""
    table = oracle.ragged_table(0, num_trajectories=67, max_turns=5)
    mask, groups = table["turn_mask"], table["group_ids"]
    returns = oracle.returns(table["turn_rewards"], mask, 0.95)
    want = oracle.step(returns, mask, groups, table["anchor_ids"], 2, "none")
    one = oracle.step(returns, mask, groups, table["anchor_ids"], 1, "none")
    said = (np.abs(want) > 1e-9) * 3.0, (np.abs(one) > 1e-9) * 2.0
    want = (said[0] * want + said[1] * one) / np.maximum(said[0] + said[1], 1.0)
    close(call("hgpo_advantages", table, history_length=1), want)


def test_equal_rewards_ahead_are_equal_returns_wherever_the_turn_stands():
    """The same state with the same rewards ahead, after 0 to 6 turns: rounding of the sums must not become ±1."""
    rng = np.random.default_rng(0)
    ahead = rng.normal(size=6).astype(np.float32)
    shape = 7, 12
    table = {"scores": np.zeros(7, np.float32), "group_ids": np.zeros(7, int)}
    table |= {"turn_rewards": np.zeros(shape, np.float32), "turn_mask": np.zeros(shape, bool)}
    table["anchor_ids"] = np.full(shape, -1)
    for m in range(7):
        table["turn_rewards"][m, m : m + 6] = ahead
        table["turn_mask"][m, : m + 6] = True
        table["anchor_ids"][m, m] = 3
    got = call("gigpo_advantages", table, scale="std")
    np.testing.assert_array_equal(got, np.zeros(shape))

"""Which trajectories train: groups by spread, groups without it, over-long ones, against sorting by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import advantage_oracle, kernel_oracle
from turnppo_jax import kernels


def _rollout(seed, num_groups=7, group_size=4):
    """Scores of shuffled groups, the last two of them flat, with two lines of no group."""
    rng = np.random.default_rng(seed)
    groups = np.concatenate([np.repeat(10 * np.arange(num_groups), group_size), [-1, -1]])
    scores = rng.normal(size=groups.size).astype(np.float32) * (1 + groups)
    scores[groups >= 10 * (num_groups - 2)] = 0.3
    order = rng.permutation(groups.size)
    return rng, scores[order], groups[order]


def _ranked(scores, groups, largest):
    """Groups in the order that the filter takes them: by sample deviation, then by first appearance."""
    names = list(dict.fromkeys(g for g in groups if g >= 0))

    def deviation(g):
        own = scores[groups == g].astype(np.float64)
        return 0.0 if own.max() == own.min() else own.std(ddof=1)

    return sorted(names, key=lambda g: -deviation(g) if largest else deviation(g))


@pytest.mark.parametrize("order", ["largest", "smallest"])
@pytest.mark.parametrize(("fraction", "kept"), [(0.01, 1), (0.25, 1), (0.5, 3), (3 / 7, 3), (0.99, 6), (1.0, 7)])
def test_top_spread_groups_equal_sorting(order, fraction, kept):
    rng, scores, groups = _rollout(0)
    filtered = jax.jit(functools.partial(kernels.top_spread_groups, group_size=4, fraction=fraction, order=order))(
        kernel_oracle.poison(scores, groups >= 0, rng), groups
    )
    want = np.isin(groups, _ranked(scores, groups, order == "largest")[:kept])
    assert filtered.dtype == bool
    np.testing.assert_array_equal(filtered, want)


def test_the_share_of_ragen_is_two_of_eight_groups():
    """8 groups of 16 at .25: 32 of 128 trajectories."""
    rng = np.random.default_rng(1)
    kept = kernels.top_spread_groups(rng.normal(size=128), np.repeat(np.arange(8), 16), group_size=16)
    assert np.sum(kept) == 32


def test_whole_numbers_survive_rounding():
    """In float32 these shares of 37 groups fall just short of the whole number that is meant."""
    scores = np.random.default_rng(2).normal(size=74)
    for meant in (3, 6, 12, 24):
        assert np.floor(np.float32(meant / 37) * np.float32(37)) == meant - 1
        kept = kernels.top_spread_groups(scores, np.repeat(np.arange(37), 2), group_size=2, fraction=meant / 37)
        assert np.sum(kept) == 2 * meant


def test_flat_groups_only_where_allowed():
    _, scores, groups = _rollout(3)
    kept = kernels.top_spread_groups(scores, groups, group_size=4, fraction=1.0, keep_flat=False)
    np.testing.assert_array_equal(kept, (groups >= 0) & (groups < 50))
    nothing = kernels.top_spread_groups(np.ones(4), [0, 0, 1, 1], group_size=2, keep_flat=False)
    np.testing.assert_array_equal(nothing, np.zeros(4, bool))


def test_groups_of_equal_spread_go_by_first_appearance():
    """Groups 9, 2, 5 all spread by 1: one of three kept is 9, which stands first."""
    kept = kernels.top_spread_groups([0.0, 5, 8, 1, 6, 9], [9, 2, 5, 9, 2, 5], group_size=2, fraction=0.34)
    np.testing.assert_array_equal(kept, [1, 0, 0, 1, 0, 0])


def test_a_group_left_with_one_member_ranks_last():
    kept = kernels.top_spread_groups([0.0, 0.1, 1e6], [0, 0, 1], group_size=2, fraction=0.5)
    np.testing.assert_array_equal(kept, [1, 1, 0])


@pytest.mark.parametrize("seed", range(3))
def test_groups_with_spread_equal_the_loop(seed):
    rng, scores, groups = _rollout(seed)
    kept = kernels.groups_with_spread(kernel_oracle.poison(scores, groups >= 0, rng), groups)
    want = [g >= 0 and np.ptp(scores[groups == g]) > 0 for g in groups]
    np.testing.assert_array_equal(kept, want)
    # What is left out would have given no gradient.
    advantages = kernels.group_advantages(scores, groups)
    np.testing.assert_array_equal(np.asarray(advantages)[~np.asarray(kept)], 0.0)


def test_dynamic_sampling_golden():
    """All solved, all failed, mixed, alone."""
    success, groups = [1, 1, 0, 0, 1, 0, 1], [0, 0, 1, 1, 2, 2, 3]
    np.testing.assert_array_equal(kernels.groups_with_spread(success, groups), [0, 0, 0, 0, 1, 1, 0])
    near = np.float32([0.3, 0.35, 0.0, 0.5])
    np.testing.assert_array_equal(kernels.groups_with_spread(near, [0, 0, 1, 1], min_range=0.1), [0, 0, 1, 1])


def test_scores_that_differ_by_rounding_are_flat():
    """Spread of 1e-7 in group 0, which `group_advantages` takes for none, too."""
    scores, groups = np.float32([10.6, np.nextafter(np.float32(10.6), np.float32(11)), 0.0, 1e-5]), [0, 0, 1, 1]
    np.testing.assert_array_equal(kernels.groups_with_spread(scores, groups), [0, 0, 1, 1])
    kept = kernels.top_spread_groups(scores, groups, group_size=2, fraction=1.0, keep_flat=False)
    np.testing.assert_array_equal(kept, [0, 0, 1, 1])


def test_not_overlong_golden():
    cut, groups = [1, 0, 0, 0], [0, 0, 0, -1]
    np.testing.assert_array_equal(kernels.not_overlong(cut, groups), [0, 1, 1, 0])
    budget = kernels.not_overlong(cut, groups, num_tokens=[3, 8, 9, 1], max_tokens=8)
    np.testing.assert_array_equal(budget, [0, 1, 0, 0])
    assert budget.dtype == bool


def test_filters_join_and_leave_the_rest_of_the_advantages_alone():
    """A group out of `group_ids` has advantage 0; the others keep theirs, since no statistic crosses groups."""
    table = advantage_oracle.ragged_table(0)
    scores, groups = table["scores"], table["group_ids"]
    kept = kernels.groups_with_spread(scores, groups) & kernels.top_spread_groups(
        scores, groups, group_size=4, fraction=0.5
    )
    assert 0 < np.sum(kept) < np.sum(groups >= 0)
    filtered = kernels.group_advantages(scores, jnp.where(kept, groups, -1))
    want = np.where(kept, kernels.group_advantages(scores, groups), 0.0)
    np.testing.assert_array_equal(filtered, want)


def test_nothing_rolled_out_keeps_nothing():
    """Fault 1: no trajectory at all, only lines of padding."""
    scores, groups = np.full(3, np.nan), np.full(3, -1)
    for kept in (
        kernels.top_spread_groups(scores, groups, group_size=2),
        kernels.groups_with_spread(scores, groups),
        kernels.not_overlong(np.zeros(3), groups),
    ):
        np.testing.assert_array_equal(kept, np.zeros(3, bool))


def test_wrong_arguments_are_named():
    scores, groups = np.zeros(4), np.zeros(4, int)
    cases = [
        ({"group_size": 1}, "group_size=1 must be at least 2"),
        ({"group_size": 2, "fraction": 0.0}, "fraction=0.0 must be above 0 and at most 1"),
        ({"group_size": 2, "fraction": 1.5}, "fraction=1.5 must be above 0"),
        ({"group_size": 2, "order": "random"}, "order='random' is not known; choose one of 'largest', 'smallest'"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            kernels.top_spread_groups(scores, groups, **options)
    with pytest.raises(ValueError, match=r"groups_with_spread: group_ids has shape \(3,\)"):
        kernels.groups_with_spread(scores, groups[:3])
    with pytest.raises(ValueError, match="min_range=-1 must be at least 0"):
        kernels.groups_with_spread(scores, groups, min_range=-1)
    with pytest.raises(ValueError, match="not_overlong: max_tokens=None"):
        kernels.not_overlong(scores, groups, num_tokens=groups)

"""Intervals and pass@k against published numbers and an exhaustive oracle."""

import itertools

import numpy as np
import pytest

from turnppo_jax.training import statistics


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    # The first three from Newcombe (1998), table I, method 3; the last two follow from z² / (n + z²) = 0.27753.
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (1, 29, 0.0061, 0.1718),
        (0, 10, 0, 0.2775),
        (10, 10, 0.7225, 1),
    ],
)
def test_wilson_interval_equals_published_numbers(successes, trials, low, high):
    np.testing.assert_allclose(statistics.wilson_interval(successes, trials), (low, high), atol=5e-5)  # four digits


def test_wilson_interval_refuses_what_is_no_rate():
    for successes, trials in ((0, 0), (3, 2), (-1, 2)):
        with pytest.raises(ValueError, match="successes"):
            statistics.wilson_interval(successes, trials)


def test_mean_interval_of_a_hand_worked_sample():
    # 1..5: mean 3, s = sqrt(2.5), t(4) = 2.776445: half width 2.776445 * sqrt(2.5 / 5) = 1.963243.
    interval = statistics.mean_interval([1, 2, 3, 4, 5])
    np.testing.assert_allclose((interval.mean, interval.low, interval.high), (3, 1.036757, 4.963243), atol=1e-6)
    assert (interval.units, interval.samples) == (5, 5)


def test_one_room_says_nothing_about_the_spread():
    interval = statistics.mean_interval([[1.0, 3.0]])
    assert (interval.mean, interval.low, interval.high) == (2.0, 2.0, 2.0)


def test_samples_of_one_room_are_not_independent():
    rooms = np.array([0, 1] * 32, np.float64)
    alone = statistics.rate_interval(rooms)
    repeated = statistics.rate_interval(np.repeat(rooms[:, None], 4, axis=1))
    # Four equal samples of each room say no more than one.
    np.testing.assert_allclose((repeated.low, repeated.high), (alone.low, alone.high), rtol=1e-12)
    np.testing.assert_allclose((alone.low, alone.high), statistics.wilson_interval(32, 64), rtol=1e-12)
    # Rooms that all have success 2 of 4 differ as little as independent samples can: as 256 trials.
    mixed = statistics.rate_interval(np.tile([0, 1, 1, 0], (64, 1)))
    np.testing.assert_allclose((mixed.low, mixed.high), statistics.wilson_interval(128, 256), rtol=1e-12)
    assert repeated.samples == 256 and repeated.units == 64


def test_rate_interval_covers_the_truth_where_rooms_differ():
    # 64 rooms × 4 samples, each room with its own chance. A 95 % interval misses in 5 % of the draws; in 2,000 draws
    # that is 5 ± 1.5 % (3 sigma). Counting 256 independent trials instead misses 17 % of these draws.
    rng = np.random.default_rng(0)
    missed = 0
    for _ in range(2000):
        chance = rng.beta(0.8, 1.2, size=64)
        interval = statistics.rate_interval(rng.random((64, 4)) < chance[:, None])
        missed += not interval.low <= 0.4 <= interval.high
    assert 0.03 < missed / 2000 < 0.07


def test_no_success_at_all_still_has_an_interval():
    interval = statistics.rate_interval(np.zeros((10, 4)))
    assert interval.low == 0
    np.testing.assert_allclose(interval.high, 0.2775, atol=5e-5)  # ten rooms, not forty trials


def test_a_timed_out_episode_is_a_failure_not_a_gap():
    # 3 of 8 with two time-outs among the failures: .375, not 3 / 6.
    assert statistics.rate_interval([1, 1, 1, 0, 0, 0, 0, 0]).mean == 0.375


@pytest.mark.parametrize("values", [[], np.zeros((2, 2, 2)), [1.0, float("nan")]])
def test_wrong_tables_are_refused(values):
    with pytest.raises(ValueError, match=r"needs \[N\]|finite"):
        statistics.mean_interval(values)


def test_a_rate_is_of_zeros_and_ones():
    with pytest.raises(ValueError, match="0 or 1"):
        statistics.rate_interval([0.5])


def test_pass_at_k_equals_counting_every_subset():
    for n in range(1, 7):
        for c in range(n + 1):
            outcomes = [1] * c + [0] * (n - c)
            for k in range(1, n + 1):
                subsets = list(itertools.combinations(outcomes, k))
                expected = sum(any(subset) for subset in subsets) / len(subsets)
                np.testing.assert_allclose(statistics.pass_at_k(n, c, k), expected, rtol=1e-12)


def test_pass_at_k_by_hand():
    assert statistics.pass_at_k(10, 3, 1) == pytest.approx(0.3, abs=1e-15)
    assert statistics.pass_at_k(5, 2, 2) == pytest.approx(0.7, abs=1e-15)  # 1 - C(3,2) / C(5,2)
    for n, c, k in ((4, 1, 5), (4, 1, 0), (4, 5, 1)):
        with pytest.raises(ValueError, match="samples="):
            statistics.pass_at_k(n, c, k)


def test_pass_at_k_over_rooms():
    outcomes = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
    interval = statistics.pass_at_k_interval(outcomes, 2)
    np.testing.assert_allclose(interval.mean, (1 / 2 + 5 / 6 + 0 + 1) / 4, rtol=1e-12)
    assert 0 <= interval.low < interval.mean < interval.high <= 1
    assert statistics.pass_at_k_interval(outcomes, 1).mean == pytest.approx(statistics.rate_interval(outcomes).mean)
    whole = statistics.pass_at_k_interval(outcomes, 4)  # solved or not: a plain rate, 3 of 4 rooms
    np.testing.assert_allclose((whole.low, whole.high), statistics.wilson_interval(3, 4), rtol=1e-12)

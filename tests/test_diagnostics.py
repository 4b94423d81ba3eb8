"""Measurements of the critic at turn starts and of credit by turn, against loops over trajectories."""

import itertools

import numpy as np
import pytest

from turnppo_jax.training.advantages import Advantages
from turnppo_jax.training.diagnostics import by_turn_metrics, critic_metrics
from turnppo_jax.training.rollout_table import RolloutTable

MAX_TURNS, MAX_TOKENS = 4, 20


def rollout(rng, level, trajectories=9):
    """(table, advantages, by trajectory the lists of its turns' values and targets, one for each token or turn)."""
    shape = (trajectories, MAX_TURNS if level == "turn" else MAX_TOKENS)
    # What stands off the turns is garbage that must not be read.
    values, targets = rng.normal(size=(2, *shape)) * 1e6
    mask, counts = np.zeros((trajectories, MAX_TURNS), bool), np.zeros((trajectories, MAX_TURNS), int)
    lines = []
    for m in range(trajectories):
        own, at = [], 0
        for k in range(rng.integers(0, MAX_TURNS + 1)):
            mask[m, k], counts[m, k] = True, rng.integers(1, 6)
            n = 1 if level == "turn" else counts[m, k]
            values[m, at : at + n], targets[m, at : at + n] = rng.normal(size=(2, n))
            own.append((int(counts[m, k]), values[m, at : at + n], targets[m, at : at + n]))
            at += n
        lines.append(own)
    table = RolloutTable(
        rewards=None, mask=mask, num_tokens=counts, values=values, bootstrap=None, value_weights=np.ones(shape), kl=None
    )
    estimated = Advantages(advantages=None, targets=targets / 3.0, turn_advantages=None, turn_values=None, metrics={})
    return table, estimated, lines


@pytest.mark.parametrize("level", ["turn", "token"])
@pytest.mark.parametrize("seed", range(3))
def test_critic_metrics_equal_the_loop(level, seed):
    table, estimated, lines = rollout(np.random.default_rng(seed), level)
    got = critic_metrics(table, estimated, 3.0)
    turns = [turn for line in lines for turn in line]
    starts, goals = np.array([turn[1][0] for turn in turns]), np.array([turn[2][0] for turn in turns])
    want = {"value/turn_start_explained_variance": 1 - np.var(goals - starts) / np.var(goals)}
    lengths = np.array([turn[0] for turn in turns])
    low, high = np.quantile(lengths, [1 / 3, 2 / 3])
    for name, inside in (
        ("short", lengths <= low), ("middle", (low < lengths) & (lengths <= high)), ("long", lengths > high),
    ):  # fmt: skip
        if inside.any():
            want[f"value/turn_start_error_{name}"] = np.abs(starts - goals)[inside].mean()
    pairs = [(a, b) for line in lines for a, b in itertools.pairwise(line)]
    want["value/change_across_turns"] = np.mean([abs(b[1][0] - a[1][0]) for a, b in pairs])
    if level == "token":
        want["value/change_between_turns"] = np.mean([abs(b[1][0] - a[1][-1]) for a, b in pairs])
        want["value/change_inside_turns"] = np.mean([x for turn in turns for x in np.abs(np.diff(turn[1]))])
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-9, err_msg=name)


@pytest.mark.parametrize("level", ["turn", "token"])
def test_a_rollout_without_turns_has_no_metrics(level):
    table, estimated, _ = rollout(np.random.default_rng(0), level, trajectories=0)
    assert critic_metrics(table, estimated, 1.0) == {}
    assert by_turn_metrics("advantage", np.zeros((0, 3)), np.zeros((0, 3), bool)) == {}


def test_by_turn_counts_from_one_and_leaves_out_what_nobody_played():
    values = np.array([[1.0, 5.0, np.nan], [3.0, np.nan, np.nan]])
    mask = np.array([[True, True, False], [True, False, False]])
    assert by_turn_metrics("x", values, mask) == {
        "by_turn/x_mean_1": 2.0, "by_turn/x_std_1": 1.0, "by_turn/x_mean_2": 5.0, "by_turn/x_std_2": 0.0,
    }  # fmt: skip

"""Sums of a micro-batch by turn index, against loops over the trajectories that were packed."""

import functools

import jax
import numpy as np
import pytest

from tests.learner_cases import SHAPE, make_trajectories
from turnppo_jax.training import sums
from turnppo_jax.training.batching import pack
from turnppo_jax.training.rollout_table import compact_turn_ids
from turnppo_jax.training.update_metrics import join_updates, scoring_metrics

TURNS = SHAPE.max_turns


@pytest.mark.parametrize("window", [False, True])
def test_sums_equal_the_loop(window):
    trajectories = make_trajectories(5, window=window)
    rng = np.random.default_rng(0)
    batch, _ = pack(trajectories, SHAPE)
    turn_ids = np.asarray(compact_turn_ids(batch))
    # By trajectory and turn: log-probs, entropies, old log-probs of its tokens; NaN where nothing was sampled.
    said = [[rng.normal(size=(3, len(turn.response_ids))) for turn in t.turns] for t in trajectories]
    for line in said:
        for turn in line:
            turn[1] = rng.choice([0.01, 0.3, 2.0], size=turn.shape[1])
    logprobs, entropy, old = np.full((3, *turn_ids.shape), np.nan, np.float32)
    for b, a in np.argwhere(turn_ids >= 0):
        k = turn_ids[b, a]
        place = a - np.flatnonzero(turn_ids[b] == k)[0]
        logprobs[b, a], entropy[b, a], old[b, a] = said[batch.trajectory_ids[b, k]][batch.turn_index[b, k]][:, place]
    got = jax.jit(functools.partial(sums.sampler_sums, max_turns=TURNS))(logprobs, entropy, batch)
    got |= jax.jit(functools.partial(sums.log_ratio_sums, max_turns=TURNS))(logprobs, old, turn_ids, batch)

    every = [turn for line in said for turn in line]
    gaps = [
        np.abs(turn[0] - played.behavior_logprobs)
        for line, t in zip(said, trajectories)
        for turn, played in zip(line, t.turns)
    ]
    want = {
        "entropy_sum": sum(turn[1].sum() for turn in every),
        "low_entropy_tokens": sum((turn[1] < 0.1).sum() for turn in every),
        "gap_sum": sum(map(np.sum, gaps)),
        "gap_max": max(map(np.max, gaps)),
        "num_tokens": sum(turn.shape[1] for turn in every),
    }
    by_turn = [[line[k] for line in said if k < len(line)] for k in range(TURNS)]
    ratios = [[(turn[0] - turn[2]).sum() for turn in turns] for turns in by_turn]
    want |= {
        "entropy_by_turn": [sum(turn[1].sum() for turn in turns) for turns in by_turn],
        "tokens_by_turn": [sum(turn.shape[1] for turn in turns) for turns in by_turn],
        "turns_by_turn": [len(turns) for turns in by_turn],
        "log_ratio_by_turn": [sum(own) for own in ratios],
        "log_ratio_square_by_turn": [sum(np.square(own)) for own in ratios],
    }
    assert got.keys() == want.keys() and sums.empty_sampler_sums(TURNS).keys() <= want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5, err_msg=name)

    metrics = join_updates([got, got])  # twice the same: means stay
    for k, own in enumerate(ratios):
        if own:
            np.testing.assert_allclose(metrics[f"by_turn/log_ratio_mean_{k + 1}"], np.mean(own), rtol=1e-3, atol=1e-4)
            np.testing.assert_allclose(metrics[f"by_turn/log_ratio_std_{k + 1}"], np.std(own), rtol=1e-3, atol=1e-3)
        assert (f"by_turn/log_ratio_mean_{k + 1}" in metrics) == bool(own)
    mismatch = dict.fromkeys(
        ("importance_units", "importance_sum", "importance_square_sum", "importance_cut", "sampler_kl_k1",
         "sampler_kl_k3"), 1.0
    )  # fmt: skip
    metrics = scoring_metrics([got | mismatch, got | mismatch])
    tokens = np.concatenate([turn[1] for turn in by_turn[0]])
    np.testing.assert_allclose(metrics["by_turn/entropy_mean_1"], tokens.mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["policy/low_entropy_share"], want["low_entropy_tokens"] / want["num_tokens"])
    assert (f"by_turn/entropy_mean_{TURNS}" in metrics) == bool(by_turn[-1])


def test_joined_sums_add_and_maxima_compare():
    joined = sums.join_sums({"a": np.ones(2), "b_max": np.float32(3)}, {"a": np.ones(2), "b_max": np.float32(1)})
    assert joined["a"].tolist() == [2, 2] and joined["b_max"] == 3

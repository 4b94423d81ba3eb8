"""Groups and statistics over the trajectories of all hosts, wherever each was played; threads stand for hosts.

Every host has the whole rollout before anything is compared: filters, facts and rows are made of it, and the advantages
are computed from a table of all trajectories that is the same on each. tests/test_hosts.py trains with real processes.
"""

import dataclasses

import jax
import numpy as np
import pytest

from tests.learner_cases import make_trajectories
from tests.test_advantages import SHAPE
from tests.thread_hosts import ThreadHosts
from turnppo_jax import kernels
from turnppo_jax.parallel.hosts import own_share
from turnppo_jax.rollout.divided import play_divided
from turnppo_jax.training.algorithm import AlgorithmConfig
from turnppo_jax.training.batching import pack
from turnppo_jax.training.episode_metrics import episode_metrics
from turnppo_jax.training.estimators import ESTIMATORS
from turnppo_jax.training.reward_terms import RewardSettings, apply_terms
from turnppo_jax.training.selection import select
from turnppo_jax.types import StopReason

COUNT, DROPPED = 6, 4  # in groups of two; the environment of the fifth failed for good
REWARD = RewardSettings({"environment": 1.0, "response_tokens": -0.125, "success": 0.5, "progress": 2.0})
FILTERS = (
    {}, {"filter": "spread", "filter_on": "success"}, {"filter": "top_spread", "filter_fraction": 0.34},
    {"mask_overlong": True},
)  # fmt: skip


def rollout():
    trajectories = make_trajectories(8, count=COUNT, window=True)
    for m, t in enumerate(trajectories):
        for k, turn in enumerate(t.turns):
            turn.observation = f"room \u2028 {'abc'[(m // 2 + k) % 3]}"
            turn.info = {"success": m in (1, 2), "reward_terms": {"progress": m / 7 + k}}
    trajectories[3].turns[0].stop = StopReason.TURN_LIMIT
    return trajectories


def played(episodes):
    trajectories = rollout()
    return [trajectories[i] for i in episodes if i != DROPPED], {"rollout_s": 0.0, "dropped_episodes": 0}


def everything(play):
    """What a host makes of a rollout for every estimator with every filter, up to the programs on the devices."""
    trajectories, _ = play(range(COUNT))
    rewarded = apply_terms(trajectories, REWARD)
    out = {"metrics": episode_metrics(trajectories) | rewarded.metrics}
    known = [m for m in range(COUNT) if m != DROPPED]  # what further rollouts say of each that is left
    given = {"greedy_scores": np.arange(6.0)[known], "branch_values": np.arange(24.0).reshape(6, 4)[known]}
    for name in ESTIMATORS:
        for number, filtered in enumerate(FILTERS):
            cfg = AlgorithmConfig(estimator=name, group_size=2, bootstrap_truncated=True, **filtered)
            chosen = select(rewarded.trajectories, SHAPE, cfg, **given)
            out[f"{name} {number}"] = dataclasses.asdict(chosen)
            if name == "turn_gae":
                batch, stats = pack(rewarded.trajectories, SHAPE, members=chosen.members, bootstrap=cfg.bootstraps)
                out[f"batch {number}"] = dataclasses.asdict(batch) | dataclasses.asdict(stats)
    return out


@pytest.mark.parametrize("count", [2, 3])
def test_every_estimator_is_told_on_every_host_what_one_process_would_be_told(monkeypatch, count):
    want = everything(played)
    group = ThreadHosts(monkeypatch, count)
    results, errors = group.run(lambda index: everything(lambda episodes: play_divided(played, list(episodes))))
    assert errors == [None] * count
    for found in results:
        jax.tree.map(np.testing.assert_array_equal, found, want)
    # Two hosts have a member of the second group each; the other member of the third was dropped.
    shares, _ = group.run(lambda index: list(own_share(COUNT)))
    assert (count == 2) == any(2 in share and 3 not in share for share in shares)


def test_a_group_that_was_played_on_two_hosts_is_compared_as_one(monkeypatch):
    group = ThreadHosts(monkeypatch, 2)
    (trajectories, _), _ = group.run(lambda index: play_divided(played, list(range(COUNT))))[0]
    facts = select(trajectories, SHAPE, AlgorithmConfig(estimator="group", group_size=2)).facts
    scores = np.array([t.total_reward for m, t in enumerate(rollout()) if m != DROPPED])
    advantages = kernels.group_advantages(facts.scores, facts.group_ids, scale="none")
    want = [*(scores[:2] - scores[:2].mean()), *(scores[2:4] - scores[2:4].mean()), 0.0]
    np.testing.assert_allclose(advantages[:5], want, rtol=1e-5, atol=1e-6)

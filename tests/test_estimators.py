"""Every estimator on a packed rollout: what comes out is the kernel's on tables that are filled by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.learner_cases import make_trajectories, quick_compilation  # noqa: F401  (a fixture of this module)
from tests.test_advantages import SHAPE, estimate
from turnppo_jax import kernels
from turnppo_jax.training import rollout_table as tables
from turnppo_jax.training.advantages import estimate as advantages_of
from turnppo_jax.training.algorithm import AlgorithmConfig
from turnppo_jax.training.selection import anchor_ids, select
from turnppo_jax.types import StopReason

GROUPS = {"group_size": 2, "whitening": "none"}
COUNT = 6


def rollout(window=False):
    """Trajectories of 1 to 3 turns, two to a group, with three observations in all."""
    trajectories = make_trajectories(8, count=COUNT, window=window)
    for m, trajectory in enumerate(trajectories):
        for k, turn in enumerate(trajectory.turns):
            turn.observation = "abc"[(m // 2 + k) % 3]
    return trajectories


def by_hand(trajectories):
    """(rewards [M, K], mask [M, K], tokens of each turn [M, K], turn of each token [M, N])."""
    rewards, counts = np.zeros((2, SHAPE.trajectories, SHAPE.max_turns))
    turn_ids = np.full((SHAPE.trajectories, SHAPE.max_sampled), -1)
    for m, trajectory in enumerate(trajectories):
        ids = [k for k, turn in enumerate(trajectory.turns) for _ in turn.response_ids]
        turn_ids[m, : len(ids)] = ids
        for k, turn in enumerate(trajectory.turns):
            rewards[m, k], counts[m, k] = turn.reward, len(turn.response_ids)
    return rewards.astype(np.float32), counts > 0, counts, turn_ids


def of_group(trajectories):
    return np.asarray([t.group for t in trajectories] + [-1] * (SHAPE.trajectories - len(trajectories)))


def token_rewards(rewards, mask, turn_ids):
    """A turn's reward on its last token."""
    out = np.zeros(turn_ids.shape, np.float32)
    for m, k in zip(*np.nonzero(mask)):
        out[m, np.flatnonzero(turn_ids[m] == k)[-1]] = rewards[m, k]
    return out


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"estimator": "turn_gae", "critic_target": "lambda_return", "critic_lambda": 1.0},
        {"estimator": "token_gae", "critic_target": "lambda_return", "critic_lambda": 0.5},
        {"estimator": "token_gae", "length_adaptive_alpha": 0.3},
        {"estimator": "bi_level_gae", "critic_target": "lambda_return", "gamma": 0.97, "turn_gamma": 0.8},
        {"estimator": "bi_level_gae", "critic_target": "lambda_return", "turn_lambda": 0.3},
        {"estimator": "sequence_critic"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_estimators_with_a_critic(changes, window):
    cfg = AlgorithmConfig(whitening="none", value_scale=2.0, **changes)
    trajectories = rollout(window)
    rewards, mask, counts, turn_ids = by_hand(trajectories)
    by_turn = cfg.advantage_level == "turn"
    rng = np.random.default_rng(0)
    shape = mask.shape if by_turn else turn_ids.shape
    values = rng.normal(size=shape).astype(np.float32)
    table, got = estimate(trajectories, cfg, values, np.zeros(SHAPE.trajectories))
    scores = np.where(mask, rewards, 0).sum(axis=1)
    entries = (rewards, mask) if by_turn else (token_rewards(rewards, mask, turn_ids), turn_ids >= 0)
    if cfg.estimator == "bi_level_gae":
        want = kernels.bi_level_gae(
            rewards, values, turn_ids, gamma=cfg.gamma, turn_gamma=cfg.turn_gamma or cfg.gamma, gae_lambda=0.9,
            turn_lambda=cfg.turn_lambda,
        )  # fmt: skip
    elif cfg.estimator == "sequence_critic":
        want = kernels.sequence_critic_advantages(scores, values[:, 0], mask), np.where(mask, scores[:, None], 0)
    else:
        own = 0.9
        if cfg.length_adaptive_alpha:
            own = kernels.length_adaptive_lambda(counts.sum(axis=1), alpha=cfg.length_adaptive_alpha)
        target = 1.0 if cfg.critic_target == "monte_carlo" else cfg.critic_lambda
        kernel = functools.partial(kernels.decoupled_gae, level=cfg.advantage_level, gamma=0.99)
        want = jax.jit(kernel)(entries[0], values, entries[1], policy_lambda=own, value_lambda=target)
    np.testing.assert_allclose(got.advantages, want[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got.targets, np.asarray(want[1]) / 2.0, rtol=1e-4, atol=1e-5)
    if cfg.estimator == "sequence_critic":  # the value of the prompt alone is taught, once a trajectory
        weights = np.zeros(mask.shape)
        weights[:COUNT, 0] = 1 / 3  # minibatches of three
        np.testing.assert_allclose(table.value_weights, weights, rtol=1e-6)


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        (
            {"estimator": "returns", "whitening": "rollout"},
            lambda r, m, s, g, a: kernels.whitened_returns(r, m, gamma=0.99),
        ),
        (
            {"estimator": "returns", "whitening": "none"},
            lambda r, m, s, g, a: kernels.discounted_returns(r, m, gamma=0.99),
        ),
        (
            {"estimator": "group", "group_scale": "none", "group_size": 2, "whitening": "rollout"},
            lambda r, m, s, g, a: kernels.reinforce_baseline_advantages(s, g, m),
        ),
        (
            {"estimator": "group", "group_baseline": "leave_one_out", **GROUPS},
            lambda r, m, s, g, a: jnp.where(m, kernels.group_advantages(s, g, baseline="leave_one_out")[:, None], 0),
        ),
        (
            {"estimator": "turn_group", "group_absent": "zero", **GROUPS},
            lambda r, m, s, g, a: kernels.turn_index_advantages(r, m, g, gamma=0.99, absent="zero"),
        ),
        (
            {"estimator": "mt_grpo", "turn_weight": 0.5, **GROUPS},
            lambda r, m, s, g, a: kernels.mt_grpo_advantages(
                *_outcome(r, m), m, jnp.where(m.any(axis=1), g, -1), gamma=0.99, turn_weight=0.5
            ),
        ),
        (
            {"estimator": "gigpo", "step_weight": 0.7, "group_scale": "none", **GROUPS},
            lambda r, m, s, g, a: kernels.gigpo_advantages(s, r, m, g, a, gamma=0.99, step_weight=0.7),
        ),
        (
            {"estimator": "hgpo", "history_length": 1, "history_alpha": 2.0, **GROUPS},
            lambda r, m, s, g, a: kernels.hgpo_advantages(
                r, m, g, a, history_length=1, gamma=0.99, alpha=2.0, scale="std", scores=s
            ),
        ),
    ],
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else "",
)
def test_estimators_without_a_critic(changes, kernel, window):
    cfg = AlgorithmConfig(**changes)
    trajectories = rollout(window)
    rewards, mask, _, _ = by_hand(trajectories)
    scores, groups = np.where(mask, rewards, 0).sum(axis=1), of_group(trajectories)
    anchors = np.full(mask.shape, -1)
    for m, trajectory in enumerate(trajectories):
        anchors[m, : len(trajectory.turns)] = [ord(turn.observation) for turn in trajectory.turns]
    _, got = estimate(trajectories, cfg, np.zeros(mask.shape), np.zeros(SHAPE.trajectories))
    want = np.asarray(jax.jit(kernel)(rewards, mask, scores.astype(np.float32), groups, anchors))
    np.testing.assert_allclose(got.advantages, want, rtol=1e-4, atol=1e-5)
    assert np.abs(want).max() > 0.1 and not np.any(got.targets)


def _outcome(rewards, mask):
    last = mask & (jnp.cumsum(mask[:, ::-1], axis=1)[:, ::-1] == 1)
    return jnp.where(last, rewards, 0).sum(axis=1), jnp.where(last, 0, rewards)


def test_numbers_that_further_rollouts_bring():
    """ReMax's greedy scores and VinePPO's branch values; a trajectory that lacks one is left out."""
    trajectories = rollout()
    trajectories[1].turns[0].response_ids = trajectories[1].turns[0].response_ids[:0]  # a turn that no table has
    greedy = np.arange(COUNT, dtype=np.float32)
    branch = np.arange(COUNT * 4, dtype=np.float32).reshape(COUNT, 4)
    greedy[2], branch[3, 0] = np.nan, np.nan
    for estimator, extra, missing in (
        ("remax", {"greedy_scores": greedy}, 2),
        ("branches", {"branch_values": branch}, 3),
    ):
        cfg = AlgorithmConfig(estimator=estimator, whitening="none", gae_lambda=0.0, gamma=0.9)
        chosen = select(trajectories, SHAPE, cfg, **extra)
        assert chosen.members.tolist() == [m for m in range(COUNT) if m != missing]
        assert chosen.metrics["batch/filtered_trajectories"] == 1
        facts = chosen.facts
        if estimator == "branches":
            assert facts.branch_values[1, 0] == branch[1, 1]  # V of the first turn that counts
        else:
            np.testing.assert_array_equal(facts.greedy_scores[:COUNT], np.nan_to_num(greedy))
        with pytest.raises(ValueError, match=f"{cfg.needs}=None with estimator='{estimator}'"):
            select(trajectories, SHAPE, cfg)
    # By hand: one trajectory, rewards 1 and 2, V = 3 and 5.
    for estimator, extra, want in (
        ("remax", {"greedy_scores": np.float32([10.0])}, [1 + 0.9 * 2 - 10, 2 - 10]),
        ("branches", {"branch_values": np.float32([[3.0, 5.0]])}, [1 + 0.9 * 5 - 3, 2 - 5]),
    ):
        cfg = AlgorithmConfig(estimator=estimator, whitening="none", gae_lambda=0.0, gamma=0.9)
        shape = dataclasses.replace(SHAPE, trajectories=1, max_turns=2)
        table = dataclasses.replace(
            tables.empty_table(shape, cfg), rewards=np.float32([[1, 2]]), mask=np.ones((1, 2), bool)
        )
        facts = select([], shape, cfg, greedy_scores=(), branch_values=()).facts
        facts = dataclasses.replace(facts, **extra)
        got = jax.jit(functools.partial(advantages_of, cfg=cfg))(table, facts, jax.random.key(0))
        np.testing.assert_allclose(got.advantages, [want], rtol=1e-6)


def test_anchors_are_equal_or_similar_within_their_group():
    trajectories = rollout()
    texts = ["room one: P at 1", "room one: P at 2", "a very different text", "room one: P at 1"]
    for m, trajectory in enumerate(trajectories[:4]):
        trajectory.turns = trajectory.turns[:1]
        trajectory.turns[0].observation = texts[m]
        trajectory.group = 0 if m < 3 else 1
    exact = anchor_ids(trajectories[:4], SHAPE, AlgorithmConfig(estimator="gigpo", **GROUPS))
    assert exact[:4, 0].tolist() == [0, 1, 2, 0] and exact.max() == 2 and (exact[:, 1:] == -1).all()
    near = AlgorithmConfig(estimator="gigpo", anchors="similar", anchor_similarity=0.9, **GROUPS)
    assert anchor_ids(trajectories[:4], SHAPE, near)[:4, 0].tolist() == [0, 0, 1, 0]
    strict = dataclasses.replace(near, anchor_similarity=0.99)
    assert anchor_ids(trajectories[:4], SHAPE, strict)[:4, 0].tolist() == [0, 1, 2, 0]


def test_similar_texts_are_compared_with_the_first_of_their_cluster():
    """A chain of small steps does not join its ends."""
    trajectories = rollout()[:3]
    for trajectory, text in zip(trajectories, ["a" * 20, "a" * 18 + "bb", "a" * 16 + "bbbb"]):
        trajectory.group, trajectory.turns = 0, trajectory.turns[:1]
        trajectory.turns[0].observation = text
    cfg = AlgorithmConfig(estimator="gigpo", anchors="similar", anchor_similarity=0.85, **GROUPS)
    assert anchor_ids(trajectories, SHAPE, cfg)[:3, 0].tolist() == [0, 0, 1]
    trajectories[2].turns[0].observation = "a" * 10 + "b" * 10
    between = make_trajectories(8, count=1)[0]  # as near to the second anchor as to the first: it joins the first
    between.group, between.turns = 0, between.turns[:1]
    between.turns[0].observation = "a" * 15 + "b" * 5
    halfway = dataclasses.replace(cfg, anchor_similarity=0.75)
    assert anchor_ids([trajectories[0], trajectories[2], between], SHAPE, halfway)[:3, 0].tolist() == [0, 1, 0]


def test_filters_choose_whole_groups_and_overlong_trajectories_keep_their_score():
    trajectories = rollout()
    for trajectory, score in zip(trajectories, [0, 1, 2, 2, 0, 9]):  # spreads of the groups: 1, 0, 9
        trajectory.turns = trajectory.turns[:1]
        trajectory.turns[0].reward = float(score)
        trajectory.turns[0].info = {"success": score > 1}

    def chosen(**changes):
        out = select(trajectories, SHAPE, AlgorithmConfig(group_size=2, **changes))
        return out.members.tolist(), out.facts.group_ids[:COUNT].tolist(), out.metrics

    assert chosen()[:2] == ([0, 1, 2, 3, 4, 5], [0, 0, 1, 1, 2, 2])
    assert chosen(filter="spread")[:2] == ([0, 1, 4, 5], [0, 0, -1, -1, 2, 2])
    assert chosen(filter="spread", filter_on="success")[0] == [4, 5]
    assert chosen(filter="top_spread", filter_fraction=0.34)[0] == [4, 5]
    trajectories[4].turns[0].stop = StopReason.TURN_LIMIT
    members, groups, metrics = chosen(filter="spread", mask_overlong=True)
    assert (members, groups) == ([0, 1, 5], [0, 0, -1, -1, 2, 2])
    assert metrics == {
        "batch/trained_trajectories": 3.0, "batch/filtered_trajectories": 2.0, "batch/overlong_trajectories": 1.0,
    }  # fmt: skip

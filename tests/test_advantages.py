"""The rollout's table: what the rows say about trajectories, wherever they were packed."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from tests import kernel_oracle
from tests.learner_cases import make_trajectories
from turnppo_jax import kernels
from turnppo_jax.training import rollout_table as tables
from turnppo_jax.training.advantages import estimate as advantages_of
from turnppo_jax.training.algorithm import AlgorithmConfig
from turnppo_jax.training.batching import BatchShape, pack
from turnppo_jax.training.presets import algorithm_by_name
from turnppo_jax.training.selection import select

SHAPE = BatchShape(rows=12, tokens=32, turns=4, sampled=12, trajectories=7, max_turns=4, max_sampled=16)
# Sums of at most a dozen float32 numbers of size 1, and a division by a deviation of size 1.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def filled(trajectories, cfg, values, bootstrap, minibatches=2):
    """The table from packed minibatches whose critic says values[(trajectory, turn or token)]."""
    table = tables.empty_table(SHAPE, cfg)
    add = jax.jit(functools.partial(tables.add_minibatch, cfg=cfg))
    add_values = jax.jit(functools.partial(tables.add_values, cfg=cfg))
    for members in np.array_split(np.arange(len(trajectories)), minibatches):
        batch, _ = pack(trajectories, SHAPE, members=members, bootstrap=cfg.bootstrap_truncated)
        table = add(table, batch)
        lines, columns = (np.asarray(x) for x in tables.entry_index(batch, SHAPE.max_turns, cfg))
        said = np.where(lines >= 0, values[lines, columns], np.nan) / cfg.value_scale
        after = np.where(batch.trajectory_ids >= 0, bootstrap[batch.trajectory_ids], np.nan) / cfg.value_scale
        table = add_values(table, batch, said, np.where(batch.bootstrap_positions >= 0, after, 0.0))
    return table


def estimate(trajectories, cfg, values, bootstrap, key=0):
    table = filled(trajectories, cfg, values, bootstrap)
    facts = select(trajectories, SHAPE, cfg).facts
    return table, jax.jit(functools.partial(advantages_of, cfg=cfg))(table, facts, jax.random.key(key))


def by_hand(trajectories, cfg, values, bootstrap):
    """Advantages and targets of each trajectory by the float64 loop, unscaled and unwhitened."""
    width = values.shape[1]
    advantages, targets = np.zeros((2, SHAPE.trajectories, width))
    mask = np.zeros((SHAPE.trajectories, width), bool)
    for m, t in enumerate(trajectories):
        rewards = [one.reward for one in t.turns]
        if cfg.reward_placement == "final":
            rewards = [0.0] * (len(rewards) - 1) + [sum(rewards)]
        if cfg.advantage_level == "token":
            rewards = [x for one, r in zip(t.turns, rewards) for x in [0.0] * (len(one.response_ids) - 1) + [r]]
        n = len(rewards)
        mask[m, :n] = True
        after = bootstrap[m] if cfg.bootstrap_truncated and t.truncated else 0.0
        loop = functools.partial(kernel_oracle.gae, [rewards], mask=[[True] * n], bootstrap=[[after] * n])
        a, returns = loop(values=[values[m, :n]], gamma=cfg.gamma, gae_lambda=cfg.gae_lambda)
        if cfg.critic_target == "monte_carlo":
            _, returns = loop(values=[[0.0] * n], gamma=cfg.gamma, gae_lambda=1.0)
        advantages[m, :n], targets[m, :n] = a[0], returns[0]
    return advantages, targets, mask


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "critic_target": "lambda_return",
            "reward_placement": "final",
            "bootstrap_truncated": True,
            "value_scale": 5.0,
        },
        {"estimator": "token_gae", "ratio_level": "token", "gamma": 0.95, "bootstrap_truncated": True},
        {
            "estimator": "token_gae",
            "ratio_level": "turn",
            "critic_target": "lambda_return",
            "reward_placement": "final",
        },
    ],
)
def test_equals_the_loop_over_trajectories(changes, window):
    cfg = AlgorithmConfig(whitening="none", **changes)
    trajectories = make_trajectories(8, count=6, window=window)
    rng = np.random.default_rng(0)
    width = SHAPE.max_turns if cfg.advantage_level == "turn" else SHAPE.max_sampled
    values, bootstrap = rng.normal(size=(SHAPE.trajectories, width)), rng.normal(size=SHAPE.trajectories)
    table, got = estimate(trajectories, cfg, values, bootstrap)
    advantages, targets, mask = by_hand(trajectories, cfg, values, bootstrap)
    np.testing.assert_allclose(got.advantages, advantages, **TOLERANCE)
    np.testing.assert_allclose(got.targets, targets / cfg.value_scale, **TOLERANCE)
    np.testing.assert_allclose(np.where(mask, table.values, 0), np.where(mask, values, 0), **TOLERANCE)
    seen, wanted = targets[mask], (targets - values)[mask]
    explained = 1 - wanted.var(ddof=1) / seen.var(ddof=1)
    np.testing.assert_allclose(got.metrics["value/explained_variance"], explained, rtol=1e-3)
    # the lines of the log: V before the turn's first token, mean advantage of its tokens
    ends = np.cumsum([[len(one.response_ids) for one in t.turns] + [0] * (4 - len(t.turns)) for t in trajectories], 1)
    for m, t in enumerate(trajectories):
        for k, one in enumerate(t.turns):
            first = k if cfg.advantage_level == "turn" else ends[m, k] - len(one.response_ids)
            last = k + 1 if cfg.advantage_level == "turn" else ends[m, k]
            np.testing.assert_allclose(got.turn_values[m, k], values[m, first], **TOLERANCE)
            np.testing.assert_allclose(got.turn_advantages[m, k], advantages[m, first:last].mean(), **TOLERANCE)


@pytest.mark.parametrize("estimator", ["turn_gae", "token_gae"])
def test_whitening_is_over_the_whole_rollout_or_each_trajectory(estimator):
    """Fault 14: statistics over what exists, minibatches and rows notwithstanding."""
    trajectories = make_trajectories(4, count=6)
    plain = AlgorithmConfig(estimator=estimator, whitening="none", ratio_level="token")
    width = SHAPE.max_turns if plain.advantage_level == "turn" else SHAPE.max_sampled
    values, after = np.zeros((SHAPE.trajectories, width)), np.zeros(SHAPE.trajectories)
    raw, _, mask = by_hand(trajectories, plain, values, after)
    _, got = estimate(trajectories, dataclasses.replace(plain, whitening="rollout"), values, after)
    entries = raw[mask]
    want = np.where(mask, (raw - entries.mean()) / entries.std(ddof=1), 0)
    np.testing.assert_allclose(got.advantages, want, **TOLERANCE)
    _, got = estimate(trajectories, dataclasses.replace(plain, whitening="trajectory"), values, after)
    for m in range(6):
        line = raw[m, mask[m]]
        if len(line) > 1 and line.std() > 1e-6:
            line = (line - line.mean()) / line.std(ddof=1)
        np.testing.assert_allclose(np.asarray(got.advantages)[m, mask[m]], line, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("level", ["turn", "token"])
def test_group_advantages_go_to_every_entry_of_the_trajectory(level):
    """Fault 15: by trajectory, however many turns or rows it has."""
    cfg = algorithm_by_name("grpo", ratio_level="token", advantage_level=level, group_size=2)
    trajectories = make_trajectories(3, count=6, window=True)
    width = SHAPE.max_turns if level == "turn" else SHAPE.max_sampled
    _, got = estimate(trajectories, cfg, np.zeros((SHAPE.trajectories, width)), np.zeros(SHAPE.trajectories))
    want = kernels.group_advantages([t.total_reward for t in trajectories], [t.group for t in trajectories])
    for m, t in enumerate(trajectories):
        n = len(t.turns) if level == "turn" else sum(len(one.response_ids) for one in t.turns)
        np.testing.assert_allclose(got.advantages[m, :n], np.full(n, want[m]), rtol=1e-5)
        assert not np.any(got.advantages[m, n:])
    assert "value/explained_variance" not in got.metrics


def test_the_placebo_shuffles_what_exists():
    trajectories = make_trajectories(3, count=6)
    values, after = np.zeros((SHAPE.trajectories, SHAPE.max_turns)), np.zeros(SHAPE.trajectories)
    mask = by_hand(trajectories, AlgorithmConfig(), values, after)[2]
    _, true = estimate(trajectories, AlgorithmConfig(), values, after)
    shuffled = [
        estimate(trajectories, AlgorithmConfig(permute_advantages=True), values, after, key)[1] for key in (0, 1)
    ]
    for got in shuffled:
        np.testing.assert_array_equal(np.sort(got.advantages[mask]), np.sort(true.advantages[mask]))
        assert not np.any(got.advantages[~mask])
        assert np.mean(np.asarray(got.advantages == true.advantages)[mask]) < 0.7
        np.testing.assert_array_equal(got.targets, true.targets)
    assert not np.array_equal(shuffled[0].advantages, shuffled[1].advantages)


@pytest.mark.parametrize("level", ["turn", "token"])
def test_value_weights_are_those_of_the_minibatch(level):
    cfg = AlgorithmConfig(estimator=f"{level}_gae", ratio_level="token", value_normalizer="trajectories")
    trajectories = make_trajectories(8, count=6, window=True)
    width = SHAPE.max_turns if level == "turn" else SHAPE.max_sampled
    table = filled(trajectories, cfg, np.zeros((SHAPE.trajectories, width)), np.zeros(SHAPE.trajectories))
    want = np.zeros((SHAPE.trajectories, width))
    for m, t in enumerate(trajectories):  # minibatches of 3 trajectories each: 1 / (3 N_i), spread over n_k tokens
        each = [1 / (3 * len(t.turns))] * len(t.turns)
        if level == "token":
            each = [w / len(one.response_ids) for one, w in zip(t.turns, each) for _ in one.response_ids]
        want[m, : len(each)] = each
    np.testing.assert_allclose(table.value_weights, want, rtol=1e-6)

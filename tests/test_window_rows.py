"""Each turn in a row of its own, or all of a trajectory in one: what estimators and losses get is the same.

An estimator is a function of the rollout's table and of the facts, so both together cover all of them; what comes out
is compared with the kernels, in both packings, in test_estimators and test_advantages.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.learner_cases import make_trajectories, quick_compilation  # noqa: F401  (a fixture of this module)
from tests.test_advantages import SHAPE
from turnppo_jax import kernels
from turnppo_jax.kernels.weights import LEVELS, NORMALIZERS
from turnppo_jax.training import forward, mismatch, update
from turnppo_jax.training import rollout_table as tables
from turnppo_jax.training.algorithm import AlgorithmConfig
from turnppo_jax.training.batching import pack
from turnppo_jax.training.estimators import ESTIMATORS
from turnppo_jax.training.selection import select
from turnppo_jax.types import StopReason

COUNT = 6
FILTERS = (
    {}, {"filter": "spread"}, {"filter": "spread", "filter_on": "success"},
    {"filter": "top_spread", "filter_fraction": 0.34}, {"mask_overlong": True},
)  # fmt: skip


@functools.cache
def rollout(window):
    """Six trajectories of 1 to 3 turns, in groups of two, with observations, successes and one cut response."""
    trajectories = make_trajectories(8, count=COUNT, window=window)
    for m, t in enumerate(trajectories):
        for k, turn in enumerate(t.turns):
            turn.observation = "abc"[(m // 2 + k) % 3]
            turn.info = {"success": m in (1, 2, 3)}
    trajectories[0].turns[0].reward = trajectories[1].turns[0].reward = 0.0
    trajectories[4].turns[0].stop = StopReason.TURN_LIMIT
    return trajectories


def both():
    return rollout(False), rollout(True)


def batches(window, members=range(COUNT), bootstrap=False):
    return [pack(rollout(window), SHAPE, members=own, bootstrap=bootstrap)[0] for own in np.array_split(members, 2)]


def test_the_two_forms_differ():
    append, window = (pack(trajectories, SHAPE)[0] for trajectories in both())
    assert append.segment_ids.max(axis=1).sum() == COUNT < window.segment_ids.max(axis=1).sum()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_facts_and_who_trains_are_the_same_with_every_filter(name):
    given = {"greedy_scores": np.arange(6.0), "branch_values": np.arange(24.0).reshape(6, 4)}
    chosen = set()
    for filtered in FILTERS:
        cfg = AlgorithmConfig(estimator=name, group_size=2, **filtered)
        append, window = (select(trajectories, SHAPE, cfg, **given) for trajectories in both())
        np.testing.assert_array_equal(append.members, window.members)
        assert append.metrics == window.metrics
        jax.tree.map(np.testing.assert_array_equal, append.facts, window.facts)
        chosen.add(tuple(append.members))
    assert len(chosen) == 4  # two filters agree; there was something to choose


def table(window, cfg):
    """Filled from two minibatches by a critic that says values[trajectory, turn or token]."""
    rng, out = np.random.default_rng(0), tables.empty_table(SHAPE, cfg)
    values = rng.normal(size=out.values.shape).astype(np.float32)
    after = rng.normal(size=SHAPE.trajectories).astype(np.float32)
    for batch in batches(window, np.arange(1, COUNT), cfg.bootstraps):
        out = tables.add_minibatch(out, batch, cfg)
        behavior = forward.behavior_logprobs(batch)
        out = tables.add_kl(out, batch, behavior, np.zeros(behavior.shape, np.float32), cfg)
        if cfg.has_critic:
            lines, columns = (np.asarray(x) for x in tables.entry_index(batch, SHAPE.max_turns, cfg))
            ends = np.where(batch.bootstrap_positions >= 0, after[batch.trajectory_ids], 0.0)
            out = tables.add_values(out, batch, values[lines, columns], ends, cfg)
    return out


@pytest.mark.parametrize(
    ("name", "level"),
    [("turn_gae", "turn"), ("token_gae", "token"), ("sequence_critic", "turn"), ("group", "turn"), ("group", "token")],
)
def test_the_table_is_the_same(name, level):
    """Rewards, tokens, values, those behind the end, divergence, and the weights of the value loss."""
    options = {"estimator": name, "advantage_level": level, "group_size": 2, "bootstrap_truncated": True}
    for normalizer in NORMALIZERS if ESTIMATORS[name].critic else NORMALIZERS[:1]:
        cfg = AlgorithmConfig(value_normalizer=normalizer, **options)
        append, window = table(False, cfg), table(True, cfg)
        # Sums over a row's tokens, in another order where the rows are others.
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), append, window)
        assert np.any(append.mask) and np.any(append.kl) and np.any(append.bootstrap) == cfg.bootstraps
        assert np.any(append.values) == np.any(append.value_weights) == cfg.has_critic


def scattered(window, level, of_batch):
    """of_batch's numbers of each turn or token, by trajectory and turn or sampled token; NaN where there is none."""
    width = SHAPE.max_turns if level == "turn" else SHAPE.max_sampled
    out = np.full((SHAPE.trajectories, width), np.nan, np.float32)
    for batch in batches(window):
        where = (batch.trajectory_ids, batch.turn_index)
        if level == "token":
            where = tables.token_index(batch, SHAPE.max_turns)
        lines, columns = (np.asarray(x) for x in where)
        exists = lines >= 0
        out[lines[exists], columns[exists]] = np.asarray(of_batch(batch))[exists]
    return out


def assert_same(level, of_batch, different=2):
    append, window = (scattered(form, level, of_batch) for form in (False, True))
    np.testing.assert_allclose(append, window, rtol=1e-5)  # sums in another order
    assert len(np.unique(append[np.isfinite(append)])) >= different


@pytest.mark.parametrize("level", LEVELS)
def test_weights_of_the_losses_are_the_same(level):
    """Of every normalizer, of successes that are imitated, of what sampler and learner differ in."""
    turns_of = tables.compact_turn_ids
    for normalizer in NORMALIZERS:

        def weights(batch, normalizer=normalizer):
            return kernels.loss_weights(
                turns_of(batch),
                batch.turn_mask,
                level=level,
                normalizer=normalizer,
                trajectory_ids=batch.trajectory_ids,
            )

        assert_same(level, weights)
    success = np.array([t.success for t in rollout(False)] + [False])
    if level == "token":
        assert_same(level, lambda batch: update._imitation_weights(turns_of(batch), batch, success))
    for unit in ("token", "turn", "sequence"):
        cfg = AlgorithmConfig(
            estimator="group", group_size=2, ratio_level=level, importance_level=unit, importance_high=9.0
        )

        def importance(batch, cfg=cfg):
            behavior = forward.behavior_logprobs(batch)
            # Every token, turn and trajectory has a weight of its own.
            return mismatch.importance(
                behavior + 0.1 * (behavior + 3.5), behavior, turns_of(batch), batch.trajectory_ids, cfg
            )

        assert_same(level, importance, different=COUNT)


@pytest.mark.parametrize("name", ["turn_gae", "token_gae"])
def test_every_turn_and_token_reads_the_advantage_that_is_its_own(name):
    """Fault 16: what the update reads back from the table, by trajectory, turn and token."""
    cfg = AlgorithmConfig(estimator=name)
    numbers = np.arange(tables.empty_table(SHAPE, cfg).values.size, dtype=np.float32)
    numbers = jnp.asarray(numbers.reshape(SHAPE.trajectories, -1))
    for window in (False, True):
        read = scattered(
            window, cfg.advantage_level,
            lambda batch: tables.from_table(numbers, *tables.entry_index(batch, SHAPE.max_turns, cfg)),
        )  # fmt: skip
        there = np.isfinite(read)
        np.testing.assert_array_equal(read[there], numbers[there])
        for m, t in enumerate(rollout(window)):
            sizes = [len(turn.response_ids) for turn in t.turns]
            assert there[m].sum() == (len(sizes) if name == "turn_gae" else sum(sizes))

"""Steps whose filters leave nothing, or nothing with a token: no update, no NaN, numbers that say so; it goes on."""

import functools
import json
import math

import jax
import numpy as np
import pytest

from tests.learner_cases import (
    SHAPE,
    actor_params,
    critic_params,
    make_learner,
    make_trajectories,
    quick_compilation,  # noqa: F401  (a fixture of this module)
)
from turnppo_jax.training.advantages import estimate
from turnppo_jax.training.algorithm import AlgorithmConfig
from turnppo_jax.training.collapse import CollapseSettings, CollapseWatch
from turnppo_jax.training.estimators import ESTIMATORS
from turnppo_jax.training.metrics import make_writer
from turnppo_jax.training.rollout_table import empty_table
from turnppo_jax.training.selection import select
from turnppo_jax.training.trajectory_log import write_trajectories
from turnppo_jax.types import StopReason

SETTINGS = {"group_size": 2, "filter": "spread", "filter_on": "success"}


def filtered_out():
    """Every group fails as a whole."""
    return make_trajectories()


def cut():
    """Every response was cut for length."""
    trajectories = make_trajectories()
    for t in trajectories:
        t.turns[0].stop = StopReason.TURN_LIMIT
    return trajectories


def without_a_token():
    trajectories = make_trajectories()
    for t in trajectories:
        for turn in t.turns:
            turn.response_ids, turn.behavior_logprobs = turn.response_ids[:0], turn.behavior_logprobs[:0]
    return trajectories


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_of_nothing_says_nothing(name):
    """Fault 1: whatever is divided by a number of groups, members, turns or tokens."""
    cfg = AlgorithmConfig(estimator=name, mask_overlong=True, **SETTINGS)
    given = {"greedy_scores": np.arange(6.0), "branch_values": np.ones((6, 4))}
    program, empty = jax.jit(functools.partial(estimate, cfg=cfg)), empty_table(SHAPE, cfg)
    masked = cut()
    for t in masked[::2]:  # these groups pass the filter: the facts still hold their scores
        t.turns[-1].info = {"success": True}
    for trajectories, groups in ((filtered_out(), 0), (masked, 3)):
        chosen = select(trajectories, SHAPE, cfg, **given)
        assert len(chosen.members) == chosen.metrics["batch/trained_trajectories"] == 0
        assert len(set(chosen.facts.group_ids) - {-1}) == groups
        got = program(empty, chosen.facts, jax.random.key(0))
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(got)) and not np.any(got.advantages)


@pytest.mark.parametrize(
    ("changes", "rollout"),
    [
        (SETTINGS, filtered_out),
        ({"estimator": "token_gae", "mask_overlong": True, "share_backbone": True}, cut),
        ({"estimator": "sequence_critic", "value_loss_kind": "cross_entropy"}, without_a_token),
        (SETTINGS | {"estimator": "group", "kl_coef": 0.1, "kl_placement": "reward", "critic": None}, filtered_out),
    ],
    ids=lambda x: x.get("estimator", "turn_gae") if isinstance(x, dict) else x.__name__,
)
def test_a_step_without_anything_to_train_on(changes, rollout, tmp_path):
    learner, trajectories = make_learner(**changes), rollout()
    actor, critic = learner.init_states(actor_params(), critic_params())
    before = jax.device_get((actor, critic))
    options = {"ref_params": actor_params(5)} if learner.needs_reference else {}
    actor, critic, result = learner.step(actor, critic, trajectories, step=0, **options)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((actor, critic)), before)  # the very states, still there
    metrics = result.metrics
    assert all(math.isfinite(value) for value in metrics.values())
    for model in ("actor", "critic"):
        assert metrics.get(f"optim/steps_{model}") == (0.0 if model == "actor" or critic is not None else None)
    assert metrics["batch/rows"] == 0 and "policy/loss" not in metrics and "value/loss" not in metrics
    left = metrics["batch/filtered_trajectories"], metrics["batch/overlong_trajectories"]
    assert (*left, metrics["batch/empty_trajectories"]) in ((6, 0, 0), (0, 6, 0), (0, 0, 6))
    assert left[0] + left[1] + metrics["batch/trained_trajectories"] == 6
    # What a run does with it: the log, the writers, the alarms.
    write_trajectories(tmp_path, 1, trajectories, result.turn_values, result.turn_advantages, None)
    lines = (tmp_path / "trajectories" / "step_000001.jsonl").read_text().splitlines()
    turns = [turn for line in lines for turn in json.loads(line)["turns"]]
    assert len(lines) == 6 and all(turn["advantage"] is None for turn in turns)
    writer = make_writer(("jsonl", "console"), tmp_path, config={}, total_steps=1, first_step=None)
    writer.log(1, metrics)
    writer.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["batch/rows"] == 0
    watch = CollapseWatch(CollapseSettings(stop_on_collapse=True, baseline_steps=1, steps=3), "eval/x/success_rate")
    assert not any(any(watch.add(step, metrics).values()) for step in range(1, 9)) and watch.crash() is None

"""Process rewards: each term against numbers by hand or a plain loop, the weighted sum, and what a run makes of it."""

import dataclasses
import json

import numpy as np
import pytest

from envs.registry import make
from tests.tiny_config import get_config
from turnppo_jax import train
from turnppo_jax.command_line import UserError, finalise
from turnppo_jax.settings import run_settings
from turnppo_jax.training.learner import Learner
from turnppo_jax.training.reward_terms import TERMS, RewardSettings, apply_terms, turn_rewards, turn_terms
from turnppo_jax.types import StopReason, Trajectory, Turn


def make_turn(reward=0.0, ids=(1, 2, 3), observation="room", **info):
    return Turn(
        prompt_ids=np.arange(4, dtype=np.int32), response_ids=np.asarray(ids, np.int32),
        behavior_logprobs=np.zeros(len(ids), np.float32), reward=reward, stop=StopReason.EOS, policy_step=1,
        observation=observation, info=info,
    )  # fmt: skip


def episode(*turns, terminated=False, final_observation="room", **fields):
    return Trajectory(
        list(turns), terminated, not terminated, group=0, seed=3, episode=0, final_observation=final_observation,
        **fields,
    )  # fmt: skip


def term(name, trajectory, **settings):
    [values] = [turn_terms(trajectory, RewardSettings({name: 1.0}, **settings).resolved(100))[name]]
    return values.tolist()


def test_the_default_changes_no_bit():
    rng = np.random.default_rng(0)
    trajectories = [episode(*(make_turn(reward=float(rng.normal())) for _ in range(k))) for k in range(4)]
    rewarded = apply_terms(trajectories, RewardSettings())
    for before, after in zip(trajectories, rewarded.trajectories, strict=True):
        assert [turn.reward for turn in after.turns] == [turn.reward for turn in before.turns]
        assert dataclasses.replace(after, turns=[]) == dataclasses.replace(before, turns=[])
    rewards = [turn.reward for trajectory in trajectories for turn in trajectory.turns]
    assert rewarded.metrics == {"reward/environment_mean": np.mean(rewards), "reward/total_mean": np.mean(rewards)}


def test_a_turn_that_changes_nothing():
    turns = [make_turn(observation=text) for text in ("a", "a", "b", "c")]
    assert term("repeated_observation", episode(*turns, final_observation="c")) == [1, 0, 0, 1]
    assert term("repeated_observation", episode(*turns, final_observation="d")) == [1, 0, 0, 0]
    # The task has ended: that is a change, whatever is shown.
    assert term("repeated_observation", episode(*turns, terminated=True, final_observation="c")) == [1, 0, 0, 0]
    assert term("repeated_observation", episode(final_observation=None)) == []
    # Where the environment says it, its word counts.
    turns = [make_turn(observation="5 left", effective=False), make_turn(observation="4 left", effective=True)]
    assert term("repeated_observation", episode(*turns, final_observation="4 left")) == [1, 0]


def test_a_turn_that_changes_no_room_of_sokoban():
    env = make("sokoban", prompt="full", max_turns=9)
    env.reset(0)
    effective = []
    for text in ("?", *(f"<think></think><answer>{name}</answer>" for name in ("Up", "Up", "Up", "Up", "Up"))):
        before = env.room
        *_, info = env.step(text)
        effective.append(info["effective"])
        assert info["effective"] == (env.room != before)
    # Five times up ends at a wall of a 6x6 room.
    assert not effective[0] and not effective[-1] and any(effective)


def test_repeated_tokens_against_a_plain_loop():
    rng = np.random.default_rng(1)
    # "1 2 1 2 1": bigrams 12 21 12 21, two of four stood before.
    assert term("repeated_tokens", episode(make_turn(ids=(1, 2, 1, 2, 1))), repeated_ngram=2) == [0.5]
    assert term("repeated_tokens", episode(make_turn(ids=(7,) * 10)), repeated_ngram=4) == [1 - 1 / 7]
    assert term("repeated_tokens", episode(make_turn(ids=(7, 7, 7)), make_turn(ids=()))) == [0, 0]
    for n in (1, 2, 3):
        ids = rng.integers(0, 3, 30).tolist()
        repeated = sum(any(ids[i : i + n] == ids[j : j + n] for j in range(i)) for i in range(len(ids) - n + 1))
        expected = repeated / (len(ids) - n + 1)
        np.testing.assert_allclose(term("repeated_tokens", episode(make_turn(ids=ids)), repeated_ngram=n), [expected])


def test_the_soft_overlong_punishment_of_dapo():
    """Limit 20, buffer 4: nothing up to 16, then a quarter a token, -1 from 20 on."""
    turns = [make_turn(ids=range(n)) for n in (0, 15, 16, 17, 19, 20, 25)]
    values = term("overlong", episode(*turns), overlong_limit=20, overlong_buffer=4)
    assert values == [0, 0, 0, -0.25, -0.75, -1, -1]
    # By default the turn's own limit, and a fifth of it.
    assert RewardSettings().resolved(100).overlong_buffer == 20
    assert RewardSettings().resolved(3).overlong_buffer == 1
    assert term("overlong", episode(*(make_turn(ids=range(n)) for n in (80, 90, 100)))) == [0, -0.5, -1]


def test_what_the_environment_says_of_a_turn():
    turns = [make_turn(0.5, ids=range(5)), make_turn(-1.0, ids=(), invalid_action=True, success=True)]
    trajectory = episode(*turns)
    assert term("environment", trajectory) == [0.5, -1.0]
    assert term("invalid_action", trajectory) == [0, 1]
    assert term("response_tokens", trajectory) == [5, 0]
    assert term("success", trajectory) == [0, 1]
    assert term("success", episode(turns[1], turns[0])) == [0, 0] and term("success", episode()) == []
    said = episode(make_turn(reward_terms={"progress": 0.25, "tidy": 1}), make_turn())
    assert term("progress", said) == [0.25, 0]


def test_the_weighted_sum_is_trained_on_and_the_given_trajectories_stay():
    rng = np.random.default_rng(2)
    weights = {"environment": 0.5, "invalid_action": -0.2, "response_tokens": -0.01, "success": 0.0, "progress": 2.0}
    trajectories = [
        episode(
            *(
                make_turn(
                    float(rng.normal()), ids=range(rng.integers(0, 9)), invalid_action=bool(rng.integers(2)),
                    success=True, reward_terms={"progress": float(rng.normal())},
                )
                for _ in range(length)
            )
        )
        for length in (3, 0, 1, 5)
    ]  # fmt: skip
    before = [[turn.reward for turn in trajectory.turns] for trajectory in trajectories]
    settings = RewardSettings(weights)
    rewarded = apply_terms(trajectories, settings)
    totals = []
    for trajectory, after, terms in zip(trajectories, rewarded.trajectories, rewarded.terms, strict=True):
        for k, turn in enumerate(trajectory.turns):
            total = 0.5 * turn.reward - 0.2 * turn.info["invalid_action"] - 0.01 * len(turn.response_ids)
            total += 2.0 * turn.info["reward_terms"]["progress"]
            np.testing.assert_allclose(after.turns[k].reward, total, rtol=1e-12)
            assert terms[k]["total"] == after.turns[k].reward and terms[k]["environment"] == turn.reward
            assert terms[k]["success"] == float(k == len(trajectory.turns) - 1)  # logged, not trained on
            totals.append(total)
        np.testing.assert_array_equal(turn_rewards(trajectory, settings), [turn.reward for turn in after.turns])
        assert after.success == trajectory.success
    assert before == [[turn.reward for turn in trajectory.turns] for trajectory in trajectories]
    assert sorted(rewarded.metrics) == sorted([f"reward/{name}_mean" for name in (*weights, "total")])
    np.testing.assert_allclose(rewarded.metrics["reward/total_mean"], np.mean(totals), rtol=1e-12)
    assert apply_terms([], settings).metrics["reward/total_mean"] == 0.0


def test_unknown_terms_list_the_known_ones():
    trajectories = [episode(make_turn(reward_terms={"progress": 1.0}))]
    known = r"reward.terms.progres is unknown; known: environment, .*success; said by this environment: progress"
    with pytest.raises(ValueError, match=known):
        apply_terms(trajectories, RewardSettings({"environment": 1.0, "progres": 1.0}))
    with pytest.raises(ValueError, match="said by this environment: none"):
        apply_terms([episode(make_turn())], RewardSettings({"progress": 1.0}))
    apply_terms([episode()], RewardSettings({"progress": 1.0}))  # no turn: nothing to know it from


def test_a_name_that_only_the_environment_can_know_is_said_before_anything_is_played():
    assert RewardSettings(dict.fromkeys(TERMS, 1.0)).notes() == []
    near, far = RewardSettings({"environment": 1.0, "succes": 1.0, "progress": 0.5}).notes()
    assert near.startswith("reward.terms.succes is none of environment, ") and near.endswith("did you mean 'success'?")
    assert far.startswith("reward.terms.progress is none of") and far.endswith('says it in info["reward_terms"]')
    assert "\n" not in near + far


@pytest.mark.parametrize("said", [{"progress": float("nan")}, {"progress": "much"}, ["progress"]])
def test_what_is_no_number_is_refused(said):
    with pytest.raises(ValueError, match=r'info\["reward_terms"\]'):
        apply_terms([episode(make_turn(reward_terms=said))], RewardSettings({"progress": 1.0}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"terms": {"environment": float("inf")}}, "reward.terms.environment=inf; allowed: a finite number"),
        ({"terms": {"environment": True}}, "reward.terms.environment=True"),
        ({"terms": {"total": 1.0}}, "reward.terms.total is the sum"),
        ({"repeated_ngram": 0}, "reward.repeated_ngram=0; allowed: at least 1"),
        ({"overlong_limit": 7}, "reward.overlong_limit=7; allowed: at most rollout.max_turn_tokens=6"),
        ({"overlong_buffer": 7}, "reward.overlong_buffer=7; allowed: at most the limit, 6"),
        ({"weights": {}}, "unknown field config.reward.weights; known: overlong_buffer"),
    ],
)
def test_settings_are_refused_by_name(fields, message):
    config = get_config()
    config.reward = fields
    with pytest.raises((UserError, ValueError), match=message):
        run_settings(finalise(config))


def test_settings_of_a_run():
    config = get_config()
    del config.reward
    assert run_settings(finalise(config)).reward == RewardSettings(overlong_limit=6, overlong_buffer=1)
    config.reward = {"terms": {"environment": 1.0, "response_tokens": -0.125}}
    settings = run_settings(finalise(config)).reward
    assert settings.terms == {"environment": 1.0, "response_tokens": -0.125}
    assert json.loads(json.dumps(finalise(config)))["reward"]["terms"] == settings.terms
    assert "environment" in TERMS


class LearnerReached(Exception):
    pass


def test_a_misspelt_term_is_said_before_a_model_is_made(tmp_path, monkeypatch, capsys):
    said_before = []
    monkeypatch.setattr(train, "starting_policy", lambda *_: said_before.append(capsys.readouterr().out) or 1 / 0)
    config = get_config()
    config.reward.terms = {"environment": 1.0, "respons_tokens": -0.1}
    with pytest.raises(ZeroDivisionError):
        train.train(finalise(config), tmp_path)
    (line,) = [line for line in said_before[0].splitlines() if "reward.terms" in line]
    assert line.startswith("note: reward.terms.respons_tokens is none of") and "did you mean 'response_tokens'?" in line


def test_the_learner_of_a_run_gets_the_weighted_sum(tmp_path, monkeypatch):
    seen = []

    def step(self, actor, critic, trajectories, **kwargs):
        seen.extend(trajectories)
        raise LearnerReached

    monkeypatch.setattr(Learner, "step", step)
    config = get_config()
    config.env.num_workers = 0
    config.evaluation.update({"num_seeds": 1, "samples": 0})
    config.reward.terms = {"environment": 2.0, "response_tokens": -0.125}
    with pytest.raises(LearnerReached):
        train.train(finalise(config), tmp_path)
    turns = [turn for trajectory in seen for turn in trajectory.turns]
    assert len(turns) == 8 * 3
    # Echo pays 0, .2 or 1.
    paid = [(turn.reward + 0.125 * len(turn.response_ids)) / 2.0 for turn in turns]
    assert all(min(abs(reward - known) for known in (0, 0.2, 1)) < 1e-12 for reward in paid)
    assert len({len(turn.response_ids) for turn in turns}) > 1

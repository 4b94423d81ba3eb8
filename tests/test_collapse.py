"""Alarms fire on collapsing curves, not on healthy ones, and a run that collapses stops, says why and stays stopped."""

import json
import math

import numpy as np
import pytest

from tests.quick_runs import train
from tests.tiny_config import get_config
from turnppo_jax.command_line import finalise
from turnppo_jax.settings import run_settings
from turnppo_jax.training.collapse import CollapseSettings, CollapseWatch, alarm_metrics, collapse_alarms, watched
from turnppo_jax.training.episode_metrics import episode_metrics, repeated_share
from turnppo_jax.types import StopReason, Trajectory, Turn

SUCCESS = "eval/sokoban/success_rate"


def healthy(steps=60):
    """Rows shaped like those of a quickstart run: entropy falls by a third, gradients triple, success doubles."""
    rng = np.random.default_rng(0)
    rows = [evaluation(0, 0.36)]
    for step in range(1, steps + 1):
        along = step / steps
        row = {
            "step": step,
            "policy/entropy": 0.455 - 0.16 * along + rng.normal(0, 0.01),
            "optim/grad_norm": (0.4 + 0.6 * along) * math.exp(rng.normal(0, 0.3)),
            "episode/turn_tokens_mean": 8.0 + rng.normal(0, 0.5),
            "episode/cut_turn_rate": 0.001,
            "episode/repeated_tokens_share": 0.2 + rng.normal(0, 0.02),
            "episode/group_return_std_mean": 4.0 - 1.5 * along,
            "episode/success_rate": 0.31 + 0.25 * along,
            "optim/skipped_actor": 0.0,
            "optim/skipped_critic": 0.0,
        }
        rows.append(row | (evaluation(step, 0.36 + 0.2 * along) if step % 10 == 0 else {}))
    return rows


def evaluation(step, success, half=0.05):
    return {"step": step, SUCCESS: success, f"{SUCCESS}_low": success - half, f"{SUCCESS}_high": success + half}


def since(rows, settings=None):
    """{alarm: the step where it began} of those that are on after the last row."""
    history = [watched(row["step"], row, SUCCESS) for row in rows]
    alarms = collapse_alarms(history, settings or CollapseSettings(), SUCCESS)
    assert all(bool(alarm.why) == (alarm.since is not None) for alarm in alarms)
    return {alarm.name: alarm.since for alarm in alarms if alarm.since is not None}


def first_alarm(rows):
    """(step, alarms) where the first one came."""
    for length in range(1, len(rows) + 1):
        if on := since(rows[:length]):
            return rows[length - 1]["step"], on
    return None


def changed(name, values, start=31):
    rows = healthy()
    for row in rows:
        if row["step"] >= start:
            row[name] = values(row["step"], row.get(name))
    return rows


def test_a_healthy_run_has_no_alarm_at_any_step():
    assert first_alarm(healthy(200)) is None


@pytest.mark.parametrize(
    ("name", "metric", "values"),
    [
        # RAGEN: the spread inside groups is gone while the mean still stands.
        ("reward_std", "episode/group_return_std_mean", lambda step, old: 0.05),
        ("entropy_low", "policy/entropy", lambda step, old: 0.03),
        ("entropy_high", "policy/entropy", lambda step, old: 2.5),
        ("length_low", "episode/turn_tokens_mean", lambda step, old: 1.5),
        ("length_high", "episode/turn_tokens_mean", lambda step, old: 30.0),
        ("cut_turns", "episode/cut_turn_rate", lambda step, old: 0.7),
        ("repeated_tokens", "episode/repeated_tokens_share", lambda step, old: 0.8),
    ],
)
def test_each_sign_is_named_when_it_stood_for_ten_steps(name, metric, values):
    assert first_alarm(changed(metric, values)) == (40, {name: 31})
    assert since(changed(metric, values)) == {name: 31}, "it stays on, and began where it began"
    assert since(changed(metric, lambda step, old: old if step == 55 else values(step, old))) == {}, (
        "one step breaks it"
    )
    assert since(changed(metric, values)[:40]) == {}, "nine steps are none"


def test_the_thresholds_are_those_of_the_settings():
    # The start is the mean of the first ten steps, 10 here; RAGEN's 10 % of it are 1.
    rows = [{"step": step, "episode/group_return_std_mean": float(step)} for step in range(1, 19)]
    rows = [row | {"episode/group_return_std_mean": 11.0 if row["step"] % 2 else 9.0} for row in rows[:10]]
    for value, expected in ((0.999, {"reward_std": 11}), (1.001, {})):
        low = [{"step": step, "episode/group_return_std_mean": value} for step in range(11, 21)]
        assert since(rows + low) == expected
    quick = CollapseSettings(reward_std=0.5, steps=2, baseline_steps=10, gradient_spikes=1, non_finite_steps=1)
    later = [{"step": step, "episode/group_return_std_mean": 4.9} for step in (11, 12)]
    assert since(rows + later, quick) == {"reward_std": 11}
    assert since(rows + later) == {}


def test_convergence_is_no_collapse():
    rows = changed("episode/group_return_std_mean", lambda step, old: 0.0)
    rows = [row | {"policy/entropy": 0.01, "episode/success_rate": 0.97} if row["step"] >= 31 else row for row in rows]
    assert since(rows) == {}
    assert since([row | {"episode/success_rate": 0.5} for row in rows]) == {"reward_std": 31, "entropy_low": 31}


def test_gradients_are_measured_against_the_median_of_all_earlier_steps():
    # RAGEN's Sokoban run: from about 1 to 110, and it stays there.
    assert first_alarm(changed("optim/grad_norm", lambda step, old: 110.0)) == (33, {"gradient_spikes": 31})
    one = changed("optim/grad_norm", lambda step, old: 110.0 if step == 31 else old)
    assert first_alarm(one) is None, "a single spike is clipped and forgotten"
    apart = changed("optim/grad_norm", lambda step, old: 110.0 if step in (31, 36, 40) else old)
    assert first_alarm(apart) == (40, {"gradient_spikes": 31})
    # A slow rise to twelve times the start is no spike: the median follows.
    slow = changed("optim/grad_norm", lambda step, old: 0.4 + 4.4 * step / 60, start=1)
    assert first_alarm(slow) is None


def test_success_must_be_far_below_its_best_by_more_than_noise():
    def with_success(values, half=0.05):
        rows = [row for row in healthy() if SUCCESS not in row]
        return sorted(rows + [evaluation(step, value, half) for step, value in values.items()], key=lambda r: r["step"])

    fell = {0: 0.2, 10: 0.5, 20: 0.2, 30: 0.1}
    assert since(with_success(fell)) == {"success": 20}
    assert since(with_success({**fell, 40: 0.45})) == {}, "it came back"
    assert since(with_success({0: 0.2, 10: 0.5, 30: 0.1})) == {}, "one evaluation is none"
    assert since(with_success(fell, half=0.25)) == {}, "the intervals meet"
    assert since(with_success({0: 0.0, 10: 0.0, 20: 0.0})) == {}, "never learnt is not collapsed"


def test_steps_that_are_not_finite_are_counted_however_they_show():
    skipped = changed("optim/skipped_actor", lambda step, old: float(step in (31, 33, 38)))
    assert first_alarm(skipped) == (38, {"non_finite": 31})
    written = changed("policy/entropy", lambda step, old: math.inf if step in (31, 33, 38) else old)
    read_back = changed("policy/entropy", lambda step, old: None if step in (31, 33, 38) else old)
    assert first_alarm(written) == first_alarm(read_back) == (38, {"non_finite": 31})
    assert first_alarm(changed("optim/skipped_critic", lambda step, old: float(step in (31, 33)))) is None


def test_without_groups_there_is_no_alarm_of_groups_and_metrics_are_0_or_1():
    rows = [{name: value for name, value in row.items() if "group" not in name} for row in healthy(30)]
    watch = CollapseWatch(CollapseSettings(), SUCCESS)
    for row in rows[:-1]:
        metrics = watch.add(row["step"], row)
    assert "collapse/entropy_low" in metrics and "collapse/reward_std" not in metrics
    assert set(metrics.values()) == {0.0}
    alarms = collapse_alarms(changed("policy/entropy", lambda step, old: 3.0), CollapseSettings(), SUCCESS)
    on = {name: value for name, value in alarm_metrics(alarms).items() if value}
    assert on == {"collapse/entropy_high": 1.0, "collapse/entropy_high_since_step": 31.0}


def test_a_step_that_is_told_twice_counts_once():
    """As a step that crashed is evaluated and told again: what a continued run reads back has it once."""
    rows = changed("policy/entropy", lambda step, old: 3.0)
    late = rows[-1] | evaluation(rows[-1]["step"], 0.0)
    watch = CollapseWatch(CollapseSettings(stop_on_collapse=True), SUCCESS)
    for row in (*rows, late, late):
        metrics = watch.add(row["step"], row)
    read_back = CollapseWatch(CollapseSettings(stop_on_collapse=True), SUCCESS, [*rows[:-1], late])
    assert watch.crash() == read_back.crash() is not None
    assert metrics == alarm_metrics(collapse_alarms([*rows[:-1], late], CollapseSettings(), SUCCESS))


def test_the_curves_of_a_run_that_did_collapse():
    """The quickstart with sixty times its learning rate, as recorded: broken by step 5, within the first ten steps."""
    first_ten = {
        "policy/entropy": [0.45, 0.58, 4.8, 1.2, 0.039, 0.028, 0.018, 0.0097, 0.0062, 0.0051],
        "optim/grad_norm": [0.5, 0.43, 0.23, 0.13, 0.012, 0.019, 0.0039, 0.0053, 0.0048, 0.0025],
        "episode/turn_tokens_mean": [7.93, 4.16, 22.3, 23.0, 23.2, 23.2, 23.2, 23.2, 23.2, 23.2],
        "episode/cut_turn_rate": [0.0, 0.0, 0.92, 0.98, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        "episode/repeated_tokens_share": [0.0069, 0.029, 0.0008, 0.15, 0.94, 0.94, 0.95, 0.95, 0.95, 0.95],
    }
    rows = [evaluation(0, 0.39, half=0.11)]
    for step in range(1, 31):
        # Later steps are like the tenth.
        row = {name: values[min(step, 10) - 1] for name, values in first_ten.items()}
        rows.append({"step": step, **row} | (evaluation(step, 0.0, half=0.057) if step % 5 == 0 else {}))
    assert first_alarm(rows) == (10, {"success": 5}), "the second evaluation far below the first"
    assert since(rows) == {"success": 5, "entropy_low": 11, "repeated_tokens": 11}
    assert CollapseWatch(CollapseSettings(), SUCCESS, rows).crash() is None, "by default an alarm only sounds"
    crash = CollapseWatch(CollapseSettings(stop_on_collapse=True), SUCCESS, rows).crash()
    assert crash["step"] == 30 and crash["alarms"] == {"success": 5, "entropy_low": 11, "repeated_tokens": 11}
    assert "success: " in crash["why"] and "entropy_low: " in crash["why"]


def test_a_threshold_out_of_range_is_named():
    for field, value in (("steps", 0), ("reward_std", 1.5), ("gradient_spike", 0.5), ("non_finite_steps", 11)):
        with pytest.raises(ValueError, match=rf"collapse\.{field}={value}; allowed"):
            CollapseSettings(**{field: value})


def test_spread_inside_groups_and_repeated_tokens():
    def episode(group, reward, ids):
        response = np.asarray(ids, np.int32)
        turn = Turn(np.zeros(1, np.int32), response, np.zeros(len(ids), np.float32), reward, StopReason.EOS, 1)
        return Trajectory([turn], True, False, group=group, seed=0, episode=0)

    # Group 0: 1 and 3, sample std sqrt(2); group 1: equal; group 2: alone, without a spread.
    episodes = [episode(0, 1.0, [1]), episode(0, 3.0, [1]), episode(1, 2.0, [1]), episode(1, 2.0, [1])]
    metrics = episode_metrics([*episodes, episode(2, 50.0, [1])])
    assert metrics["episode/group_return_std_mean"] == pytest.approx(math.sqrt(2) / 2)
    assert "episode/group_return_std_mean" not in episode_metrics([episode(0, 1.0, [1]), episode(1, 2.0, [1])])
    # 5 5 5 5 5 5: three 4-grams, one kind; 1..6: three, all different; "7 8": none. The whole: 2 of 6.
    assert repeated_share([[5] * 6, [1, 2, 3, 4, 5, 6], [7, 8]]) == pytest.approx(2 / 6)
    assert repeated_share([[7, 8, 9]]) == repeated_share([]) == 0.0
    # The same 4-gram in two responses repeats nothing.
    assert repeated_share([[1, 2, 3, 4], [1, 2, 3, 4]]) == 0.0


def test_a_run_with_a_huge_learning_rate_stops_says_why_and_stays_stopped(tmp_path, tmp_path_factory):
    cache = tmp_path_factory.getbasetemp() / "cache"
    flags = ["--config.actor_optimizer.learning_rate=10", "--config.steps=50", "--config.evaluation.every=0"]
    # A tiny model at random begins near the largest entropy there is: it can only fall.
    quick = [("baseline_steps", 1), ("steps", 2), ("gradient_spikes", 2), ("non_finite_steps", 2), ("entropy_low", 0.5)]
    flags += [f"--config.collapse.{name}={value}" for name, value in quick]
    stopping = [*flags, "--config.collapse.stop_on_collapse=True"]
    done = train(cache, tmp_path, *stopping)
    assert done.returncode == 0, done.stderr
    crash = json.loads((tmp_path / "crashed.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert crash["step"] == rows[-1]["step"] < 50
    assert f"crashed at step {crash['step']}: {crash['why']}" in done.stdout
    for name, began in crash["alarms"].items():
        assert rows[-1][f"collapse/{name}"] == 1.0
        assert rows[-1][f"collapse/{name}_since_step"] == began
    assert (tmp_path / "checkpoints" / str(crash["step"])).is_dir()
    # What crashed is evaluated, though no evaluation was due: a comparison must not count an earlier, healthy policy.
    assert list(json.loads((tmp_path / "eval.json").read_text())) == ["0", str(crash["step"])]
    assert any(name.startswith("eval/") for name in rows[-1])
    # The same command says the same and trains no further, also where the record of the crash is lost.
    (tmp_path / "crashed.json").unlink()
    again = train(cache, tmp_path, *stopping)
    assert again.returncode == 0 and f"crashed at step {crash['step']}: {crash['why']}" in again.stdout, again.stderr
    assert json.loads((tmp_path / "crashed.json").read_text()) == crash
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == len(rows)
    # Without the flag it goes on.
    on = train(cache, tmp_path, *flags, f"--config.steps={crash['step'] + 1}")
    assert on.returncode == 0 and "crashed" not in on.stdout, on.stderr
    assert not (tmp_path / "crashed.json").exists()
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == crash["step"] + 1


def test_a_run_that_could_not_read_its_history_back_is_refused():
    config = get_config()
    config.collapse.stop_on_collapse = True
    run_settings(finalise(config))
    config.writers = ("console",)
    with pytest.raises(ValueError, match="needs 'jsonl' among them"):
        run_settings(finalise(config))

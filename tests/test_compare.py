"""Comparing runs: tables against intervals worked by hand, the rule for crashed runs, and mistakes by name."""

import json
import math
import pathlib

import numpy as np
import pytest
from PIL import Image

from turnppo_jax.command_line import UserError
from turnppo_jax.comparison import arms, markdown, picture, records, table

# ml_collections loads config files by a method that Python calls deprecated.
LOADED = pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")
METRIC = "eval/shop/success_rate"
CONFIG = {
    "seed": 0,
    "steps": 6,
    "env": {"id": "shop"},
    "evaluation": {"every": 2, "num_seeds": 2},
    "rollout": {"num_prompts": 4},
    "algorithm": {"group_size": 2},
}


def record(values, *, state="finished", why="", rooms=None, metric=METRIC, config=None, **more):
    """A run with these evaluations by step, and three seconds, 100 tokens and one optimizer step a step."""
    rows = []
    for step in range(max(values) + 1):
        row = {"step": step} | ({metric: values[step]} if step in values else {})
        if step:
            row |= {"time/step_s": 3.0, "rollout/sampled_tokens": 100.0, "optim/steps_actor": 1.0}
            row |= {"policy/clip_fraction_turn": 0.1 * step, "episode/num_dropped": 1.0 if step == 1 else 0.0}
        rows.append(row | {name: by_step[step] for name, by_step in more.items() if step in by_step})
    by_step = {step: {metric: list(row)} for step, row in (rooms or {}).items()}
    return records.RunRecord(pathlib.Path("runs/x"), config or CONFIG, tuple(rows), by_step, state, why)


def compared(by_arm, seeds, last=2, metric=METRIC, remarks=()):
    comparison = arms.Comparison(tuple(arms.Arm(name, "x.py") for name in by_arm), tuple(seeds), last=last)
    return table.compare(comparison, by_arm, metric, remarks)


def flat(values):
    """Evaluations after steps 2, 4 and 6 whose last two have this mean."""
    return {0: 0.1, 2: 0.0, 4: values - 0.1, 6: values + 0.1}


def test_means_and_paired_differences_equal_those_worked_by_hand():
    found = compared(
        {
            "a": {seed: record(flat(value)) for seed, value in ((0, 0.2), (1, 0.4), (2, 0.3))},
            "b": {seed: record(flat(value)) for seed, value in ((0, 0.5), (1, 0.6), (2, 0.7))},
        },
        (0, 1, 2),
    )
    a, b = found["arms"]
    # .2 .4 .3: mean .3, s = .1; t(.975, 2 degrees) = 4.302653: half width 4.302653 * .1 / sqrt(3) = .248414.
    assert a["value"] == pytest.approx({"mean": 0.3, "low": 0.3 - 0.248414, "high": 0.3 + 0.248414, "n": 3}, abs=1e-6)
    # Differences .3 .2 .4: the same spread about .3; unpaired it would be wider.
    difference = b["difference"]
    assert {name: difference[name] for name in ("mean", "low", "high", "n")} == pytest.approx(
        {"mean": 0.3, "low": 0.3 - 0.248414, "high": 0.3 + 0.248414, "n": 3}, abs=1e-6
    )
    assert difference["by_seed"] == pytest.approx({"0": 0.3, "1": 0.2, "2": 0.4})
    assert difference["over_rooms"] is None and "difference" not in a
    assert a["before_training"] == pytest.approx(0.1)
    text = markdown.to_markdown(found, "the command")
    assert "0.300 [0.052, 0.548]" in text and "+0.300 [+0.052, +0.548]" in text and "the command" in text


def test_one_seed_has_no_interval():
    found = compared({"a": {7: record(flat(0.2))}, "b": {7: record(flat(0.5))}}, (7,))
    assert found["arms"][0]["value"] == {"mean": pytest.approx(0.2), "low": None, "high": None, "n": 1}
    text = markdown.to_markdown(found, "")
    assert "one seed has none" in text and "+0.300" in text and "[" not in text.split("| arm")[1]


def test_costs_are_sums_over_steps():
    found = compared({"a": {0: record(flat(0.2))}}, (0,))
    run = found["arms"][0]["runs"]["0"]
    assert (run["trajectories"], run["sampled_tokens"], run["wall_time_s"]) == (6 * 8 - 1, 600.0, 18.0)
    assert run["optimizer_steps"] == 6 and run["clip_fraction_turn"] == pytest.approx(0.35)
    assert run["clip_fraction_token"] is None


def test_a_crashed_run_counts_with_what_it_last_had():
    # Due after 2, 4 and 6; it ended at step 4: the last two count as 4 and, carried forward, 4 again.
    ended = record({0: 0.1, 2: 0.6, 4: 0.2}, state="crashed", why="entropy_low: gone")
    assert ended.counted_steps(METRIC, 2) == [4, 4] and ended.value(METRIC, 2) == pytest.approx(0.2)
    assert ended.value(METRIC, 3) == pytest.approx((0.6 + 0.2 + 0.2) / 3)
    # Without an evaluation of its own after step 0 it counts as before training.
    assert record({0: 0.1}, state="crashed").value(METRIC, 2) == pytest.approx(0.1)
    found = compared({"a": {0: record(flat(0.5))}, "b": {0: ended}}, (0,))
    assert found["arms"][1]["difference"]["mean"] == pytest.approx(-0.3)
    text = markdown.to_markdown(found, "")
    assert "b, seed 0: crashed: entropy_low: gone (last step 4)" in text and "0.200 (crashed)" in text
    assert "carried forward" in found["rule"]


def test_an_unfinished_run_does_not_count_and_is_said():
    found = compared(
        {
            "a": {0: record(flat(0.2)), 1: record(flat(0.4))},
            "b": {0: record(flat(0.5)), 1: record({0: 0.1, 2: 0.9}, state="unfinished")},
        },
        (0, 1),
    )
    b = found["arms"][1]
    assert b["value"]["n"] == 1 and b["value"]["mean"] == pytest.approx(0.5)
    assert b["difference"]["n"] == 1 and b["difference"]["mean"] == pytest.approx(0.3)
    assert "**1 of 4 runs are not finished" in markdown.to_markdown(found, "") and b["runs"]["1"]["step"] == 2
    found["arms"][1]["runs"]["1"]["step"] = -1  # as of a run without metrics
    assert "0.500, (not begun)" in markdown.to_markdown(found, "")


def test_a_run_with_fewer_evaluations_counts_those_after_training():
    config = CONFIG | {"evaluation": {"every": 0, "num_seeds": 2}}
    run = record({0: 0.1, 6: 0.9}, config=config)
    assert run.counted_steps(METRIC, 3) == [6] and run.value(METRIC, 3) == pytest.approx(0.9)


def test_a_metric_of_every_step_uses_the_last_steps():
    run = record({step: float(step) for step in range(1, 7)}, metric="episode/return_mean")
    assert run.value("episode/return_mean", 3) == pytest.approx(5.0)


def test_intervals_over_rooms_pair_room_by_room():
    # Rooms .2 and .6 against .1 and .3, after both counted steps: differences .1 and .3 by room.
    here = record(flat(0.4), rooms={4: (0.1, 0.5), 6: (0.3, 0.7)})
    there = record(flat(0.2), rooms={4: (0.1, 0.3), 6: (0.1, 0.3)})
    found = compared({"a": {0: there}, "b": {0: here}}, (0,))
    rooms = found["arms"][1]["difference"]["over_rooms"]
    # Mean .2, s = .141421, t(.975, 1 degree) = 12.706205: half width 12.706205 * .1 = 1.270620.
    assert rooms == pytest.approx({"mean": 0.2, "low": 0.2 - 1.2706205, "high": 0.2 + 1.2706205, "n": 2}, abs=1e-6)
    other = record(
        flat(0.4), rooms={4: (0.1, 0.5), 6: (0.3, 0.7)}, config=CONFIG | {"env": {"id": "shop", "kwargs": {"n": 2}}}
    )
    found = compared({"a": {0: there}, "b": {0: other}}, (0,))
    assert found["arms"][1]["difference"]["over_rooms"] is None, "other rooms"


def test_alarms_are_listed_with_the_first_step():
    on = {3: 1.0, 4: 1.0}
    run = record(
        flat(0.2), **{"collapse/entropy_low": {1: 0.0} | on, "collapse/entropy_low_since_step": {3: 2.0, 4: 2.0}}
    )
    assert run.alarms() == {"entropy_low": 2}
    text = markdown.to_markdown(compared({"a": {0: run, 1: record(flat(0.3))}}, (0, 1)), "")
    assert "entropy_low (1/2, 2)" in text


def test_an_unknown_metric_lists_the_known_ones_once_every_arm_has_begun():
    begun, empty = record(flat(0.2)), records.RunRecord(pathlib.Path("x"), CONFIG, (), {}, "unfinished")
    with pytest.raises(UserError, match=rf"unknown metric 'value/loss'; known: .*{METRIC}, optim/steps_actor"):
        compared({"a": {0: begun}, "b": {0: begun}}, (0,), metric="value/loss")
    assert compared({"a": {0: begun}, "b": {0: empty}}, (0,), metric="value/loss")["arms"][0]["value"] is None


def test_a_nan_in_a_metrics_file_is_no_value():
    run = record({0: 0.1, 2: 0.5, 4: None, 6: 0.7})
    assert run.counted_steps(METRIC, 2) == [2, 6] and run.value(METRIC, 2) == pytest.approx(0.6)
    assert record({0: 0.1, 2: 0.5, 4: math.nan, 6: 0.7}).value(METRIC, 2) == pytest.approx(0.6)


def test_a_picture_that_is_not_finished_leaves_the_old_one(monkeypatch, tmp_path):
    def half_a_picture(_, target, **__):
        with open(target, "wb") if isinstance(target, pathlib.Path) else target as file:
            file.write(b"half")
            raise KeyboardInterrupt

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", half_a_picture)
    (tmp_path / "x.png").write_bytes(b"old")
    by_arm = {"a": {0: record(flat(0.3))}}
    with pytest.raises(KeyboardInterrupt):
        picture.draw(compared(by_arm, (0,)), by_arm, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes() == b"old"


def test_the_picture_shows_three_panels_with_every_curve(tmp_path):
    by_arm = {
        "grpo": {0: record(flat(0.2)), 1: record({0: 0.1, 2: 0.6}, state="crashed")},
        "turn_ppo": {0: record(flat(0.5)), 1: records.RunRecord(tmp_path, CONFIG, (), {}, "unfinished")},
    }
    picture.draw(compared(by_arm, (0, 1)), by_arm, tmp_path / "x.png")
    pixels = np.asarray(Image.open(tmp_path / "x.png").convert("RGB"), np.int32)
    assert pixels.shape[1] > 1200
    for panel in np.array_split(pixels, 3, axis=1):
        for colour in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):
            assert (np.abs(panel - colour).sum(axis=-1) < 12).sum() > 100, "the mean of an arm is missing"


@LOADED
def test_arms_are_read_from_flags_and_from_a_file(tmp_path):
    shared = arms.parse_changes(["steps=3", "config.evaluation.every=1"])
    arm = arms.parse_arm("fast = tests/tiny_config.py:algo=grpo ; actor_optimizer.learning_rate=0.1;steps=4", shared)
    assert (arm.name, arm.config_file) == ("fast", "tests/tiny_config.py:algo=grpo")
    config = arm.config(seed=5)
    assert (config["seed"], config["steps"], config["evaluation"]["every"]) == (5, 4, 1)
    assert config["actor_optimizer"]["learning_rate"] == 0.1 and config["algorithm"]["estimator"] == "group"
    spec = {
        "seeds": [3], "last": 2, "overrides": {"steps": 3, "evaluation.every": 1, "writers": ["jsonl", "console"]},
        "arms": {
            "fast": {"config": "tests/tiny_config.py:algo=grpo", "overrides": {"actor_optimizer.learning_rate": .1}},
            "slow": "tests/tiny_config.py",
        },
    }  # fmt: skip
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    comparison = arms.Comparison(**arms.read_spec(tmp_path / "spec.json"))
    assert (comparison.seeds, comparison.last, comparison.jobs) == ((3,), 2, 1)
    configs = {arm.name: arm.config(3) for arm in comparison.arms}
    assert configs["fast"]["writers"] == ["jsonl", "console"] and configs["slow"]["steps"] == 3
    assert arms.check_comparable(configs) == []
    differing = arms.differences(configs)
    assert differing["actor_optimizer.learning_rate"] == {"fast": 0.1, "slow": 3e-4}
    assert "algorithm.estimator" in differing and "steps" not in differing


@LOADED
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tests/tiny_config.py", "allowed: NAME=CONFIG.py"),
        ("a/b=tests/tiny_config.py", "arm 'a/b': a name has letters"),
        ("a=tests/no_config.py", "arm 'a': no config file 'tests/no_config.py'"),
        ("a=tests/tiny_config.py:algo=grp", "arm 'a': config argument 'algo=grp': allowed"),
        (
            "a=tests/tiny_config.py;algorithm.gama=1",
            "arm 'a': unknown config field config.algorithm.gama; did you mean",
        ),
        ("a=tests/tiny_config.py;algorithm.gamma=7.0", "arm 'a': gamma=7.0; allowed"),
        ("a=tests/tiny_config.py;steps", "override 'steps': allowed: field=value"),
        ("a=tests/tiny_config.py;seed=1", "arm 'a' sets seed; allowed: --seeds"),
    ],
)
def test_a_wrong_arm_is_named(text, message):
    with pytest.raises(UserError) as error:
        arms.parse_arm(text).config(0)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{", "is no JSON"),
        ('{"seeds": [1]}', "needs an object with the field 'arms'"),
        ('{"arms": {}, "sedes": []}', "unknown field 'sedes'; known: arms"),
        ('{"arms": {"a": {"conf": "x.py"}}}', "arm 'a': needs"),
        ('{"arms": {"a": "x.py"}, "seeds": ["0"]}', "needs whole numbers"),
        ('{"arms": {"a": "x.py"}, "last": "3"}', "last='3': needs int"),
    ],
)
def test_a_wrong_spec_is_named(tmp_path, spec, message):
    (tmp_path / "spec.json").write_text(spec)
    with pytest.raises(UserError) as error:
        arms.read_spec(tmp_path / "spec.json")
    assert message in str(error.value)


def test_what_cannot_be_compared_is_refused():
    one = arms.Arm("a", "x.py")
    for fields, message in (
        ({"arms": (), "seeds": (0,)}, "nothing to compare"),
        ({"arms": (one, one), "seeds": (0,)}, "arm 'a' is given twice"),
        ({"arms": (one,), "seeds": (0, 0)}, "seed 0 is given twice"),
        ({"arms": (one,), "seeds": (0,), "last": 0}, "last=0: needs at least 1"),
    ):
        with pytest.raises(UserError, match=message):
            arms.Comparison(**fields)


def test_other_evaluation_seeds_are_refused_and_lesser_differences_said():
    def changed(**evaluation):
        return CONFIG | {"evaluation": CONFIG["evaluation"] | evaluation}

    with pytest.raises(UserError, match=r"evaluation.num_seeds differs: arm 'a' has 2, arm 'b' has 3"):
        arms.check_comparable({"a": CONFIG, "b": changed(num_seeds=3)})
    with pytest.raises(UserError, match=r"arm 'b': writers=.*needs 'jsonl' among them"):
        arms.check_comparable({"a": CONFIG, "b": CONFIG | {"writers": ["console"]}})
    with pytest.raises(UserError, match=r"env.id differs"):
        arms.check_comparable({"a": CONFIG, "b": CONFIG | {"env": {"id": "other"}}})
    (remark,) = arms.check_comparable(
        {"a": CONFIG, "b": CONFIG | {"env": {"id": "shop", "kwargs": {"thinking": False}}}}
    )
    assert "the rooms may differ" in remark
    (remark,) = arms.check_comparable({"a": CONFIG, "b": CONFIG | {"steps": 9}})
    assert remark.startswith("b: steps=9, a has 6")


def test_a_directory_of_another_run_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    records.check_same_run(tmp_path, CONFIG)
    other = CONFIG | {"evaluation": {"every": 3, "num_seeds": 2}}
    with pytest.raises(UserError, match=r"another config: evaluation.every=2, asked for 3") as error:
        records.check_same_run(tmp_path, other)
    assert str(tmp_path) in str(error.value)
    (tmp_path / "config.json").rename(tmp_path / "notes.txt")
    with pytest.raises(UserError, match=r"is not empty and holds no config.json"):
        records.check_same_run(tmp_path, CONFIG)

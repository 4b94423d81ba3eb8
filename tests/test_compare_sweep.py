"""The sweep: what runs, what waits, what continues, what a crash costs; and one with the real training command."""

import json
import os
import pathlib
import signal
import subprocess
import time

import pytest

from tests import quick_runs, scripted_train
from turnppo_jax.command_line import UserError
from turnppo_jax.comparison import arms, comparing, records, sweep

# ml_collections loads config files by a method that Python calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")
SHARED = (("steps", "6"), ("evaluation.every", "1"))
METRIC = "eval/tests.delayed_env:DelayedEnv/success_rate"


@pytest.fixture
def scripted(monkeypatch):
    """Runs of milliseconds; their checkpoints are taken to be whole."""
    monkeypatch.setattr(sweep, "_TRAIN", "tests.scripted_train")
    monkeypatch.setattr(sweep, "_POLL_S", 0.01)
    monkeypatch.setattr(records, "usable_steps", lambda directory: [records_last(directory)])
    monkeypatch.chdir(quick_runs.ROOT)


def records_last(directory):
    return json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])["step"]


def arm(name, kind, *more):
    return arms.Arm(name, "tests/tiny_config.py", (*SHARED, ("actor_optimizer.learning_rate", str(kind)), *more))


def compare(out, *given, seeds=(0, 1), **fields):
    said = []
    found = comparing.run_and_compare(arms.Comparison(given, seeds, **fields), out, "command", said.append)
    return {arm["name"]: arm for arm in found["arms"]}, said


@pytest.mark.usefixtures("scripted")
def test_a_crashed_arm_does_not_end_the_sweep_and_its_row_says_why(tmp_path):
    found, said = compare(
        tmp_path,
        arm("good", 0.5),
        arm("crashes", scripted_train.CRASHES),
        arm("fails", scripted_train.FAILS),
        arm("killed", scripted_train.KILLED),
    )
    states = {name: [run["state"] for run in row["runs"].values()] for name, row in found.items()}
    assert states == {
        "good": ["finished"] * 2,
        "crashes": ["crashed"] * 2,
        "fails": ["crashed"] * 2,
        "killed": ["crashed"] * 2,
    }
    assert found["good"]["value"]["mean"] == 0.5 and found["good"]["value"]["n"] == 2
    # Its evaluations after steps 1 and 2 carried forward to step 6.
    assert found["crashes"]["runs"]["0"]["counted_steps"] == [2, 2, 2] and found["crashes"]["value"]["mean"] == 1.0
    assert found["crashes"]["runs"]["1"]["why"] == "entropy_low: gone"
    assert found["fails"]["runs"]["0"]["why"] == "exit status 1: MemoryError: out of memory"
    assert found["killed"]["runs"]["0"]["why"].startswith("ended by signal 9")
    assert found["fails"]["value"] is None, "it has no evaluation at all"
    text = (tmp_path / "comparison.md").read_text()
    assert "- killed, seed 1: crashed: ended by signal 9" in text and text in said
    assert json.loads((tmp_path / "comparison.json").read_text())["metric"] == METRIC
    assert (tmp_path / "comparison.png").stat().st_size > 10_000


@pytest.mark.usefixtures("scripted")
def test_finished_and_crashed_runs_are_not_run_again_and_failed_ones_are(tmp_path):
    given = (arm("good", 0.5), arm("crashes", scripted_train.CRASHES), arm("once", scripted_train.FAILS_ONCE))
    found, _ = compare(tmp_path, *given, seeds=(0,))
    assert found["once"]["runs"]["0"]["state"] == "crashed"
    before = {name: (tmp_path / name / "seed0" / "ran.json").read_text() for name in ("good", "crashes")}
    found, said = compare(tmp_path, *given, seeds=(0,))
    assert {name: (tmp_path / name / "seed0" / "ran.json").read_text() for name in before} == before
    assert found["once"]["runs"]["0"]["state"] == "finished" and found["once"]["value"]["mean"] == 5.0
    assert "seed 0  good: finished" in said and "seed 0  crashes: crashed: entropy_low: gone" in said


@pytest.mark.usefixtures("scripted")
def test_a_directory_of_another_config_is_refused_before_anything_runs(tmp_path):
    compare(tmp_path, arm("a", 0.5), seeds=(0,))
    with pytest.raises(
        UserError, match=r"a/seed0 holds a run of another config: actor_optimizer.learning_rate=0.5, asked"
    ):
        compare(tmp_path, arm("b", 0.5), arm("a", 0.6), seeds=(0,))
    assert not (tmp_path / "b").exists()


@pytest.mark.usefixtures("scripted")
def test_the_metric_is_refused_early_where_no_run_could_have_it(tmp_path):
    with pytest.raises(UserError, match=r"evaluated metrics of these arms begin with 'eval/tests.delayed"):
        compare(tmp_path, arm("a", 0.5), metric="eval/sokoban/success_rate")
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match=f"unknown metric 'policy/los'; known: {METRIC}"):
        compare(tmp_path, arm("a", 0.5), metric="policy/los")


@pytest.mark.usefixtures("scripted")
def test_one_warm_start_a_seed_is_made_once_also_with_several_jobs(tmp_path):
    warm = ("sft.steps", "5")
    given = (arm("a", 0.5, warm), arm("b", 0.6, warm), arm("c", 0.7, warm, ("sft.learning_rate", "0.1")))
    _, said = compare(tmp_path, *given, jobs=6)
    makers = {
        (name, seed): (tmp_path / name / f"seed{seed}" / "start" / "weights").read_text()
        for name in "abc"
        for seed in (0, 1)
    }
    assert makers == {(name, seed): f"made by {'a' if name in 'ab' else 'c'}" for name in "abc" for seed in (0, 1)}
    assert "seed 0  one warm start for a, b" in said
    assert "seed 1  c has a warm start of its own (other model, env or sft section)" in said

    def ran(name, seed):
        return json.loads((tmp_path / name / f"seed{seed}" / "ran.json").read_text())

    assert ran("b", 0)[0] > ran("a", 0)[0] + 0.4, "b waited for the warm start that a made"
    assert ran("a", 1)[0] < ran("a", 0)[1] and ran("c", 0)[0] < ran("a", 0)[1], "the others did not wait"


@pytest.mark.usefixtures("scripted")
def test_jobs_bound_how_many_run_at_once(tmp_path):
    warm = ("sft.steps", "5")  # half a second each
    given = [arm(f"a{index}", 0.5, warm, ("sft.rows", str(index + 2))) for index in range(4)]
    compare(tmp_path, *given, seeds=(0,), jobs=2)
    times = sorted(json.loads(path.read_text()) for path in tmp_path.glob("*/seed0/ran.json"))
    running = [sum(began <= at < ended for began, ended in times) for at, _ in times]
    assert max(running) == 2


def test_a_stopped_sweep_lets_its_runs_save_and_continues_them(tmp_path):
    code = (
        "import sys, pathlib\n"
        "from turnppo_jax.comparison import arms, comparing, sweep\n"
        "sweep._TRAIN = 'tests.scripted_train'\n"
        f"arm = arms.Arm('waits', 'tests/tiny_config.py', {(*SHARED, ('actor_optimizer.learning_rate', '4.0'))!r})\n"
        "comparing.run_and_compare(arms.Comparison((arm,), (0,)), pathlib.Path(sys.argv[1]), '')\n"
    )
    command = [*quick_runs.command("x")[:1], "-c", code, str(tmp_path)]
    with subprocess.Popen(command, cwd=quick_runs.ROOT, stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "waits" / "seed0" / "waits").exists() and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143
    run = tmp_path / "waits" / "seed0"
    assert "saved" in (run / "train.log").read_text()
    assert not (run / "failed.json").exists(), "it was told to stop: no crash"


def test_the_real_command_interrupted_continues_and_shares_warm_starts(tmp_path, tmp_path_factory, monkeypatch):
    for name, value in quick_runs.settings(tmp_path_factory.getbasetemp() / "cache").items():
        monkeypatch.setenv(name, value)  # of the runs; this process has read its own long ago
    monkeypatch.chdir(quick_runs.ROOT)
    lines = [
        {"messages": [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word}]}
        for word in ("up", "down", "left", "right")
    ]
    demonstrations = tmp_path / "demonstrations.jsonl"
    demonstrations.write_text("".join(json.dumps(line) + "\n" for line in lines))
    overrides = quick_runs.SMALL["overrides"] | {
        "steps": 3, "evaluation.every": 1, "evaluation.greedy": False, "sft.steps": 2, "sft.path": str(demonstrations),
        "sft.rows": 2, "sft.row_tokens": 64, "sft.heldout": 1,
    }  # fmt: skip
    arm = {"config": quick_runs.SMALL["config"], "overrides": {"actor_optimizer.learning_rate": 0.01}}
    spec = {
        "overrides": overrides,
        "arms": {"slow": quick_runs.SMALL["config"], "fast": arm},
        "seeds": [0, 1],
        "last": 2,
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    out = tmp_path / "out"
    metric = "eval/tests.delayed_env:DelayedEnv/return_mean"

    # Stopped in the middle of the first run.
    flags = (f"--spec={tmp_path}/spec.json", f"--out={out}", f"--metric={metric}")
    with subprocess.Popen(
        quick_runs.command("turnppo_jax.compare", *flags), stdout=subprocess.PIPE, text=True
    ) as process:
        metrics = out / "slow" / "seed0" / "metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") >= 2):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143, process.stdout.read()
    stopped = metrics.read_text().count("\n")
    assert stopped < 4, "it had ended before: the test shows nothing"

    comparison = arms.Comparison(**arms.read_spec(tmp_path / "spec.json") | {"metric": metric})
    said = []
    comparing.run_and_compare(comparison, out, "", said.append)
    assert f"seed 0  slow: continues in {out}/slow/seed0" in said
    assert f"continuing {out}/slow/seed0 after step {stopped - 1}" in (out / "slow" / "seed0" / "train.log").read_text()
    found = json.loads((out / "comparison.json").read_text())
    values = {arm["name"]: [run["value"] for run in arm["runs"].values()] for arm in found["arms"]}
    for name, by_seed in values.items():
        for seed, value in enumerate(by_seed):
            known = json.loads((out / name / f"seed{seed}" / "eval.json").read_text())
            last = [known[step][found["metric"]] for step in ("2", "3")]
            assert value == pytest.approx(sum(last) / 2), "the mean of the last two evaluations"
    difference = found["arms"][1]["difference"]
    assert difference["mean"] == pytest.approx(sum(values["fast"]) / 2 - sum(values["slow"]) / 2)
    assert difference["n"] == 2 and difference["over_rooms"]["n"] == 4
    # One warm start a seed, another for another seed, and the same policy before training.
    starts = {
        (name, seed): _bytes_of(out / name / f"seed{seed}" / "start") for name in ("slow", "fast") for seed in (0, 1)
    }
    assert starts["slow", 0] == starts["fast", 0] and starts["slow", 1] == starts["fast", 1]
    assert starts["slow", 0] != starts["slow", 1]
    before = {arm["name"]: arm["before_training"] for arm in found["arms"]}
    assert before["slow"] == before["fast"]
    assert found["settings_that_differ"] == {"actor_optimizer.learning_rate": {"slow": 0.0003, "fast": 0.01}}

    # Nothing is left to run; the rooms of a run are what its evaluations say.
    logs = {path: path.read_bytes() for path in out.glob("*/*/train.log")}
    said = []
    assert comparing.run_and_compare(comparison, out, "", said.append) == found
    assert said[2:6] == [f"seed {seed}  {name}: finished" for seed in (0, 1) for name in ("slow", "fast")]
    assert {path: path.read_bytes() for path in out.glob("*/*/train.log")} == logs
    rooms = [json.loads(line) for line in (out / "slow" / "seed0" / "eval_rooms.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rooms] == [0, 1, 2, 3]
    known = json.loads((out / "slow" / "seed0" / "eval.json").read_text())
    for row in rooms:
        assert sum(row[found["metric"]]) / 4 == pytest.approx(known[str(row["step"])][found["metric"]])


def _bytes_of(directory: pathlib.Path) -> dict[str, bytes]:
    assert os.path.isdir(directory)
    return {path.name: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}

"""Whole runs of the command: killed and continued, other workers, further rollouts, mistakes in the call."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from turnppo_jax.training.checkpoint_reading import usable_steps

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONFIG = "--config=tests/tiny_config.py"
# What a run may differ in without having computed anything else.
MACHINE = ("time/", "host/", "compile/", "sampler/tokens_per_s")


def run(*arguments, module="turnppo_jax.train", **options):
    command = [sys.executable, "-m", module, *map(str, arguments)]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, **options)


def rows(workdir):
    with open(workdir / "metrics.jsonl", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    return [{name: value for name, value in line.items() if not name.startswith(MACHINE)} for line in lines]


def trajectory_files(workdir):
    return {path.name: path.read_bytes() for path in sorted((workdir / "trajectories").iterdir())}


def saved_state(workdir, model):
    """Every array of the last checkpoint of a model by its path: parameters, moments, counters."""
    tree = ocp.StandardCheckpointer().restore(workdir / "checkpoints" / str(usable_steps(workdir)[-1]) / model)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    assert len(leaves) > 30
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """One uninterrupted run of 6 steps."""
    workdir = tmp_path_factory.mktemp("straight")
    done = run(CONFIG, f"--workdir={workdir}")
    assert done.returncode == 0, done.stderr
    return workdir


def test_a_run_leaves_what_the_readme_says(straight):
    for name in ("config.json", "metrics.jsonl", "eval.json", "checkpoints", "trajectories"):
        assert (straight / name).exists(), name
    lines = rows(straight)
    assert [line["step"] for line in lines] == list(range(7))
    name = "eval/tests.delayed_env:DelayedEnv/success_rate"
    assert [line["step"] for line in lines if name in line] == [0, 3, 6]
    assert set(lines[0]) == set(lines[0]) & {n for n in lines[0] if n == "step" or n.startswith("eval/")}
    for line in lines[1:]:
        assert line["sampler/logprob_gap_max"] < 1e-4
        assert line["policy/turn_log_ratio_std_first_minibatch"] < 1e-4
        assert line["optim/skipped_actor"] == line["optim/skipped_critic"] == 0
        assert line["reward/total_mean"] == line["reward/environment_mean"]
    for text in b"".join(trajectory_files(straight).values()).decode().splitlines():
        for turn in json.loads(text)["turns"]:
            terms = {"environment": turn["reward"], "response_tokens": turn["num_tokens"], "total": turn["reward"]}
            assert turn["reward_terms"] == terms


def test_compile_counts_stay_after_the_second_step(straight):
    with open(straight / "metrics.jsonl", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file][1:]
    for name in ("compile/learner", "compile/sampler"):
        counts = [line[name] for line in lines]
        assert len(set(counts[1:])) == 1, (name, counts)
    tokens = [line["batch/tokens"] for line in lines]
    assert len(set(tokens)) > 1, "the lengths did not vary: the test shows nothing"


def test_killed_in_rollout_update_and_save_and_continued_gives_the_same_bits(straight, tmp_path):
    flags = (CONFIG, f"--workdir={tmp_path}")
    for point in ("rollout:1", "update:4", "save:4"):
        killed = run(point, *flags, module="tests.killed_run")
        assert killed.returncode == -signal.SIGKILL, (point, killed.returncode, killed.stderr)
    done = run(*flags)
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path) == rows(straight)
    assert trajectory_files(tmp_path) == trajectory_files(straight)
    for model in ("actor", "critic"):
        continued, uninterrupted = saved_state(tmp_path, model), saved_state(straight, model)
        assert continued.keys() == uninterrupted.keys()
        for path, values in uninterrupted.items():
            np.testing.assert_array_equal(continued[path], values, err_msg=f"{model} {path}")


@pytest.mark.parametrize(
    "flags",
    [
        ("--config.env.num_workers=1",),
        ("--config.env.num_workers=4", "--config.sampler.decode_chunk=1"),
        ("--config.env.num_workers=0", "--config.sampler.decode_chunk=16"),
    ],
    ids=["1 worker", "4 workers, chunk 1", "in process, chunk 16"],
)
def test_workers_chunks_and_delays_change_no_trajectory(straight, tmp_path, flags):
    done = run(CONFIG, f"--workdir={tmp_path}", "--config.steps=2", "--config.evaluation.every=0", *flags)
    assert done.returncode == 0, done.stderr
    expected = trajectory_files(straight)
    for name, content in trajectory_files(tmp_path).items():
        assert content == expected[name]


def test_sigterm_keeps_the_last_finished_step_and_the_command_continues(tmp_path):
    command = [sys.executable, "-m", "turnppo_jax.train", CONFIG, f"--workdir={tmp_path}", "--config.steps=100000"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    metrics = tmp_path / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") >= 4):
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    finished = [line["step"] for line in rows(tmp_path)][-1]
    assert f"saved: step {finished}" in output
    done = run(CONFIG, f"--workdir={tmp_path}", f"--config.steps={finished + 1}")
    assert done.returncode == 0, done.stderr
    assert f"continuing {tmp_path} after step {finished}" in done.stdout


def test_a_continued_run_holds_its_states_once(straight, tmp_path):
    workdir = tmp_path / "copy"
    shutil.copytree(straight, workdir)
    code = (
        "import jax, pathlib, sys\n"
        "from tests.tiny_config import get_config\n"
        "from turnppo_jax import command_line, train\n"
        "from turnppo_jax.training.checkpoint import Checkpoints\n"
        "restore = Checkpoints.restore_latest\n"
        "def told(self, target, **kwargs):\n"
        "    held = sum(x.nbytes for x in jax.live_arrays())\n"
        "    print('held', held, 'of', sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(target)))\n"
        "    return restore(self, target, **kwargs)\n"
        "Checkpoints.restore_latest = told\n"
        "train.train(command_line.finalise(get_config()), pathlib.Path(sys.argv[1]))\n"
    )
    command = [sys.executable, "-c", code, str(workdir)]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    _, held, _, whole = next(line for line in done.stdout.splitlines() if line.startswith("held ")).split()
    assert int(held) < 0.1 * int(whole)


def test_sigterm_ends_a_warm_start_at_once(tmp_path):
    command = [sys.executable, "-m", "turnppo_jax.train", CONFIG, f"--workdir={tmp_path}", "--config.env.id=sokoban"]
    command += ["--config.sft.steps=1000000", "--config.sft.row_tokens=1024", "--config.sft.rows=2"]
    command += [
        "--config.sft.num_demonstrations=40",
        "--config.sft.heldout=8",
        "--config.sft.evaluate_every=1",
        "--config.model.name=tiny-qwen3-narrow",
    ]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stdout:
                if line.startswith("sft step     2"):
                    process.terminate()
                    break
            assert process.wait(30) == -signal.SIGTERM
        finally:
            process.kill()
    assert not (tmp_path / "start").exists()


def test_branches_filters_and_reward_terms_are_continued_bit_for_bit(tmp_path):
    """What a step asks for beside its rollout is a function of (seed, step), too."""
    flags = (
        f"{CONFIG}:algo=vine_ppo", "--config.steps=3", "--config.algorithm.group_size=2",
        "--config.rollout.num_prompts=4", "--config.algorithm.filter=top_spread",
        "--config.algorithm.filter_fraction=0.5", "--config.reward.terms.response_tokens=0.01",
    )  # fmt: skip
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    done = run(*flags, f"--workdir={straight}")
    assert done.returncode == 0, done.stderr
    killed = run("update:2", *flags, f"--workdir={broken}", module="tests.killed_run")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = run(*flags, f"--workdir={broken}")
    assert done.returncode == 0, done.stderr
    assert rows(broken) == rows(straight)
    assert trajectory_files(broken) == trajectory_files(straight)
    continued = saved_state(broken, "actor")
    for path, leaf in saved_state(straight, "actor").items():
        np.testing.assert_array_equal(continued[path], leaf, err_msg=path)
    last = rows(straight)[-1]
    assert last["batch/trained_trajectories"] == 4 and last["rollout/branch_episodes"] > 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config.rollout.temperature=0"], "rollout.temperature=0"),
        (["--config.rollout.num_promts=3"], "did you mean num_prompts?"),
        (["--config.model.name=no/such/model"], "no/such/model"),
        (["--config.env.id=sokobann"], "unknown environment id 'sokobann'; known:"),
        (["--config.algorithm.num_minibatches=99"], "num_minibatches=99 exceeds the 8 episodes of a step"),
        (["--config.rows.tokens=8"], "rows.tokens=8 is less than sampler.context_length=64"),
        (["--config.algorithm.estimator=gea"], "estimator='gea'; allowed:"),
    ],
)
def test_a_mistake_ends_in_one_line_that_names_it(tmp_path, flags, message):
    done = run(CONFIG, f"--workdir={tmp_path}", *flags)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().count("\n") == 0, done.stderr


def test_a_wrong_argument_of_the_environment_is_named(tmp_path):
    (tmp_path / "wrong.py").write_text(
        "from tests.tiny_config import get_config as base\n\n\n"
        "def get_config():\n    config = base()\n    config.env.kwargs = {'nun_turns': 3}\n    return config\n"
    )
    done = run(f"--config={tmp_path}/wrong.py", f"--workdir={tmp_path}/run")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert "has no argument 'nun_turns'; known: longest_s, num_turns" in done.stderr


def test_without_a_workdir_the_command_says_so():
    done = run(CONFIG)
    assert (done.returncode, done.stderr.strip()) == (2, "error: --workdir=DIR is missing")


def test_evaluate_repeats_the_numbers_of_the_run_from_its_checkpoint(straight, tmp_path):
    done = run(CONFIG, f"--workdir={straight}", f"--output={tmp_path}/numbers.json", module="turnppo_jax.evaluate")
    assert done.returncode == 0, done.stderr
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers == {name: value for name, value in rows(straight)[-1].items() if name.startswith("eval/")}
    missing = run(CONFIG, f"--workdir={straight}", "--step=5", module="turnppo_jax.evaluate")
    assert missing.returncode == 2
    assert "no checkpoint of step 5" in missing.stderr

"""Two hosts with two devices each, as processes on this machine, against one process with four devices."""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.host_config import get_config
from turnppo_jax.parallel.hosts import share_of
from turnppo_jax.rollout.collector import training_episodes
from turnppo_jax.training.json_lines import read_jsonl

ROOT = pathlib.Path(__file__).resolve().parents[1]
LIMIT_S = 600.0  # far above what a run takes on a busy core: a deadlock ends here
EPISODES = 7  # the second host's share is 3..6
STEPS = 5
FAILING, NAN = 3, 4  # steps with a broken environment and with a NaN on the second host
# What two runs may differ in without having computed anything else.
MACHINE = ("time/", "host/", "compile/", "sampler/tokens_per_s")


class Group:
    """Processes that run phases together; `wait` gives their logs, and ends them all where one takes too long."""

    def __init__(self, directory, phases, num_processes, devices):
        self.directory = directory
        directory.mkdir()
        (directory / "phases.json").write_text(json.dumps(phases))
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            # These programs run a few times: most of the compiler's work on them would be wasted.
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_COMPILATION_CACHE_DIR": str(directory.parent / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        }
        self._processes = []
        for index in range(num_processes):
            command = [sys.executable, "-m", "tests.host_process", directory / "phases.json", directory]
            if num_processes > 1:
                command += [port, num_processes, index]
            with open(directory / f"log.{index}", "w") as log:
                self._processes.append(
                    subprocess.Popen(
                        list(map(str, command)), cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
                    )
                )

    def wait(self, codes=None):
        deadline = time.monotonic() + LIMIT_S
        try:
            for process in self._processes:
                process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pytest.fail(f"no end after {LIMIT_S:g} s\n{self.logs()}")
        finally:
            for process in self._processes:
                process.kill()
        codes = codes or [0] * len(self._processes)
        assert [process.returncode for process in self._processes] == codes, self.logs()
        return self

    def logs(self):
        paths = sorted(self.directory.glob("log.*"))
        return "\n".join(f"--- {path.name}\n{path.read_text()[-6000:]}" for path in paths)

    def ended(self, phase):
        return [json.loads(path.read_text())["ended"] for path in sorted(self.directory.glob(f"{phase}.*.json"))]

    def metrics(self, phase):
        return [json.loads(path.read_text())["metrics"] for path in sorted(self.directory.glob(f"{phase}.*.json"))]

    def arrays(self, phase, index=0):
        with np.load(self.directory / f"{phase}.{index}.npz") as file:
            return {name: file[name] for name in file.files}


def run(directory, phases, num_processes=2, devices=2):
    return Group(directory, phases, num_processes, devices).wait()


# A mesh on which both hosts own the same rows; an algorithm with few programs, because each is compiled for it.
TENSOR = {"mesh.data": 1, "mesh.fsdp": 1, "mesh.tensor": 4}
TENSOR_TRAINING = TENSOR | {
    "rollout.lockstep": True, "steps": 1, "algorithm.estimator": "returns", "algorithm.ratio_level": "token",
    "algorithm.num_minibatches": 1,
}  # fmt: skip


def faults_of_all():
    """The same broken episodes for one process and for two: an environment of the second host, a NaN of its data."""
    config = get_config()
    seeds = [training_episodes(config.seed, FAILING, EPISODES, 1)[i].seed for i in list(share_of(EPISODES, 1, 2))[:2]]
    return {"env.kwargs": {"fail_seeds": seeds}}, {"nan": [NAN, EPISODES - 1]}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def two(directory):
    """Two hosts: five steps, then SIGTERM to the second host alone in the rollout of the sixth."""
    changes, faults = faults_of_all()
    faults = faults | {"sigterm": [STEPS + 1, 1]}
    phase = {
        "name": "train", "command": "train", "workdir": str(directory / "two"), "faults": faults,
        "changes": changes | {"steps": STEPS + 2},
    }  # fmt: skip
    return run(directory / "two_logs", [phase])


@pytest.fixture(scope="module")
def one(directory, two):
    """One process: the same five steps and their evaluation; then what the two hosts have saved."""
    changes, faults = faults_of_all()
    train = {
        "name": "train", "command": "train", "workdir": str(directory / "one"), "faults": faults,
        "changes": changes | {"steps": STEPS},
    }  # fmt: skip
    saved = {"workdir": str(directory / "two"), "step": STEPS}
    one_device = {"mesh.data": 1, "mesh.fsdp": 1}
    phases = [
        train,
        {"name": "evaluate", "command": "evaluate", "workdir": str(directory / "one"), "step": STEPS},
        saved | {"name": "on_four", "command": "restore"},
        saved | {"name": "on_one", "command": "restore", "changes": one_device},
        {
            "name": "tensor_train", "command": "train", "workdir": str(directory / "tensor_one"),
            "changes": TENSOR_TRAINING,
        },
    ]  # fmt: skip
    return run(directory / "one_logs", phases, num_processes=1, devices=4)


@pytest.fixture(scope="module")
def again(directory, two, one):
    """Two hosts once more: evaluations of what the one process has saved, then runs that end in an error."""
    shutil.copytree(directory / "one", directory / "broken")
    evaluate = {"command": "evaluate", "step": STEPS, "workdir": str(directory / "one")}
    broken = {"command": "train", "workdir": str(directory / "broken")}
    phases = [
        {"name": "views", "command": "views"},
        evaluate | {"name": "evaluate"},
        evaluate | {"name": "lockstep", "changes": {"rollout.lockstep": True}},
        evaluate | {"name": "tensor_lockstep", "changes": {"rollout.lockstep": True} | TENSOR},
        {
            "name": "tensor_train", "command": "train", "workdir": str(directory / "tensor_two"),
            "changes": TENSOR_TRAINING,
        },
        broken | {"name": "raise", "changes": {"steps": STEPS + 1}, "faults": {"raise": [STEPS + 1, 1]}},
        broken | {"name": "tensor", "changes": TENSOR},
        broken | {"name": "idle", "changes": {"mesh.data": 1, "mesh.fsdp": 2}},
    ]  # fmt: skip
    return run(directory / "again_logs", phases)


def samples(arrays, kind, prefix=""):
    return {name: value for name, value in arrays.items() if name.startswith(f"{kind}/{prefix}")}


def assert_equal(one, other):
    assert one.keys() == other.keys() and one
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def assert_close(one, other, atol):
    assert one.keys() == other.keys() and one
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=0, atol=atol, err_msg=name)


def test_two_hosts_sample_what_one_process_samples(one, two):
    assert_equal(samples(one.arrays("train"), "ids"), samples(two.arrays("train"), "ids"))
    steps = {name.split("/")[1] for name in samples(two.arrays("train"), "ids")}
    assert steps == {f"step{n + 1}" for n in range(STEPS)}
    lengths = {len(ids) for ids in samples(two.arrays("train"), "ids").values()}
    assert len(lengths) > 3, "the lengths did not vary: the test shows nothing"


def test_parameters_are_those_of_one_process_and_the_same_on_both_hosts(one, two):
    expected, found = one.arrays("train"), two.arrays("train")
    assert_equal(samples(found, "state"), samples(two.arrays("train", index=1), "state"))
    assert_close(samples(expected, "logprobs"), samples(found, "logprobs"), atol=1e-4)
    for model in ("actor", "critic"):
        assert_close(
            samples(expected, "state", f"{model}.params"), samples(found, "state", f"{model}.params"), atol=1e-4
        )
    # Two minibatches a step; of one step the minibatch with the NaN was left out.
    assert found["state/actor.step"] == found["state/critic.step"] == 2 * STEPS - 1
    assert found["state/actor.skipped"] == found["state/critic.skipped"] == 1


def metrics_of(workdir):
    return [
        {name: value for name, value in line.items() if not name.startswith(MACHINE)}
        for line in read_jsonl(workdir / "metrics.jsonl")
    ]


def test_metrics_are_those_of_one_process(directory, one, two):
    expected, found = metrics_of(directory / "one"), metrics_of(directory / "two")
    assert [line["step"] for line in found] == list(range(STEPS + 1))
    for line, other in zip(expected, found, strict=True):
        evaluated_last = {name for name in line if name.startswith("eval/") and line["step"] == STEPS}
        assert line.keys() - evaluated_last == other.keys()
        for name in other:
            if name == "non_finite" or line[name] is None:
                assert line[name] == other[name], (line["step"], name)
            else:
                np.testing.assert_allclose(other[name], line[name], rtol=1e-3, atol=1e-4, err_msg=f"{name} of {line}")


def test_a_broken_environment_costs_its_episodes_and_a_nan_its_minibatch(directory, two):
    for line in metrics_of(directory / "two")[1:]:
        broken = line["step"] == FAILING
        assert line["rollout/dropped_episodes"] == (2 if broken else 0)
        assert line["rollout/env_errors"] == (6 if broken else 0)  # each was tried three times
        for model in ("actor", "critic"):
            assert line[f"optim/skipped_{model}"] == (line["step"] == NAN)


def test_the_first_host_alone_writes_what_one_process_writes(directory, one, two):
    names = {path.relative_to(directory / "one") for path in (directory / "one").glob("*/*.jsonl")}
    assert names == {path.relative_to(directory / "two") for path in (directory / "two").glob("*/*.jsonl")}
    assert len(names) == STEPS
    for name in names:
        for record, other in zip(
            read_jsonl(directory / "one" / name), read_jsonl(directory / "two" / name), strict=True
        ):
            for turn, other_turn in zip(record.pop("turns"), other.pop("turns"), strict=True):
                for number in ("value", "advantage"):
                    np.testing.assert_allclose(
                        np.float64(turn.pop(number)), np.float64(other_turn.pop(number)), rtol=1e-3, atol=1e-4
                    )
                assert turn == other_turn
            assert record == other


def test_sigterm_to_one_host_stops_and_saves_on_both(directory, two):
    assert two.ended("train") == ["SystemExit: 143"] * 2
    assert f"stopped after step {STEPS}; saved: step {STEPS}; the same command continues" in two.logs()
    assert (directory / "two" / "checkpoints" / str(STEPS)).is_dir()


def test_what_two_hosts_saved_is_restored_on_one_process_with_four_devices_and_with_one(one, two):
    saved = samples(two.arrays("train"), "state")
    assert_equal(saved, samples(one.arrays("on_four"), "state"))
    assert_equal(saved, samples(one.arrays("on_one"), "state"))


def test_two_hosts_divide_the_evaluation_of_what_one_process_saved_and_lockstep_changes_no_trajectory(one, again):
    (numbers,) = one.metrics("evaluate")
    assert 0 < numbers["eval/tests.failing_env:FailingEnv/return_mean"] < 3, "nothing to tell apart"
    assert again.metrics("evaluate") == [numbers, numbers]
    assert_equal(samples(one.arrays("evaluate"), "ids"), samples(again.arrays("evaluate"), "ids"))
    for phase in ("lockstep", "tensor_lockstep"):
        for index in range(2):
            found = again.arrays(phase, index)
            assert_equal(samples(again.arrays("evaluate"), "ids"), samples(found, "ids"))
            assert_close(samples(again.arrays("evaluate"), "logprobs"), samples(found, "logprobs"), atol=1e-5)
        assert again.metrics(phase) == again.metrics("evaluate")


def test_hosts_that_own_the_same_rows_train_in_lockstep(one, again):
    assert again.ended("tensor_train") == ["finished"] * 2, again.logs()
    expected, found = one.arrays("tensor_train"), again.arrays("tensor_train")
    assert_equal(samples(expected, "ids"), samples(found, "ids"))
    assert_equal(samples(found, "state"), samples(again.arrays("tensor_train", 1), "state"))
    params = "actor.params"
    assert_close(samples(expected, "state", params), samples(found, "state", params), atol=1e-4)
    assert found["state/actor.step"] == 1 and found["state/actor.skipped"] == 0


def test_a_host_sees_the_weights_of_all_hosts_without_a_copy(again):
    assert again.ended("views") == ["finished"] * 2, again.logs()


def test_an_error_on_one_host_ends_both_with_its_name(again):
    assert again.ended("raise") == [
        "HostError: host 1 failed: RuntimeError: the rollout broke",
        "RuntimeError: the rollout broke",
    ]


def test_an_error_that_the_other_host_cannot_know_of_ends_both_at_once(directory):
    started = time.monotonic()
    group = Group(directory / "alone_logs", [{"name": "alone", "command": "alone"}], 2, devices=1)
    group.wait(codes=[1, 1])
    # Leaving as usual would wait for the other host until jax gives it up, after 100 s at the earliest.
    assert "RuntimeError: only here" in group.logs() and "host 1 ends at once" in group.logs()
    assert "host 0 ends at once" in group.logs()
    assert time.monotonic() - started < 90, group.logs()


def test_meshes_that_hosts_cannot_share_are_refused(again):
    first, second = again.ended("tensor")
    assert first == second
    assert "mesh.tensor=4 reaches across hosts, which have 2 devices each; allowed: an axis inside a host" in first
    assert (
        again.ended("idle")
        == ["ValueError: mesh data=1 * fsdp=2 * tensor=1 * sequence=1 needs 2 devices, there are 4"] * 2
    )


def test_importing_the_commands_starts_no_device():
    # jax.distributed must come first, and it comes with the flags.
    code = (
        "import turnppo_jax.evaluate, turnppo_jax.sft, turnppo_jax.train\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr

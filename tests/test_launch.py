"""The two commands of a newcomer, with a stub Python that records what it is asked to do."""

import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPTS = ["launch/environment.sh", "launch/quickstart.sh", "launch/test.sh", ".ci/run"]

# Plays the machine's python3 and, copied into an environment, that environment's python.
STUB = r"""#!/bin/bash
printf '%s\n' "$(basename "$(dirname "$(dirname "$0")")") $*" >> "$CALLS"
case "$*" in
    --version) echo "Python 3.11.0" ;;
    "-c import sys, venv"*) [[ -z ${STUB_OLD:-} ]] ;;
    "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    "-m pip --version") ;;
    "-m pip install"*) [[ -z ${STUB_PIP_FAILS:-} ]] || { echo "no network"; exit 1; } ;;
    "-c import hashlib"*) cksum "${@: -1}" | cut -d' ' -f1 ;;
    "- "*) cat > /dev/null; [[ -z ${STUB_LACKS:-} ]] || { echo "it lacks jax" >&2; exit 1; } ;;
    "-m pytest"*) echo "${STUB_SKIPPED:-}"; echo "3 passed in 0.1s"; exit "${STUB_STATUS:-0}" ;;
    "-m turnppo_jax.train"*) echo "trained" ;;
    *) echo "stub: unexpected call: $*" >&2; exit 9 ;;
esac
"""


@pytest.fixture
def clone(tmp_path):
    """A copy of the scripts beside a machine whose only Python is the stub; returns a function that runs a script."""
    repository = tmp_path / "a repository"  # a space in the path is no trouble
    for name in [*SCRIPTS, "requirements.txt"]:
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, repository / name)
    machine = tmp_path / "machine" / "bin"
    machine.mkdir(parents=True)
    (machine / "python3").write_text(STUB)
    (machine / "python3").chmod(0o755)
    for tool in (
        "bash",
        "cat",
        "cksum",
        "cp",
        "cut",
        "dirname",
        "basename",
        "grep",
        "mkdir",
        "mktemp",
        "rm",
        "tail",
        "tee",
    ):
        (machine / tool).symlink_to(shutil.which(tool))
    calls = tmp_path / "calls"

    def run(script: str, *arguments: str, **environment: str):
        calls.write_text("")
        done = subprocess.run(
            [str(machine / "bash"), script, *arguments],
            cwd=repository,
            env={"PATH": str(machine), "CALLS": str(calls), "TMPDIR": str(tmp_path), **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done, [line for line in calls.read_text().splitlines() if " -c " not in line and "--version" not in line]

    run.repository = repository
    return run


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", ROOT / script], check=True)
    assert script == "launch/environment.sh" or os.access(ROOT / script, os.X_OK)


def test_first_run_makes_the_environment_and_the_second_reuses_it(clone):
    done, calls = clone("launch/test.sh", "-k", "kernels and not slow")
    assert done.returncode == 0, done.stderr
    environment = str(clone.repository / ".venv")
    assert calls == [
        f"machine -m venv {environment}",
        f".venv -m pip install --quiet --disable-pip-version-check --requirement {clone.repository}/requirements.txt",
        ".venv -m pytest -q -k kernels and not slow",
    ]
    assert "making" in done.stdout and "installing" in done.stdout and "running the tests" in done.stdout
    done, calls = clone("launch/quickstart.sh", "--config.seed=1")
    assert done.returncode == 0, done.stderr
    assert calls == [
        ".venv -m turnppo_jax.train --config=configs/quickstart.py --workdir=runs/quickstart --config.seed=1"
    ]
    assert f"using {environment}" in done.stdout and "installing" not in done.stdout


def test_changed_requirements_are_installed_again(clone):
    clone("launch/test.sh")
    with open(clone.repository / "requirements.txt", "a") as file:
        file.write("another\n")
    _, calls = clone("launch/test.sh")
    assert [call.split()[1:4] for call in calls] == [["-m", "pip", "install"], ["-m", "pytest", "-q"]]


def test_a_failed_or_interrupted_installation_is_taken_up_again(clone):
    done, calls = clone("launch/test.sh", STUB_PIP_FAILS="1")
    assert done.returncode == 1
    assert "no network" in done.stdout and "pip could not install" in done.stderr
    assert not any("-m pytest" in call for call in calls)
    (clone.repository / ".venv" / "bin" / "python").unlink()  # killed while it was made
    done, calls = clone("launch/test.sh")
    assert done.returncode == 0
    assert [call.split(" -m ")[1].split()[0] for call in calls] == ["venv", "pip", "pytest"]


def test_an_environment_of_somebody_else_is_used_but_never_changed(clone, tmp_path):
    other = tmp_path / "other"
    (other / "bin").mkdir(parents=True)
    shutil.copy(tmp_path / "machine" / "bin" / "python3", other / "bin" / "python")
    before = sorted(other.rglob("*"))
    done, calls = clone("launch/test.sh", TURNPPO_VENV=str(other))
    assert done.returncode == 0, done.stderr
    assert "as it is" in done.stdout
    assert [call.split()[1] for call in calls] == ["-", "-m"]  # looked at what it has, then pytest
    done, calls = clone("launch/test.sh", TURNPPO_VENV=str(other), STUB_LACKS="1")
    assert done.returncode == 1
    assert "it lacks jax" in done.stderr and "left alone" in done.stderr
    assert not any("-m pip" in call or "-m pytest" in call for call in calls)
    assert sorted(other.rglob("*")) == before


def test_no_python_that_is_new_enough_is_said_before_anything_is_made(clone):
    done, _ = clone("launch/test.sh", STUB_OLD="1")
    assert done.returncode == 1
    assert "found no Python 3.11 or newer" in done.stderr
    assert not (clone.repository / ".venv").exists()
    done, _ = clone("launch/test.sh", TURNPPO_PYTHON="python9")
    assert "TURNPPO_PYTHON=python9" in done.stderr


@pytest.mark.parametrize("status", [0, 1])
def test_ci_uses_a_fresh_environment_and_passes_on_the_exit_status(clone, tmp_path, status):
    clone("launch/test.sh")
    done, calls = clone(".ci/run", STUB_STATUS=str(status))
    assert done.returncode == status
    assert calls[0].startswith("machine -m venv ") and str(clone.repository) not in calls[0]
    assert done.stdout.splitlines()[-1] == f"ci: exit status {status}, pytest: 3 passed in 0.1s"
    assert not list(tmp_path.glob("tmp.*"))  # the scratch folder is gone


def test_ci_says_so_when_nothing_was_compiled_for_a_tpu(clone):
    skipped = "SKIPPED [3] tests/test_plan.py:120: the TPU compiler (package libtpu) is not installed: nothing is"
    lines = [
        clone(".ci/run", STUB_SKIPPED=line)[0].stdout.splitlines() for line in (skipped, skipped.replace("lib", ""))
    ]
    assert [sum("no program was compiled for a TPU: libtpu is not installed" in one for one in of) for of in lines] == [
        1,
        0,
    ]
    assert lines[0][-1] == lines[1][-1] == "ci: exit status 0, pytest: 3 passed in 0.1s"

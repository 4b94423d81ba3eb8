"""Kernels and sampler compiled for TPU topologies, on a machine without a TPU (libtpu from the package `jax[tpu]`)."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: programs cannot be compiled for a TPU here (it comes with jax[tpu])",
)

SAMPLER = 2  # programs of the whole model


@pytest.fixture(scope="module")
def programs():
    """What the compiler said of each program; one process compiles them all, because libtpu starts with it."""
    root = pathlib.Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", "tests.tpu_programs"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_every_program_compiles_with_its_kernels(programs):
    assert len(programs) == 3 * 4 + 2 + SAMPLER
    for found in programs:
        if "splash" in found["program"]:
            assert [kernel.split("_")[2] for kernel in found["kernels"]] == ["dkv", "dq", "fwd"], found
        else:
            assert found["kernels"] == ["ragged_attention", "ragged_write"], found


def test_the_cache_stays_where_it_is(programs):
    """Donated, it comes back in its own memory, and nothing near its size is made, copied or sent."""
    for found in programs:
        if found["cache"]:
            assert found["aliased"] >= found["cache"], found
            assert found["temporary"] < 0.2 * found["cache"], found
            assert found["moved"] < 0.2 * found["cache"], found

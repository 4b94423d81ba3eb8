"""The TPU kernels, emulated, where they are used: in a decoder with a cache, and on meshes."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests import ragged_cases
from turnppo_jax.models import cache_attention
from turnppo_jax.parallel.mesh import make_mesh
from turnppo_jax.rollout.sampler import SamplerSettings

# Hidden states of order 1, the same numbers summed in another order; gradients are sums of a few hundred of them.
TOLERANCE = 2e-5


@pytest.fixture
def emulated():
    real = ragged_cases.emulate()
    yield
    cache_attention.CACHE_ATTENTION["ragged"] = real


def test_turns_with_the_ragged_cache_equal_one_forward(emulated):
    assert ragged_cases.largest_error() < TOLERANCE


def test_on_meshes():
    """Rows, slots and heads split over four devices in every way give the numbers of one."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    root = pathlib.Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", "tests.tpu_kernels_on_mesh"]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [len(errors) for errors in found.values()] == [5, 2]
    for errors in found.values():
        for name, error in errors.items():
            assert error < TOLERANCE, name
    assert "tensor=4 does not divide heads=3: attention is not split over it" in done.stdout


def test_the_sampler_takes_the_kernels_on_tpus_alone():
    settings = SamplerSettings(num_slots=4, context_length=64)
    assert settings.attention == "auto" and settings.cache_attention(make_mesh()) == "blocks"
    chosen = SamplerSettings(num_slots=4, context_length=64, attention="ragged")
    assert chosen.cache_attention(make_mesh()) == "ragged"
    with pytest.raises(ValueError, match="unknown cache attention 'paged'; known: blocks, ragged"):
        SamplerSettings(num_slots=4, context_length=64, attention="paged")

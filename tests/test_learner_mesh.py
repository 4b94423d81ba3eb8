"""The learner on several devices."""

import json
import os
import pathlib
import subprocess
import sys


def test_sharded_equals_unsharded():
    """Two training steps on data=2, fsdp=2 and on one device: equal parameters and metrics, one compilation."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, "-m", "tests.learner_on_mesh"]
    root = pathlib.Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # Adam's steps are of size 1e-2; gradients that differ by float32 rounding move them by about 1e-6.
    assert found["parameters"] < 2e-5
    assert found["metrics"] < 1e-4
    assert found["sharded"] and found["compiled"] == 1

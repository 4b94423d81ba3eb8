"""Commands on the tiny config where what counts is not how fast they compute: little is compiled, and only once."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
# A critic-free algorithm with one update a step: the fewest programs to compile.
SMALL = {
    "config": "tests/tiny_config.py:algo=grpo",
    "overrides": {"algorithm.num_minibatches": 1, "algorithm.kl_coef": 0.0, "env.num_workers": 0},
}


def settings(cache):
    """Environment variables of such a process; `cache` keeps what was compiled for the next one."""
    return {
        "JAX_PLATFORMS": "cpu",
        # These programs run a few times: most of the compiler's work on them would be wasted.
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }


def command(module, *flags):
    return [sys.executable, "-m", module, *map(str, flags)]


def run(cache, module, *flags):
    """The finished process."""
    return subprocess.run(
        command(module, *flags),
        cwd=ROOT,
        env=os.environ | settings(cache),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def train(cache, workdir, *flags):
    """A run of SMALL."""
    overrides = [f"--config.{name}={value}" for name, value in SMALL["overrides"].items()]
    return run(
        cache, "turnppo_jax.train", f"--config={SMALL['config']}", f"--workdir={workdir}", *overrides, *flags
    )  # fmt: skip

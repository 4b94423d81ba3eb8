"""Every algorithm trains Sokoban for three steps: finite metrics, parameters that move, the parts it is made of."""

import functools
import json
import shutil

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.tiny_sokoban import TRAJECTORIES, get_config
from turnppo_jax.command_line import finalise
from turnppo_jax.train import train
from turnppo_jax.training.checkpoint_reading import restore_actor_params
from turnppo_jax.training.presets import ALGORITHMS


@pytest.fixture(scope="module", autouse=True)
def shared_compilation(tmp_path_factory):
    """The runs share what they have in common, most of all the sampler; the rest is compiled with little effort."""
    options = {
        "jax_disable_most_optimizations": (True, False),
        "jax_compilation_cache_dir": (str(tmp_path_factory.mktemp("compiled")), None),
        "jax_persistent_cache_min_compile_time_secs": (0.0, 1.0),
        "jax_persistent_cache_min_entry_size_bytes": (-1, 0),
    }
    for name, (here, _) in options.items():
        jax.config.update(name, here)
    yield
    for name, (_, default) in options.items():
        jax.config.update(name, default)
    compilation_cache.reset_cache()


@functools.cache
def start(folder):
    """The run that makes the warm start of all others."""
    config = finalise(get_config())
    train(config | {"steps": 0}, folder)
    return folder


@pytest.fixture(scope="module")
def warm_start(tmp_path_factory):
    return start(tmp_path_factory.mktemp("start"))


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_three_steps_of_sokoban(algo, warm_start, tmp_path):
    config = finalise(get_config(f"algo={algo}"))
    shutil.copytree(warm_start / "start", tmp_path / "start")
    train(config, tmp_path)
    with open(tmp_path / "metrics.jsonl", encoding="utf-8") as file:
        first, *steps = [json.loads(line) for line in file]
    assert first["step"] == 0 and [line["step"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert "non_finite" not in line
        assert all(np.isfinite(value) for value in line.values() if isinstance(value, float))
        kept = line["batch/trained_trajectories"] + line["batch/overlong_trajectories"]
        assert kept + line["batch/filtered_trajectories"] == TRAJECTORIES
    if algo == "sppo":  # the critic knows the prompt, and nothing of later turns is written
        for text in (tmp_path / "trajectories" / "step_000003.jsonl").read_text().splitlines():
            values = [turn["value"] for turn in json.loads(text)["turns"]]
            assert values[0] is not None and not any(values[1:])
    before, after = restore_actor_params(tmp_path, 0)[0], restore_actor_params(tmp_path, 3)[0]
    moved = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), before, after)
    assert min(jax.tree.leaves(moved)) > 0

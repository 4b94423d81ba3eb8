"""Every config file builds into settings, for every algorithm; sections hold every field."""

import dataclasses
import importlib
import pathlib

import pytest

from configs.sections import parse_algo, section
from turnppo_jax.command_line import finalise
from turnppo_jax.settings import run_settings
from turnppo_jax.training.algorithm import ALGORITHMS, AlgorithmConfig

ROOT = pathlib.Path(__file__).resolve().parents[1]
NAMES = sorted(path.stem for path in (ROOT / "configs").glob("*.py") if path.stem not in ("__init__", "sections"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_config_builds_for_every_algorithm(name, algo):
    config = importlib.import_module(f"configs.{name}").get_config(f"algo={algo}")
    settings = run_settings(finalise(config))
    algorithm, shape = settings.learner.algorithm, settings.learner.shape
    assert settings.num_episodes == settings.rollout.num_prompts * algorithm.group_size == shape.trajectories
    # A minibatch always fits, whatever the lengths: one row a trajectory.
    assert shape.rows * algorithm.num_minibatches >= settings.num_episodes
    assert shape.tokens >= settings.sampler.context_length
    updates = settings.steps * algorithm.epochs * algorithm.num_minibatches
    assert settings.actor_optimizer.total_steps == updates
    assert (settings.critic_optimizer is not None) == algorithm.has_critic
    assert dict(settings.eval_env.kwargs)["split"] == "eval"
    assert "split" not in dict(settings.env.kwargs)  # training rooms by default, never an evaluation room


def test_a_section_has_every_field_and_an_optional_one_can_be_set():
    config = section(AlgorithmConfig, gamma=0.5)
    assert set(config) == {field.name for field in dataclasses.fields(AlgorithmConfig)}
    assert (config.gamma, config.normalizer) == (0.5, None)
    config.normalizer = "turns"
    with pytest.raises(TypeError):
        config.normalizer = 3
    with pytest.raises(ValueError, match="AlgorithmConfig has no field 'gama'"):
        section(AlgorithmConfig, gama=1.0)


@pytest.mark.parametrize("argument", ["algo=ppo", "turn_ppo", "algo=grpo,steps=3"])
def test_a_wrong_argument_lists_the_algorithms(argument):
    with pytest.raises(ValueError, match="allowed: algo=NAME with NAME in turn_ppo, token_ppo, grpo"):
        parse_algo(argument)

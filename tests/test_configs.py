"""Every config file builds into settings, for every algorithm; sections hold every field."""

import dataclasses
import importlib
import inspect
import pathlib

import pytest

from configs.sections import parse_algo, section
from envs.webshop.env import WebShopEnv
from turnppo_jax.command_line import finalise
from turnppo_jax.models.sizes import SIZES
from turnppo_jax.planning import topology as topologies
from turnppo_jax.planning.model import model_sizes
from turnppo_jax.planning.workload import expected_workload
from turnppo_jax.settings import run_settings
from turnppo_jax.training.algorithm import AlgorithmConfig
from turnppo_jax.training.presets import ALGORITHMS, algorithm_by_name

ROOT = pathlib.Path(__file__).resolve().parents[1]
NAMES = sorted(path.stem for path in (ROOT / "configs").glob("*.py") if path.stem not in ("__init__", "sections"))


def paper(name):
    return importlib.import_module(f"configs.paper.{name}")


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
    updates = (settings.steps - algorithm.critic_warmup_steps) * algorithm.epochs * algorithm.num_minibatches
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
    with pytest.raises(ValueError, match=r"allowed: algo=NAME with NAME in turn_ppo, token_ppo, .*, m_grpo"):
        parse_algo(argument)


PAPER = [(name, pair) for name in ("sokoban", "webshop") for pair in paper(name).HARDWARE]


@pytest.mark.parametrize(("name", "pair"), PAPER, ids=[f"{name}-{'-'.join(pair)}" for name, pair in PAPER])
def test_the_paper_s_configs_hold_its_numbers_and_fit_their_slice(name, pair):
    model, slice_ = pair
    config = paper(name).get_config(f"model={model},topology={slice_}")
    settings = run_settings(finalise(config))
    topology = topologies.parse(slice_)
    algorithm, shape = settings.learner.algorithm, settings.learner.shape
    batch, minibatch = {"sokoban": (512, 128), "webshop": (256, 64)}[name]
    assert settings.num_episodes == batch and batch // algorithm.num_minibatches == minibatch
    assert (algorithm.gamma, algorithm.gae_lambda, algorithm.epochs, algorithm.group_size) == (0.99, 0.9, 1, 1)
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.kl_coef) == (0.2, 0.2, 0.0)
    assert (algorithm.ratio_pooling, algorithm.critic_target) == ("product", "monte_carlo")
    assert settings.actor_optimizer.learning_rate == 1e-6 and settings.critic_optimizer.learning_rate == 1e-5
    # Meshes of exactly the slice's chips, samplers inside a host, rows that the kernels and the mesh can split.
    mesh = settings.mesh
    assert mesh.data * mesh.fsdp * mesh.tensor == topology.num_devices
    assert topology.host.num_devices % settings.rollout_mesh.tensor == 0
    shards = topology.host.num_devices // settings.rollout_mesh.tensor
    assert settings.sampler.num_slots % shards == 0
    assert shape.micro_rows % (mesh.data * mesh.fsdp) == 0 and shape.tokens % 128 == 0
    sizes = model_sizes(settings.model.name)
    assert sizes == SIZES[model] and sizes.num_heads % mesh.tensor == 0
    # The longest episode fits the context, the average one the plan.
    plan, rollout = settings.plan, settings.rollout
    prompts = plan.first_prompt_tokens + (rollout.max_turns - 1) * plan.next_prompt_tokens
    assert prompts + rollout.max_turns * rollout.max_turn_tokens <= settings.sampler.context_length
    limits = {"max_turn_tokens": rollout.max_turn_tokens, "context_length": settings.sampler.context_length}
    work = expected_workload(plan, shape, algorithm, **limits)
    assert work.actor.padding_share < 0.12


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize(("name", "batch"), [("sokoban", 512), ("webshop", 256)])
def test_the_paper_s_configs_play_as_many_trajectories_with_every_algorithm(name, batch, algo):
    settings = run_settings(finalise(paper(name).get_config(f"algo={algo}")))
    algorithm = settings.learner.algorithm
    assert settings.num_episodes == batch and algorithm.num_minibatches == 4
    assert algorithm.group_size in (1, 16)
    assert dataclasses.replace(algorithm_by_name(algo), num_minibatches=4, group_size=algorithm.group_size) == algorithm


def test_the_paper_s_configs_list_their_pairs():
    assert paper("sokoban").get_config() == paper("sokoban").get_config("model=qwen2.5-3b,topology=v5e:4x4")
    assert paper("sokoban").get_config("model=qwen2.5-7b").model.name == "Qwen/Qwen2.5-7B-Instruct"
    for argument in ("model=qwen2.5-7b,topology=v5e:4x4", "algo=ppo", "model=qwen3-1.7b"):
        with pytest.raises(ValueError, match=r"allowed: model=qwen2.5-3b,topology=v5e:4x4; .*v6e:8x8; with algo=NAME"):
            paper("sokoban").get_config(argument)
    on, off = (paper("webshop").get_config(f"model=qwen2.5-3b,thinking={value}") for value in ("on", "off"))
    assert on == paper("webshop").get_config("model=qwen2.5-3b") != off
    assert on.env.kwargs.thinking and on.model.thinking and not off.env.kwargs.thinking and not off.model.thinking
    with pytest.raises(ValueError, match=r"allowed: model=qwen3-1.7b,.*; with thinking=on\|off; with algo=NAME"):
        paper("webshop").get_config("thinking=maybe")


@pytest.mark.parametrize("name, third", [("webshop_quickstart", "catalogue"), ("paper.webshop", "observation")])
def test_the_shop_that_flags_name_is_the_environment_s_own(name, third):
    """What a config names of the environment's arguments so that flags can change it, changes nothing by itself."""
    kwargs = importlib.import_module(f"configs.{name}").get_config().env.kwargs
    defaults = inspect.signature(WebShopEnv).parameters
    for argument in ("goals", "fair_options", third):
        assert kwargs[argument] == defaults[argument].default

"""A run of seconds for the tests of the commands."""

from ml_collections import ConfigDict

from configs.sections import algorithm_section, base_config, parse_algo, section, sft_section
from turnppo_jax.rollout.sampler import SamplerSettings
from turnppo_jax.settings import CheckpointSettings, ModelSettings, RolloutSettings, RowSettings
from turnppo_jax.training.evaluation import EvaluationSettings
from turnppo_jax.training.forward import ForwardSettings
from turnppo_jax.training.optimizer import OptimizerConfig


def get_config(argument: str = "") -> ConfigDict:
    """`argument` is "" or "algo=NAME"."""
    algo = parse_algo(argument)
    algorithm = algorithm_section(algo, group_size=2, num_minibatches=2)
    config = base_config(algo)
    config.steps = 6
    config.writers = ("jsonl",)
    config.model = section(ModelSettings, name="tiny-qwen3-narrow")
    config.env = ConfigDict({"id": "tests.delayed_env:DelayedEnv", "kwargs": {}, "num_workers": 2})
    config.sampler = section(
        SamplerSettings, num_slots=4, context_length=64, decode_chunk=4, prefill_chunk=16, prefill_rows=2
    )
    config.rollout = section(RolloutSettings, num_prompts=8 // algorithm.group_size, max_turns=3, max_turn_tokens=6)
    config.rows = section(RowSettings, micro_rows=2)
    config.forward = section(ForwardSettings)
    config.algorithm = algorithm
    config.actor_optimizer = section(OptimizerConfig, learning_rate=3e-4)
    config.critic_optimizer = section(OptimizerConfig, learning_rate=1e-3)
    config.sft = sft_section(steps=0)
    config.evaluation = section(EvaluationSettings, num_seeds=4, samples=2, every=3)
    config.reward.terms.response_tokens = 0.0
    config.checkpoint = section(CheckpointSettings, save_every=2)
    return config

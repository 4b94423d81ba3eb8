"""Sokoban for the tests of the presets: a few steps of a tiny model that a short warm start has taught to answer."""

from ml_collections import ConfigDict

from configs.quickstart import get_config as quickstart
from configs.sections import algorithm_section, parse_algo, section, sft_section
from turnppo_jax.rollout.sampler import SamplerSettings
from turnppo_jax.settings import CheckpointSettings, ModelSettings, RolloutSettings, RowSettings
from turnppo_jax.training.evaluation import EvaluationSettings
from turnppo_jax.training.forward import ForwardSettings

TRAJECTORIES = 16


def get_config(argument: str = "") -> ConfigDict:
    """`argument` is "" or "algo=NAME"."""
    config = quickstart(argument)
    config.algorithm = algorithm_section(parse_algo(argument), group_size=4, num_minibatches=2, value_scale=10.0)
    config.algorithm.num_branches = 2
    config.algorithm.critic_warmup_steps = min(config.algorithm.critic_warmup_steps, 1)
    config.steps = 3
    config.writers = ("jsonl",)
    config.model = section(ModelSettings, name="tiny-qwen3-narrow")
    config.sampler = section(
        SamplerSettings, num_slots=16, context_length=96, decode_chunk=8, prefill_chunk=32, prefill_rows=4
    )
    config.rollout = section(
        RolloutSettings, num_prompts=TRAJECTORIES // config.algorithm.group_size, max_turns=3, max_turn_tokens=12
    )
    config.rows = section(RowSettings, micro_rows=4)
    config.forward = section(ForwardSettings)
    config.sft = sft_section(
        steps=120, learning_rate=3e-3, betas=(0.9, 0.98), rows=8, row_tokens=96, num_demonstrations=2_000, heldout=16,
        options={"actions_per_turn": "random"}, evaluate_every=40,
    )  # fmt: skip
    config.evaluation = section(EvaluationSettings, num_seeds=8, samples=1, greedy=False)
    config.checkpoint = section(CheckpointSettings, save_every=3)
    return config

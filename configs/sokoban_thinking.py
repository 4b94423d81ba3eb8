"""Sokoban with a demonstrated thinking block, for comparing methods on two CPU cores: a model of 0.8M parameters.

    python -m turnppo_jax.train --config=configs/sokoban_thinking.py:algo=turn_ppo --workdir=DIR

One trajectory budget for every algorithm: 128 trajectories a step (groups of 16 where it needs groups, else 128 rooms),
four minibatches, one epoch. A response names the cells of player, box and target and the way to the end, then up to
five moves: 33 to 50 tokens. Reward stands on its own turn, the dual clip is 3 for all, and advantages are weighted
with the paper's normalizer. The warm start is the same for all algorithms of a seed.
"""

from ml_collections import ConfigDict

from configs.sections import algorithm_section, base_config, env_section, parse_algo, section, sft_section
from turnppo_jax.rollout.sampler import SamplerSettings
from turnppo_jax.settings import ModelSettings, RolloutSettings, RowSettings
from turnppo_jax.training.evaluation import EvaluationSettings
from turnppo_jax.training.forward import ForwardSettings
from turnppo_jax.training.optimizer import OptimizerConfig

TRAJECTORIES, GROUP_SIZE = 128, 16


def get_config(argument: str = "") -> ConfigDict:
    """The config; `argument` is "" or "algo=NAME"."""
    algo = parse_algo(argument)
    algorithm = algorithm_section(algo, group_size=GROUP_SIZE, num_minibatches=4, value_scale=10.0)
    algorithm.dual_clip = 3.0
    config = base_config(algo)
    config.steps = 60
    config.writers = ("jsonl", "console")
    config.model = section(ModelSettings, name="tiny-qwen3")
    config.env = env_section("sokoban", prompt="compact", actions_per_turn=5, thinking=True)
    config.sampler = section(
        SamplerSettings, num_slots=64, context_length=448, decode_chunk=16, prefill_chunk=64, prefill_rows=8
    )
    config.rollout = section(
        RolloutSettings, num_prompts=TRAJECTORIES // algorithm.group_size, max_turns=5, max_turn_tokens=64
    )
    config.rows = section(RowSettings, micro_rows=8)
    config.forward = section(ForwardSettings, remat="full")
    config.algorithm = algorithm
    config.actor_optimizer = section(OptimizerConfig, learning_rate=1.5e-4, warmup_steps=8)
    config.critic_optimizer = section(OptimizerConfig, learning_rate=1e-3, warmup_steps=16)
    config.sft = sft_section(
        steps=250, learning_rate=1e-3, betas=(0.9, 0.98), rows=8, row_tokens=448, num_demonstrations=12_000,
        options={"noise": 0.0, "actions_per_turn": "random", "think": "plan"}, remat="full",
    )  # fmt: skip
    config.evaluation = section(EvaluationSettings, every=10, num_seeds=256, samples=4, greedy=False)
    return config

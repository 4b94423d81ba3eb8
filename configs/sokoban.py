"""Sokoban with a pretrained checkpoint: full instructions, thinking block, several actions a turn.

    python -m turnppo_jax.train --config=configs/sokoban.py --workdir=runs/sokoban --config.model.name=MODEL

MODEL is a directory in Hugging Face format or a hub id (Qwen2.5, Qwen3, SmolLM2 and other Llama decoders). The settings
of algorithm and optimizers are those of Turn-PPO (arXiv 2512.17008): gamma .99, lambda .9, clip .2, actor 1e-6,
critic 1e-5. The sizes are for one small machine: 16 episodes a step, in float32. `:algo=token_ppo` and `:algo=grpo` as
in quickstart. SmolLM2-135M takes 9.5 minutes a step on one CPU core (19,000 tokens, 7.9 GB); it needs a warm start
(`python -m turnppo_jax.sft` with this config) before any of its answers is valid.
"""

from ml_collections import ConfigDict

from configs.sections import algorithm_section, base_config, env_section, parse_algo, section, sft_section
from turnppo_jax.rollout.sampler import SamplerSettings
from turnppo_jax.settings import ModelSettings, RolloutSettings, RowSettings
from turnppo_jax.training.evaluation import EvaluationSettings
from turnppo_jax.training.forward import ForwardSettings
from turnppo_jax.training.optimizer import OptimizerConfig


def get_config(argument: str = "") -> ConfigDict:
    """The config; `argument` is "" or "algo=NAME"."""
    algo = parse_algo(argument)
    algorithm = algorithm_section(algo, num_minibatches=4)
    config = base_config(algo)
    config.steps = 200
    config.model = section(ModelSettings, name="Qwen/Qwen2.5-0.5B-Instruct")
    config.env = env_section("sokoban", num_workers=1, prompt="full", actions_per_turn=5)
    config.sampler = section(
        SamplerSettings, num_slots=16, context_length=2048, decode_chunk=16, prefill_chunk=512, prefill_rows=2
    )
    config.rollout = section(RolloutSettings, num_prompts=16 // algorithm.group_size, max_turns=5, max_turn_tokens=128)
    # Two episodes of the usual 1,250 tokens share a row; the longest still fits one.
    config.rows = section(RowSettings, micro_rows=1, tokens=2560, sampled=1280)
    config.forward = section(ForwardSettings, remat="full")
    config.algorithm = algorithm
    # total_steps is computed from steps, epochs and minibatches.
    config.actor_optimizer = section(OptimizerConfig, learning_rate=1e-6)
    config.critic_optimizer = section(OptimizerConfig, learning_rate=1e-5)
    # Off: `python -m turnppo_jax.sft` with this config warms a model up once for several runs.
    config.sft = sft_section(steps=0, learning_rate=1e-5, rows=4, row_tokens=2048, remat="full")
    config.evaluation = section(EvaluationSettings, every=20, num_seeds=256, greedy=False)
    return config

"""Two tasks of a single turn on two CPU cores: a bandit, and countdown (an expression of given numbers).

    python -m turnppo_jax.train --config=configs/single_turn.py:env=countdown,algo=turn_ppo --workdir=DIR
    python -m turnppo_jax.train --config=configs/single_turn.py:env=bandit,algo=token_ppo --workdir=DIR

With one turn an episode, the unit of decision is all that tells turn_ppo from token_ppo: these are the single-turn
column beside the many turns of Sokoban. The model (0.8M parameters, with a token for each of the bandit's words) is
warmed up on demonstrations that err half of the time in the bandit, and in three of ten problems of countdown.

Countdown with turn_ppo, seed 0, on 256 held-out problems: success at temperature 1 from .032 to .161 [.129, .200] in 60
steps, greedy from .113 to .234 [.187, .290]. The bandit has no result yet.
"""

from ml_collections import ConfigDict

from configs.sections import algorithm_section, base_config, env_section, parse_algo, section, sft_section
from envs.bandit.env import NAMES
from turnppo_jax.rollout.sampler import SamplerSettings
from turnppo_jax.settings import ModelSettings, RolloutSettings, RowSettings
from turnppo_jax.training.evaluation import EvaluationSettings
from turnppo_jax.training.forward import ForwardSettings
from turnppo_jax.training.optimizer import OptimizerConfig

TRAJECTORIES = 256
ENVS = {
    "bandit": {
        "kwargs": {"prompt": "compact", "thinking": False},
        "options": {"noise": 0.5},
        "words": NAMES,
        "context": 64,
        "sft_steps": 200,
    },
    "countdown": {
        "kwargs": {"prompt": "compact", "max_numbers": 3, "max_number": 20, "thinking": True},
        "options": {"noise": 0.3, "think": "plan"},
        "words": (),
        "context": 128,
        "sft_steps": 250,
    },
}


def get_config(argument: str = "") -> ConfigDict:
    """The config; `argument` is "env=NAME,algo=NAME"."""
    options = dict(part.partition("=")[::2] for part in argument.split(",") if part)
    name = options.pop("env", "bandit")
    if name not in ENVS:
        raise ValueError(f"config argument {argument!r}: env={name!r}; allowed: {', '.join(ENVS)}")
    algo = parse_algo(",".join(f"{key}={value}" for key, value in options.items()))
    env = ENVS[name]
    algorithm = algorithm_section(algo, group_size=16, num_minibatches=2)
    config = base_config(algo)
    config.steps = 60
    config.model = section(ModelSettings, name="tiny-qwen3", words=env["words"])
    config.env = env_section(name, **env["kwargs"])
    config.sampler = section(
        SamplerSettings, num_slots=64, context_length=env["context"], decode_chunk=8, prefill_chunk=32, prefill_rows=8
    )
    config.rollout = section(
        RolloutSettings, num_prompts=TRAJECTORIES // algorithm.group_size, max_turns=1,
        max_turn_tokens=env["context"] - 32,
    )  # fmt: skip
    config.rows = section(RowSettings, micro_rows=16)
    config.forward = section(ForwardSettings, remat="full")
    config.algorithm = algorithm
    config.actor_optimizer = section(OptimizerConfig, learning_rate=1.5e-4, warmup_steps=5)
    config.critic_optimizer = section(OptimizerConfig, learning_rate=1e-3, warmup_steps=10)
    config.sft = sft_section(
        steps=env["sft_steps"], learning_rate=1e-3, betas=(0.9, 0.98), rows=32, row_tokens=env["context"],
        num_demonstrations=12_000, options=env["options"], remat="full",
    )  # fmt: skip
    config.evaluation = section(EvaluationSettings, every=20, num_seeds=256, samples=4, greedy=True)
    return config

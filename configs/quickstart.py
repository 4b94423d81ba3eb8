"""Quickstart: a tiny Qwen3-shaped model of its own learns Sokoban on two CPU cores.

    python -m turnppo_jax.train --config=configs/quickstart.py --workdir=runs/quickstart

The model is warmed up on solver demonstrations, then trained with turn-level PPO on rooms of 6x6 cells with one
box. `--config=configs/quickstart.py:algo=token_ppo` and `algo=grpo` run the two baselines from the same parts.
"""

import ml_collections

from turnppo_jax.training.algorithm import ALGORITHMS


def get_config(argument: str = "") -> ml_collections.ConfigDict:
    """The config; `argument` is "" or "algo=NAME"."""
    options = dict(part.split("=", 1) for part in argument.split(",") if part)
    algo = options.pop("algo", "turn_ppo")
    if options or algo not in ALGORITHMS:
        raise ValueError(f"config argument {argument!r}: allowed: algo=NAME with NAME in {', '.join(ALGORITHMS)}")

    config = ml_collections.ConfigDict()
    config.seed = 0
    config.steps = 40
    config.writers = ("jsonl", "tensorboard", "console")

    config.model = ml_collections.ConfigDict({"name": "tiny-qwen3"})
    config.env = ml_collections.ConfigDict(
        {
            "id": "sokoban",
            "kwargs": {"prompt": "compact"},
            "eval_kwargs": {"split": "eval"},
            "num_workers": 0,  # a step takes microseconds; a process of its own would cost more
        }
    )
    config.sampler = ml_collections.ConfigDict(
        {"num_slots": 64, "context_length": 384, "decode_chunk": 8, "prefill_chunk": 64, "prefill_rows": 8}
    )
    config.rollout = ml_collections.ConfigDict({"num_prompts": 128, "max_turns": 5, "max_turn_tokens": 24})
    config.rows = ml_collections.ConfigDict({"micro_rows": 8})

    config.algorithm = ml_collections.ConfigDict({"num_minibatches": 4, "value_scale": 10.0, "normalizer": "tokens"})
    config.algorithm.update(ALGORITHMS[algo])
    if "group_size" in config.algorithm:
        config.rollout.num_prompts //= config.algorithm.group_size
    config.actor_optimizer = ml_collections.ConfigDict({"learning_rate": 3e-4, "betas": (0.9, 0.99)})
    config.critic_optimizer = ml_collections.ConfigDict({"learning_rate": 1e-3, "betas": (0.9, 0.99)})

    config.sft = ml_collections.ConfigDict({"steps": 120, "learning_rate": 2e-3, "rows": 32, "row_tokens": 384})
    config.evaluation = ml_collections.ConfigDict({"num_seeds": 256, "samples": 4, "greedy": True})
    config.checkpoint = ml_collections.ConfigDict({"save_every": 10})
    return config

"""A run of seconds for the tests of the commands."""

import ml_collections

from turnppo_jax.training.algorithm import ALGORITHMS


def get_config(argument: str = "") -> ml_collections.ConfigDict:
    """`argument` is the name of an algorithm."""
    algo = argument or "turn_ppo"
    config = ml_collections.ConfigDict()
    config.seed = 0
    config.steps = 6
    config.writers = ("jsonl",)
    config.model = ml_collections.ConfigDict({"name": "tiny-qwen3"})
    config.env = ml_collections.ConfigDict({"id": "tests.delayed_env:DelayedEnv", "kwargs": {}, "num_workers": 2})
    config.sampler = ml_collections.ConfigDict(
        {"num_slots": 4, "context_length": 64, "decode_chunk": 4, "prefill_chunk": 16, "prefill_rows": 2}
    )
    config.rollout = ml_collections.ConfigDict({"num_prompts": 8, "max_turns": 3, "max_turn_tokens": 6})
    config.rows = ml_collections.ConfigDict({"micro_rows": 2})
    config.algorithm = ml_collections.ConfigDict({"num_minibatches": 2})
    config.algorithm.update(ALGORITHMS[algo])
    if "group_size" in config.algorithm:
        config.algorithm.group_size = 2
        config.rollout.num_prompts = 4
    config.actor_optimizer = ml_collections.ConfigDict({"learning_rate": 3e-4})
    config.critic_optimizer = ml_collections.ConfigDict({"learning_rate": 1e-3})
    config.sft = ml_collections.ConfigDict({"steps": 0})
    config.evaluation = ml_collections.ConfigDict({"num_seeds": 4, "samples": 2, "every": 3})
    config.checkpoint = ml_collections.ConfigDict({"save_every": 2})
    return config

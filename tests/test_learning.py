"""Turn-PPO learns a tiny game in a minute, and not from shuffled advantages."""

import json

from tests.tiny_config import get_config
from turnppo_jax.command_line import finalise
from turnppo_jax.train import train

STEPS = 60


def returns_before_and_after(tmp_path, **algorithm):
    """Mean return of the held-out episodes before the first and after the last step; 3 is perfect."""
    config = get_config()
    config.steps = STEPS
    config.env = {"id": "parity", "num_workers": 0}
    config.sampler.num_slots = 32
    config.rollout.num_prompts = 64
    config.rollout.max_turn_tokens = 2
    config.rows.micro_rows = 16
    config.actor_optimizer.learning_rate = 1e-3
    config.evaluation.update({"num_seeds": 64, "samples": 4, "every": 0, "greedy": False})
    config.checkpoint.save_every = 1000
    config.algorithm.update(algorithm)
    train(finalise(config), tmp_path)
    numbers = json.loads((tmp_path / "eval.json").read_text())
    return [numbers[step]["eval/parity/return_mean"] for step in ("0", str(STEPS))]


def test_an_untrained_model_learns_the_game(tmp_path):
    before, after = returns_before_and_after(tmp_path)
    assert before < 1.9  # guessing earns 1.5
    assert after > before + 0.5


def test_shuffled_advantages_teach_nothing(tmp_path):
    before, after = returns_before_and_after(tmp_path, permute_advantages=True)
    assert abs(after - before) < 0.4

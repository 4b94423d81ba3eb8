"""Quickstart: a tiny Qwen3-shaped model of its own learns to shop on two CPU cores.

    python -m turnppo_jax.train --config=configs/webshop_quickstart.py --workdir=runs/webshop

The shop is the built-in one with 1,000 products. The model (0.9M parameters, with a token for each of the shop's words)
is warmed up on a scripted shopper that errs in one of ten turns, then trained with turn-level PPO on the purchase's
score. A fifth of the products is held out: goals of the evaluation ask for products that were never to be bought in
training. Mean score on 256 of them at temperature 1 before and after 45 steps: .394 and .701, .435 and .629, .477 and
.695, .441 and .702 on seeds 0 to 3 (95 % intervals within +-.033 and +-.023); success .157 and .228, .055 and .040,
.138 and .160, .131 and .188. Buying the first item found scores .616, the scripted shopper 1. 21 minutes on two cores,
35 to 38 of CPU time.
"""

from ml_collections import ConfigDict

from configs.sections import algorithm_section, base_config, env_section, parse_algo, section, sft_section
from envs.webshop.words import words
from turnppo_jax.rollout.sampler import SamplerSettings
from turnppo_jax.settings import ModelSettings, RolloutSettings, RowSettings
from turnppo_jax.training.evaluation import EvaluationSettings
from turnppo_jax.training.forward import ForwardSettings
from turnppo_jax.training.optimizer import OptimizerConfig


def get_config(argument: str = "") -> ConfigDict:
    """The config; `argument` is "" or "algo=NAME"."""
    algo = parse_algo(argument)
    settings = {"num_minibatches": 2, "normalizer": "tokens"}
    algorithm = algorithm_section(algo, **settings)
    config = base_config(algo)
    config.steps = 45
    config.model = section(ModelSettings, name="tiny-qwen3", words=words())
    shop = {"num_products": 1000, "prompt": "compact", "thinking": False, "products_per_page": 5, "max_turns": 8}
    # As the environment has them; named so that a flag can change them.
    shop |= {"catalogue": "builtin", "goals": "synthetic", "fair_options": False}
    config.env = env_section("webshop", **shop)
    config.sampler = section(
        SamplerSettings, num_slots=64, context_length=640, decode_chunk=8, prefill_chunk=128, prefill_rows=8
    )
    config.rollout = section(RolloutSettings, num_prompts=256 // algorithm.group_size, max_turns=8, max_turn_tokens=32)
    config.rows = section(RowSettings, micro_rows=5, tokens=768)
    config.forward = section(ForwardSettings, remat="full")  # on a CPU less work than keeping what it makes again
    config.algorithm = algorithm
    config.actor_optimizer = section(OptimizerConfig, learning_rate=4e-4, warmup_steps=3)
    config.critic_optimizer = section(OptimizerConfig, learning_rate=1e-3, warmup_steps=10)
    config.sft = sft_section(
        steps=700, evaluate_every=100, learning_rate=1.5e-3, betas=(0.9, 0.98), rows=11, row_tokens=768,
        num_demonstrations=12_000, options={"query": "request", "noise": 0.1}, remat="full",
    )  # fmt: skip
    config.evaluation = section(EvaluationSettings, num_seeds=256, samples=4, greedy=True)
    return config

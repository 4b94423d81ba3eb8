"""Turn-PPO and the methods beside it on Sokoban with the paper's numbers (arXiv 2512.17008), on a TPU slice.

    CONFIG=configs/paper/sokoban.py:algo=turn_ppo,model=qwen2.5-3b,topology=v5e:4x4
    python -m turnppo_jax.plan --config=$CONFIG --topology=v5e:4x4
    python -m turnppo_jax.train --config=$CONFIG --workdir=DIR

Pairs: qwen2.5-3b on v5e:4x4 and v6e:4x4, qwen2.5-7b on v5p:2x2x4 and v6e:8x8. `plan` has compiled every program of
each with turn_ppo. `algo=` takes every name of `turnppo_jax.training.presets`, where each says what it changes.

From the paper: γ .99, λ .9, clip .2, product of token ratios, Monte-Carlo critic target, actor 1e-6, critic 1e-5, no
KL; B_R 512 trajectories a step, B_M 128, one epoch; GRPO with a KL of .001, in 32 groups of 16. Its text says one
trajectory a room for PPO, its table 16, which looks like the row of GRPO: here one. From RAGEN, which the paper builds
on, because the paper does not say: rooms of 6x6 cells with one box, 5 turns of at most 400 tokens, 5 actions a turn and
10 in all, 200 steps, gradient norm 1. From verl: dual clip 3.

Choices for the hardware: the weights are split over every chip; on v6e:8x8, where a minibatch leaves a chip 3,100
tokens, over pairs of chips within that (tensor=2), or gathering them takes longer than computing with them. Rows of
3,328 tokens hold two average episodes: 64 rows a minibatch, a number that every slice divides. The results of weight
products are kept for the backward pass (remat="dots") where they fit. The head takes 512 tokens at a time: its
gradient, as large as the vocabulary, is added to once a chunk.

The paper reports mean rewards from 1.93 to 3.74 for its runs, on the scale of this environment (a solved room about
10.5, a failed one -1). These configs have not been run.
"""

from ml_collections import ConfigDict

from configs.paper.arguments import Hardware, parse, shared_sections
from configs.sections import env_section, section
from turnppo_jax.planning.workload import PlanSettings
from turnppo_jax.rollout.sampler import SamplerSettings
from turnppo_jax.settings import RolloutSettings, RowSettings

HARDWARE = {
    ("qwen2.5-3b", "v5e:4x4"): Hardware(16, 1, 16, "dots", 128, 2),
    ("qwen2.5-3b", "v6e:4x4"): Hardware(16, 1, 32, "dots", 128, 2),
    ("qwen2.5-7b", "v5p:2x2x4"): Hardware(16, 1, 64, "dots", 128, 4),
    ("qwen2.5-7b", "v6e:8x8"): Hardware(32, 2, 64, "dots", 32, 4),
}


def get_config(argument: str = "") -> ConfigDict:
    """The config; `argument` is "algo=NAME,model=NAME,topology=NAME"."""
    model, hardware, algo, _ = parse(argument, HARDWARE)
    config = shared_sections(model, hardware, algo)
    config.env = env_section("sokoban", num_workers=8, prompt="full", actions_per_turn=5)
    # 270 + 4 * 70 tokens of prompts and 5 * 400 of responses at most.
    config.sampler = section(
        SamplerSettings, num_slots=hardware.slots, context_length=2560, decode_chunk=32, prefill_chunk=256,
        prefill_rows=8, compute_dtype="bfloat16",
    )  # fmt: skip
    config.rollout = section(
        RolloutSettings, num_prompts=512 // config.algorithm.group_size, max_turns=5, max_turn_tokens=400
    )
    config.rows = section(RowSettings, micro_rows=hardware.micro_rows, tokens=3328, sampled=2560)
    # Prompts as this environment writes them, in tokens of Qwen3; responses of half the limit.
    config.plan = section(PlanSettings, first_prompt_tokens=270, next_prompt_tokens=70, response_tokens=200)
    return config

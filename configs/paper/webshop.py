"""Turn-PPO and the methods beside it on WebShop with the paper's numbers (arXiv 2512.17008), 15k tokens of context.

    CONFIG=configs/paper/webshop.py:algo=turn_ppo,model=qwen3-1.7b,thinking=on,topology=v5e:4x4
    python -m turnppo_jax.plan --config=$CONFIG --topology=v5e:4x4
    python -m turnppo_jax.train --config=$CONFIG --workdir=DIR

Pairs: qwen3-1.7b and qwen2.5-3b on v5e:4x4; `plan` has compiled every program of each with turn_ppo. `algo=` takes
every name of `turnppo_jax.training.presets`, where each says what it changes. thinking=off asks for an answer without a
thinking block, and has Qwen3's chat template close its own at once.

From the paper: γ .99, λ .9, clip .2, product of token ratios, Monte-Carlo critic target, actor 1e-6, critic 1e-5, no
KL; B_R 256 trajectories a step, one a goal, B_M 64 (a quarter, as in its Sokoban runs), one epoch; GRPO with a KL of
.001, in 16 groups of 16. From RAGEN, which the paper builds on, because the paper does not say: 9 turns of one action,
400 tokens a turn, a context of 15,000 tokens (here 15,360, a multiple of 128), 1,000 products with synthetic goals, 200
steps, gradient norm 1. From verl: dual clip 3. Goals are split by product, not by index as RAGEN does: there, most
products of the test goals are trained on.

The catalogue: the official files of 1,000 products, as `launch/webshop.sh --size=small` fetches them, or another folder
by --config.env.kwargs.catalogue=DIR; "builtin" needs no files.

Choices for the hardware: the weights are split over every chip, one row of the whole context a chip. Only the inputs of
the layers are kept for the backward pass (remat="full"): the results of its products would take 15 GiB a row. A slot's
cache takes 1.6 GiB with qwen3-1.7b (8 key/value heads) and .6 with qwen2.5-3b (2), so that a host plays its 64 episodes
24 or 32 at a time.

These configs have not been run.
"""

from ml_collections import ConfigDict

from configs.paper.arguments import Hardware, parse, shared_sections
from configs.sections import env_section, section
from turnppo_jax.planning.workload import PlanSettings
from turnppo_jax.rollout.sampler import SamplerSettings
from turnppo_jax.settings import RolloutSettings, RowSettings

HARDWARE = {
    ("qwen3-1.7b", "v5e:4x4"): Hardware(16, 1, 16, "full", 24, 4),
    ("qwen2.5-3b", "v5e:4x4"): Hardware(16, 1, 16, "full", 32, 2),
}


def get_config(argument: str = "") -> ConfigDict:
    """The config; `argument` is "algo=NAME,model=NAME,topology=NAME,thinking=on|off"."""
    model, hardware, algo, chosen = parse(argument, HARDWARE, thinking=("on", "off"))
    thinking = chosen["thinking"] == "on"
    config = shared_sections(model, hardware, algo, thinking=thinking)
    # Goals, pages and the comparison of options are as the environment has them; named so that a flag can change them.
    config.env = env_section(
        "webshop-ragen", num_workers=8, reset_timeout_s=120.0, catalogue="data/webshop/small", thinking=thinking,
        goals="synthetic", observation="text", fair_options=False,
    )  # fmt: skip
    config.sampler = section(
        SamplerSettings, num_slots=hardware.slots, context_length=15360, decode_chunk=32, prefill_chunk=512,
        prefill_rows=4, compute_dtype="bfloat16",
    )  # fmt: skip
    config.rollout = section(
        RolloutSettings, num_prompts=256 // config.algorithm.group_size, max_turns=9, max_turn_tokens=400
    )
    config.rows = section(RowSettings, micro_rows=hardware.micro_rows, sampled=4608)
    # Pages of 40 golden episodes have 300 tokens in the average, the clickable names 80, RAGEN's hints 200; the paper's
    # samples buy after five turns. Responses of a quarter of the limit.
    config.plan = section(
        PlanSettings, turns=5, first_prompt_tokens=500, next_prompt_tokens=600, response_tokens=100
    )  # fmt: skip
    return config

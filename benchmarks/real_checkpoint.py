"""Greedy text of a real checkpoint beside transformers: five chat prompts, the same tokens or where they part.

    python -m benchmarks.real_checkpoint MODEL_DIR        (needs torch)

Exit code 1 where any text differs.
"""

import sys

import numpy as np
import torch
import transformers

from turnppo_jax.parallel.mesh import make_mesh
from turnppo_jax.policy import load_policy
from turnppo_jax.rollout.sampler import Sampler, SamplerSettings, Sampling, episode_keys
from turnppo_jax.rollout.scheduler import Scheduler

PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three fruits.",
    "Explain in one sentence why the sky is blue.",
    "What is 7 plus 5?",
)
NEW_TOKENS = 48


def ours(directory: str) -> list[list[int]]:
    """Greedy response ids of our sampler; all prompts in slots of one cache."""
    policy = load_policy(directory, seed=0, mesh=make_mesh())
    settings = SamplerSettings(num_slots=len(PROMPTS), context_length=256, decode_chunk=16, prefill_chunk=64)
    sampler = Sampler(policy.sizes, make_mesh(), settings, policy.chat.eos_ids)
    sampler.set_params(policy.params)
    scheduler = Scheduler(sampler, Sampling(temperature=0.0), policy.chat.decode)
    for slot, (prompt, key) in enumerate(zip(PROMPTS, episode_keys(0, 0, 0, len(PROMPTS)), strict=True)):
        scheduler.open(slot, key)
        scheduler.extend(slot, policy.chat.first_prompt(prompt), NEW_TOKENS)
    out = {}
    while scheduler.busy:
        scheduler.launch()
        out |= {response.slot: response.ids.tolist() for response in scheduler.collect()}
    return [out[slot] for slot in range(len(PROMPTS))]


def theirs(directory: str) -> list[list[int]]:
    """Greedy response ids of transformers on the tokenizer's own chat template."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    out = []
    for prompt in PROMPTS:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        generated = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        out.append(generated[0, ids.shape[1] :].tolist())
    return out


def main() -> int:
    """Prints both texts of each prompt."""
    directory = sys.argv[1]
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    differ = 0
    for prompt, mine, reference in zip(PROMPTS, ours(directory), theirs(directory), strict=True):
        same = np.array_equal(mine, reference)
        differ += not same
        print(f"{'same' if same else 'DIFFERENT'} ({len(mine)} tokens): {prompt!r} -> {tokenizer.decode(mine)!r}")
        if not same:
            print(f"  transformers: {tokenizer.decode(reference)!r}")
    print(f"{len(PROMPTS) - differ} of {len(PROMPTS)} texts are the same")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())

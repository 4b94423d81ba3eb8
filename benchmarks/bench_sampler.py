"""Our side of the sampling comparison: tokens/s, a shape not seen before, and the turns of an episode.

python -m benchmarks.bench_sampler [preset]
"""

import sys
import time

from benchmarks.workload import CFG, Conversations, emit, make_model, prompts, timed
from turnppo_jax.rollout.sampler import Sampling

preset = sys.argv[1] if len(sys.argv) > 1 else "s8m"
work = CFG["sampler"]
batch, prompt_length, num_tokens = work["batch"], work["prompt_len"], work["gen_len"]
sizes, params = make_model(preset)
asked = prompts(batch, prompt_length)
conversations = Conversations(
    sizes, params, batch, work["kv_cache"], decode_chunk=32, prefill_chunk=128, prefill_rows=batch
)


def sample(sampling, tokens=num_tokens, prompt=asked, of=conversations):
    """One batch from empty slots; log-probs always come with the tokens."""
    of.begin(sampling)
    return of.turn(prompt, tokens)


for mode, sampling in (
    ("top_p=1", Sampling()),
    ("greedy", Sampling(temperature=0.0)),
    ("top_p=.95", Sampling(top_p=0.95)),
):
    row = timed(lambda sampling=sampling: sample(sampling))
    emit("ours_sampler", preset=preset, mode=mode, tok_s_median=round(batch * num_tokens / row["median_s"], 1), **row)
emit("ours_sampler_prefill_plus_1", preset=preset, **timed(lambda: sample(Sampling(), tokens=1)))

one = Conversations(sizes, params, 1, work["kv_cache"], decode_chunk=32, prefill_chunk=128, prefill_rows=1)
row = timed(lambda: sample(Sampling(), prompt=asked[:1], of=one))
emit("ours_sampler_batch1", preset=preset, tok_s_median=round(num_tokens / row["median_s"], 1), **row)

# Another prompt length and budget: one more bucket of prefill, no other program.
before = conversations.sampler.num_programs
started = time.perf_counter()
sample(Sampling(), tokens=64, prompt=prompts(batch, 60))
first = time.perf_counter() - started
started = time.perf_counter()
sample(Sampling(), tokens=50, prompt=prompts(batch, 50))
emit(
    "ours_sampler_new_shape_first_call",
    preset=preset,
    seconds=round(first, 3),
    next_length_s=round(time.perf_counter() - started, 3),
    programs_added=conversations.sampler.num_programs - before,
)

# An episode of four turns, one conversation at a time, as an agent's loop without batching would play it.
episodes = Conversations(sizes, params, 1, 1024, decode_chunk=24, prefill_chunk=128, prefill_rows=1)
for episode in range(3):
    ids, turns = prompts(1, 512, episode), []
    episodes.begin(Sampling())
    for length in (60, 41, 37, 52):
        started = time.perf_counter()
        episodes.turn(ids[:, :length], 24)
        ids = ids[:, length:]
        turns.append(round(time.perf_counter() - started, 4))
    emit("ours_turns", preset=preset, episode=episode, turn_s=turns, programs=episodes.sampler.num_programs)

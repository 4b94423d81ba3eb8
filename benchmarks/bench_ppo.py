"""Our side of the comparison of whole PPO iterations: rollout, scoring, advantages, actor and critic update.

    python -m benchmarks.bench_ppo [preset]

The same tokens and the same three models (actor, critic with a backbone of its own, KL reference) as the other
packages' scripts; a response is one turn.
"""

import os
import statistics
import sys
import time

import jax
import numpy as np

from benchmarks.workload import CFG, Conversations, emit, make_model, prompts
from turnppo_jax.models.critic import init_critic
from turnppo_jax.parallel.mesh import make_mesh
from turnppo_jax.rollout.sampler import Sampling
from turnppo_jax.training.batching import BatchShape
from turnppo_jax.training.forward import ForwardSettings, LearnerSettings
from turnppo_jax.training.learner import Learner
from turnppo_jax.training.optimizer import OptimizerConfig
from turnppo_jax.training.presets import algorithm_by_name
from turnppo_jax.types import Trajectory, Turn

preset = sys.argv[1] if len(sys.argv) > 1 else "s8m"
num_steps = int(os.environ.get("STEPS", "6"))
work = CFG["ppo"]
batch, prompt_length, num_tokens = work["batch"], work["prompt_len"], work["gen_len"]
row_length = prompt_length + num_tokens

sizes, reference = make_model(preset)
conversations = Conversations(
    sizes, reference, batch, row_length, decode_chunk=32, prefill_chunk=128, prefill_rows=batch
)
optimizer = OptimizerConfig(learning_rate=1e-5, weight_decay=1e-4, max_grad_norm=None)  # optax.adamw(1e-5) of the peers
learner = Learner(
    sizes,
    make_mesh(devices=jax.devices()[:1]),
    LearnerSettings(
        shape=BatchShape(
            rows=batch,
            tokens=row_length,
            turns=1,
            sampled=num_tokens,
            trajectories=batch,
            max_turns=1,
            micro_rows=int(os.environ.get("MICRO_ROWS", "4")),
        ),
        forward=ForwardSettings(remat="dots"),  # the fastest of the three here
        algorithm=algorithm_by_name(
            "turn_ppo", gamma=work["gamma"], gae_lambda=work["lambda"], kl_coef=work["beta_kl"], epochs=work["epochs"]
        ),
    ),
    optimizer,
    optimizer,
)
actor, critic = learner.init_states(reference, init_critic(sizes, jax.random.key(1)))

iterations, rollouts, cpu, metrics = [], [], [], {}
for step in range(num_steps):
    started, cpu_started = time.perf_counter(), time.process_time()
    conversations.sampler.set_params(actor.params)
    conversations.begin(Sampling())
    asked = prompts(batch, prompt_length, seed=step)
    trajectories = [
        Trajectory(
            turns=[
                Turn(
                    prompt_ids=np.asarray(asked[response.slot], np.int32),
                    response_ids=response.ids,
                    behavior_logprobs=response.logprobs,
                    reward=0.25 + 0.5 * (response.slot % 2),
                    stop=response.stop,
                    policy_step=step,
                )
            ],
            terminated=True,
            truncated=False,
            group=response.slot,
            seed=response.slot,
            episode=response.slot,
        )
        for response in conversations.turn(asked, num_tokens)
    ]
    rollouts.append(round(time.perf_counter() - started, 3))
    actor, critic, result = learner.step(actor, critic, trajectories, step=step, ref_params=reference)
    jax.block_until_ready((actor, critic))
    iterations.append(round(time.perf_counter() - started, 3))
    cpu.append(round(time.process_time() - cpu_started, 3))
    metrics = result.metrics
emit(
    "ours_ppo_iteration",
    preset=preset,
    iter_s=iterations,
    rollout_s=rollouts,
    cpu_s=cpu,  # of this process, which a busy machine disturbs less than wall time
    median_s=round(statistics.median(iterations[1:]), 3),
    programs=learner.compile_counts() | {"sampler": conversations.sampler.num_programs},
    metrics={name: round(value, 6) for name, value in metrics.items()},
)

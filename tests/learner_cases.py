"""A tiny model, random trajectories and a learner around them, for the tests of the training layer."""

import dataclasses

import jax
import numpy as np
import pytest

from turnppo_jax.models.critic import init_critic
from turnppo_jax.models.decoder import init_decoder
from turnppo_jax.models.sizes import ModelSizes
from turnppo_jax.parallel.mesh import make_mesh
from turnppo_jax.training.algorithm import AlgorithmConfig
from turnppo_jax.training.batching import BatchShape
from turnppo_jax.training.forward import ForwardSettings, LearnerSettings
from turnppo_jax.training.learner import Learner
from turnppo_jax.training.optimizer import OptimizerConfig
from turnppo_jax.types import StopReason, Trajectory, Turn

SIZES = ModelSizes(
    family="qwen3", vocab_size=37, num_token_ids=35, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=8, intermediate_size=24, rope_theta=1e4, rms_norm_eps=1e-6, tie_word_embeddings=True, qkv_bias=False,
    qk_norm=True, max_position_embeddings=256,
)  # fmt: skip
SHAPE = BatchShape(rows=8, tokens=40, turns=4, sampled=24, trajectories=8, max_turns=4, micro_rows=2)
ADAM = OptimizerConfig(learning_rate=1e-2)
NO_CLIP = dataclasses.replace(ADAM, max_grad_norm=None)


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """These programs run once or twice: most of the compiler's work on them would be wasted."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def make_turn(rng, prompt=3, response=2, reward=0.0, starts_row=False):
    ids = rng.integers(0, SIZES.num_token_ids, size=prompt + response).astype(np.int32)
    return Turn(
        prompt_ids=ids[:prompt],
        response_ids=ids[prompt:],
        behavior_logprobs=-rng.random(response).astype(np.float32) - 3.0,
        reward=reward,
        stop=StopReason.EOS,
        policy_step=0,
        starts_row=starts_row,
    )


def make_trajectories(seed=0, count=6, window=False, truncated=True):
    """Trajectories of 1 to 3 turns with rewards; every other one is truncated with an unanswered prompt."""
    rng = np.random.default_rng(seed)
    out = []
    for episode in range(count):
        turns = [
            make_turn(rng, int(rng.integers(2, 5)), int(rng.integers(1, 5)), float(rng.normal()), window)
            for _ in range(rng.integers(1, 4))
        ]
        cut = truncated and episode % 2 == 1
        out.append(
            Trajectory(
                turns=turns,
                terminated=not cut,
                truncated=cut,
                group=episode // 2,
                seed=episode,
                episode=episode,
                final_prompt_ids=rng.integers(0, 30, size=3).astype(np.int32) if cut else None,
            )
        )
    return out


def actor_params(seed=0):
    return init_decoder(SIZES, jax.random.key(seed))


def critic_params(seed=1):
    """A critic whose value head is not zero, so that values matter."""
    params = init_critic(SIZES, jax.random.key(seed))
    head = 0.5 * jax.random.normal(jax.random.key(seed + 100), params["value_head"]["kernel"].shape)
    return params | {"value_head": params["value_head"] | {"kernel": head}}


def make_learner(shape=SHAPE, actor=ADAM, critic=ADAM, seed=0, forward=None, **algorithm):
    settings = LearnerSettings(shape, AlgorithmConfig(**algorithm), forward or ForwardSettings(head_chunk=8))
    return Learner(SIZES, make_mesh(devices=jax.devices()[:1]), settings, actor, critic, seed=seed)


def gradients(state):
    """The gradient of a first Adam step without a clip: its first moment is (1 − β1) times it."""
    adam = next(part for part in state.opt_state if hasattr(part, "mu"))
    return jax.tree.map(lambda m: np.asarray(m) / (1 - ADAM.betas[0]), adam.mu)


def one_step(learner, trajectories, **step):
    """(actor gradient, critic gradient or None, result) of a first step from fresh states."""
    actor, critic = learner.init_states(actor_params(), critic_params())
    actor, critic, result = learner.step(actor, critic, trajectories, step=0, **step)
    return gradients(actor), None if critic is None else gradients(critic), result


def assert_trees_close(got, want, tolerance=2e-5):
    """Leaf by leaf, in units of the leaf's largest entry.

    Sums of some hundred float32 terms in another order differ by about 1e-6 of that; a single entry may be small by
    cancellation and differ by more of itself.
    """

    def close(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1e-6))

    jax.tree.map(close, got, want)

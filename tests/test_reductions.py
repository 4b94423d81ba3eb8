"""Methods that are others in a special case, through the learner's own gradients.

The same at the level of the kernels stands beside each of them: bi-level and decoupled GAE in
test_kernels_gae_variants, GSPO and the objectives in test_kernels_objectives, MT-GRPO in test_kernels_critic_free,
GiGPO and HGPO in test_kernels_anchor_groups.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests import learner_reference
from tests.learner_cases import (
    NO_CLIP,
    actor_params,
    assert_trees_close,
    make_learner,
    make_trajectories,
    make_turn,
    one_step,
    quick_compilation,  # noqa: F401  (a fixture of this module)
)
from tests.test_advantages import SHAPE, estimate, filled
from turnppo_jax import kernels
from turnppo_jax.training.advantages import estimate as advantages_of
from turnppo_jax.training.algorithm import AlgorithmConfig
from turnppo_jax.training.presets import algorithm_by_name
from turnppo_jax.training.selection import select

LEARNER = {"actor": NO_CLIP, "critic": NO_CLIP}
GROUP = {"estimator": "group", "group_size": 2, "whitening": "none", "dual_clip": None}


def with_turns_of(trajectories, response, turns=None):
    """The trajectories with other turns of their own rewards: so many tokens a response, so many turns."""
    rng = np.random.default_rng(3)
    for trajectory in trajectories:
        kept = trajectory.turns[:turns]
        trajectory.turns = [make_turn(rng, 3, response or len(turn.response_ids), turn.reward) for turn in kept]
    return trajectories


def test_turn_ppo_with_one_token_a_turn_is_token_ppo():
    trajectories = with_turns_of(make_trajectories(), response=1)
    settings = {"gamma": 0.9, "gae_lambda": 0.8, **LEARNER}
    turn = one_step(make_learner(**settings), trajectories)
    token = one_step(make_learner(estimator="token_gae", ratio_level="token", **settings), trajectories)
    assert_trees_close(turn[0], token[0])
    assert_trees_close(turn[1], token[1])
    for a, b in zip(turn[2].turn_advantages, token[2].turn_advantages):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@functools.cache
def grpo_step():
    return one_step(make_learner(ratio_level="token", **GROUP, **LEARNER), make_trajectories())


def test_grpo_on_tokens_at_ratio_one_is_reinforce_with_a_group_baseline():
    """∇ = −1/M Σ_i 1/n_i A_i Σ_t ∇ log π_t, with A_i the score against those of its group."""
    trajectories = make_trajectories()
    scores, groups = [t.total_reward for t in trajectories], [t.group for t in trajectories]
    advantages = np.asarray(kernels.group_advantages(scores, groups))
    ids, spans = learner_reference.lines(trajectories)

    def reinforce(params):
        logprobs = learner_reference.next_logprobs(params, ids, 1.0)
        total = 0.0
        for m, own in enumerate(spans):
            said = sum(logprobs[m, start : start + n].sum() for start, n in own)
            total -= advantages[m] * said / (len(spans) * sum(n for _, n in own))
        return total

    assert_trees_close(grpo_step()[0], jax.jit(jax.grad(reinforce))(actor_params()))
    assert np.abs(advantages).max() > 0.5


def test_gspo_is_geometric_mean_one_turn_group_and_normalizer_trajectories():
    trajectories = with_turns_of(make_trajectories(), response=None, turns=1)
    parts = {"ratio_pooling": "geometric_mean", "normalizer": "trajectories", **GROUP, **LEARNER}
    sequence = one_step(make_learner(ratio_level="sequence", **parts), trajectories)
    turn = one_step(make_learner(ratio_level="turn", **parts), trajectories)
    assert_trees_close(sequence[0], turn[0])
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(turn[0])) > 1e-3


def test_rloo_is_n_over_n_minus_one_times_grpo_without_std():
    scores, groups = [0.5, -1.0, 2.0, 3.0, 0.0], [0, 0, 0, 1, 1]
    centred = kernels.group_advantages(scores, groups, scale="none")
    left_out = kernels.group_advantages(scores, groups, scale="none", baseline="leave_one_out")
    np.testing.assert_allclose(left_out, np.asarray(centred) * [3 / 2, 3 / 2, 3 / 2, 2, 2], rtol=1e-6)
    np.testing.assert_allclose(left_out[0], 0.5 - (-1.0 + 2.0) / 2, rtol=1e-6)


def test_monte_carlo_advantages_are_gae_at_lambda_one():
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 4, 5)).astype(np.float32)
    mask = rng.random((4, 5)) < 0.7
    advantages, _ = kernels.turn_gae(rewards, values, mask, gamma=0.9, gae_lambda=1.0)
    returns = kernels.discounted_returns(rewards, mask, gamma=0.9)
    np.testing.assert_allclose(advantages, np.where(mask, returns - values, 0), rtol=1e-5, atol=1e-5)


def test_vine_ppo_with_exact_values_is_turn_gae_at_lambda_zero():
    trajectories = make_trajectories(8)
    values = np.random.default_rng(0).normal(size=(SHAPE.trajectories, SHAPE.max_turns)).astype(np.float32)
    after = np.zeros(SHAPE.trajectories)
    plain = {"gae_lambda": 0.0, "whitening": "none"}
    _, want = estimate(trajectories, AlgorithmConfig(**plain), values, after)
    cfg = AlgorithmConfig(estimator="branches", **plain)
    facts = select(trajectories, SHAPE, cfg, branch_values=values[: len(trajectories)]).facts
    table = filled(trajectories, cfg, values, after)
    got = jax.jit(functools.partial(advantages_of, cfg=cfg))(table, facts, jax.random.key(0))
    np.testing.assert_allclose(got.advantages, want.advantages, rtol=1e-5, atol=1e-6)
    assert np.abs(want.advantages).max() > 0.5


def test_st_ppo_without_its_correction_is_token_ppo_with_the_geometric_turn_ratio():
    plain = algorithm_by_name("st_ppo", clip_bias_correction=False)
    assert plain == algorithm_by_name(
        "token_ppo", ratio_level="turn", ratio_pooling="geometric_mean", normalizer="trajectory_tokens"
    )
    # At ratio 1 its gradient is that of the token ratio with the mean advantage of the turn.
    turn_ids = np.int32([[0, 0, 0, -1, 1, 1], [0, -1, 1, 1, 1, 1]])
    rng = np.random.default_rng(0)
    advantages, logprobs = rng.normal(size=(2, *turn_ids.shape)).astype(np.float32)
    means = np.zeros_like(advantages)
    for row, k in ((0, 0), (0, 1), (1, 0), (1, 1)):
        means[row, turn_ids[row] == k] = advantages[row, turn_ids[row] == k].mean()
    weights = kernels.loss_weights(turn_ids, np.ones((2, 2), bool), level="token", normalizer="trajectory_tokens")

    def gradient(advantages, **levels):
        def loss(x):
            return kernels.policy_loss(x, logprobs, turn_ids, advantages, weights, advantage_level="token", **levels)[0]

        return jax.jit(jax.grad(loss))(logprobs)

    turn = gradient(advantages, ratio_level="turn", ratio_pooling="geometric_mean")
    np.testing.assert_allclose(turn, gradient(means, ratio_level="token"), rtol=1e-5, atol=1e-7)
    assert np.abs(turn).max() > 0.01


def test_the_sampler_s_own_logprobs_weigh_exactly_one():
    turn_ids, trajectory_ids = np.int32([[0, 0, -1, 1, 1, 2]]), np.int32([[4, 4, 7]])
    logprobs = np.random.default_rng(0).normal(size=turn_ids.shape).astype(np.float32)
    for level in ("token", "turn", "sequence"):
        for mode in ("truncate", "mask"):
            weights, metrics = kernels.importance_weights(
                logprobs,
                logprobs,
                turn_ids,
                3,
                level=level,
                mode=mode,
                low=0.5,
                high=2.0,
                trajectory_ids=trajectory_ids,
            )
            inside = turn_ids >= 0 if level == "token" else np.ones((1, 3), bool)
            np.testing.assert_array_equal(np.asarray(weights)[inside], 1.0)
            assert metrics["cut_share"] == 0


def test_kl_in_the_reward_is_in_expectation_kl_in_the_loss_by_k2():
    """E[k1 ∇log π] = ∇KL = E[∇k2], summed over a whole distribution: one response, no baseline, γ = 1."""
    logits, reference = np.random.default_rng(0).normal(size=(2, 6)).astype(np.float32)
    ref = jax.nn.log_softmax(reference)
    inside = np.ones(6, bool)

    def divergence(logits):
        policy = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(policy) * (policy - ref))

    def expected(kind, of_reward):
        def loss(logits):
            policy = jax.nn.log_softmax(logits)
            drawn = jax.lax.stop_gradient(jnp.exp(policy))  # how often each of the six is sampled
            penalty = kernels.kl_penalty(policy, ref, inside, kind=kind)
            if of_reward:  # the reward is lowered by the penalty: −(−k) log π
                return jnp.sum(drawn * jax.lax.stop_gradient(penalty) * policy)
            return jnp.sum(drawn * penalty)

        return jax.grad(loss)(logits)

    want = jax.grad(divergence)(logits)
    np.testing.assert_allclose(expected("k1", of_reward=True), want, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(expected("k2", of_reward=False), want, rtol=1e-4, atol=1e-6)
    assert np.abs(np.asarray(expected("k1", of_reward=False))).max() < 1e-6 < np.abs(want).max()

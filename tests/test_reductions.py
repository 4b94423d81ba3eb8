"""Methods that are others in a special case, through the learner's own gradients.

The same at the level of the kernels stands beside each of them: bi-level and decoupled GAE in
test_kernels_gae_variants, GSPO and the objectives in test_kernels_objectives, MT-GRPO in test_kernels_critic_free,
GiGPO and HGPO in test_kernels_anchor_groups.
"""

import functools

import jax
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
from turnppo_jax import kernels

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

"""Epochs, minibatches, the other algorithms, a shared backbone, and steps that go wrong."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import learner_reference
from tests.learner_cases import (
    ADAM,
    NO_CLIP,
    actor_params,
    assert_trees_close,
    critic_params,
    make_learner,
    make_trajectories,
    one_step,
    quick_compilation,  # noqa: F401  (a fixture of this module)
)
from turnppo_jax import kernels


@functools.cache
def epochs():
    """Three passes over two minibatches; the policy waits for one step, the critic's rate warms up on its own."""
    slow = dataclasses.replace(ADAM, warmup_steps=100)
    return make_learner(epochs=3, num_minibatches=2, critic_warmup_steps=1, critic=slow)


def run(learner, trajectories, step=1, actor=None):
    actor, critic = learner.init_states(actor or actor_params(), critic_params())
    return learner.step(actor, critic, trajectories, step=step)


def test_ratio_is_one_before_the_first_update_and_not_after():
    """Fault 21: scored log-probs are the anchor of every epoch; the first minibatch has ratio 1."""
    _, _, result = run(epochs(), make_trajectories())
    # float32 scoring by the same forward function on the same rows: at most 1e-4 (DESIGN 8)
    assert result.metrics["policy/turn_log_ratio_std_first_minibatch"] <= 1e-4
    assert result.metrics["policy/turn_log_ratio_std"] > 1e-2
    assert result.metrics["optim/steps_actor"] == result.metrics["optim/steps_critic"] == 6


def test_the_critic_learns_alone_at_the_start_with_counters_of_its_own():
    """Fault 56; fault 19: two optimizers, two rates, two counts."""
    start = actor_params()
    actor, critic, result = run(epochs(), make_trajectories(), step=0)
    jax.tree.map(np.testing.assert_array_equal, actor.params, start)
    assert (int(actor.step), int(critic.step)) == (0, 6)
    assert "policy/loss" not in result.metrics and result.metrics["value/loss"] > 0
    assert "policy/entropy" in result.metrics  # the policy was scored all the same
    actor, critic, result = epochs().step(actor, critic, make_trajectories(1), step=1)
    assert (int(actor.step), int(critic.step)) == (6, 12)
    assert result.metrics["optim/lr"] == pytest.approx(0.01)
    assert result.metrics["optim/lr_critic"] == pytest.approx(0.01 * 7 / 100)


def test_a_nan_in_the_policy_stops_the_policy_alone():
    """Fault 25: nothing changes but the count; the critic goes on as if nothing had happened."""
    broken = actor_params()
    broken["final_norm"]["scale"] = broken["final_norm"]["scale"].at[0].set(jnp.nan)
    actor, critic, result = run(epochs(), make_trajectories(), actor=broken)
    jax.tree.map(np.testing.assert_array_equal, actor.params, broken)
    assert (int(actor.step), int(actor.skipped), int(critic.step), int(critic.skipped)) == (0, 6, 6, 0)
    assert result.metrics["optim/skipped_actor"] == 6 and "policy/loss" not in result.metrics
    _, healthy, _ = run(epochs(), make_trajectories())
    jax.tree.map(np.testing.assert_array_equal, critic.params, healthy.params)
    assert np.isfinite(result.metrics["value/loss"])


def test_minibatches_are_a_function_of_seed_and_step():
    trajectories = make_trajectories()

    def members(step):
        minibatches = epochs()._minibatches(trajectories, np.arange(len(trajectories)), step)
        return [set(np.asarray(m.batch.trajectory_ids)[np.asarray(m.batch.turn_mask)].tolist()) for m in minibatches]

    assert members(4) == members(4)
    assert any(members(4) != members(step) for step in (5, 6, 7))
    for step in range(4, 8):
        first, second = members(step)
        assert first | second == set(range(6)) and not first & second


def test_varying_lengths_compile_nothing_new():
    """Fault 47: one shape serves every rollout, the short and the empty one too."""
    run(epochs(), make_trajectories())
    before = epochs().compile_counts()
    for seed, count, temperature in ((1, 8, 1), (2, 3, 0.5), (3, 1, np.float32(1.3)), (4, 0, 1.0)):
        actor, critic = epochs().init_states(actor_params(), critic_params())
        actor, critic, result = epochs().step(
            actor, critic, make_trajectories(seed, count), step=2, temperature=temperature
        )
        assert all(np.isfinite(value) for value in result.metrics.values())
    assert epochs().compile_counts() == before
    assert int(actor.step) == 0  # no trajectory, no optimizer step (fault 1)


def test_behavior_logprobs_are_a_choice():
    trajectories = make_trajectories()
    _, _, result = one_step(make_learner(old_logprobs="behavior"), trajectories)
    new = learner_reference.turn_logprobs(actor_params(), trajectories)
    gaps = [x - turn.behavior_logprobs for t, own in zip(trajectories, new) for x, turn in zip(own, t.turns)]
    np.testing.assert_allclose(
        result.metrics["policy/turn_log_ratio_std"], np.std([gap.sum() for gap in gaps]), rtol=1e-3
    )
    scored = run(epochs(), trajectories)[2]
    everything = np.abs(np.concatenate(gaps))
    for got in (result, scored):
        np.testing.assert_allclose(got.metrics["sampler/logprob_gap_mean"], everything.mean(), rtol=1e-3)
        np.testing.assert_allclose(got.metrics["sampler/logprob_gap_max"], everything.max(), rtol=1e-3)


def test_token_ppo_equals_the_plain_reference_with_truncated_importance_weights():
    """Token ratio, token GAE, V at the token before; weights min(exp(old − behavior), cap) beside."""
    trajectories = make_trajectories()
    subject = make_learner(
        estimator="token_gae", ratio_level="token", gamma=1.0, gae_lambda=0.9, importance_level="token",
        importance_high=0.8, actor=NO_CLIP, critic=NO_CLIP,
    )  # fmt: skip
    actor, critic, result = one_step(subject, trajectories)
    ids, _ = learner_reference.lines(trajectories)
    values = np.asarray(learner_reference.all_values(critic_params(), ids), np.float64)
    advantages, returns = learner_reference.estimates(values, trajectories, 1.0, 0.9, level="token")
    (_, policy), want_actor = jax.jit(
        jax.value_and_grad(
            lambda p: learner_reference.policy_loss(p, trajectories, advantages, level="token", cap=0.8), has_aux=True
        )
    )(actor_params())
    want_critic = jax.jit(
        jax.grad(
            lambda c: learner_reference.value_loss(
                learner_reference.all_values(c, ids), trajectories, returns, level="token"
            )
        )
    )(critic_params())
    assert_trees_close(actor, want_actor)
    assert_trees_close(critic, want_critic)
    np.testing.assert_allclose(result.metrics["policy/loss"], policy, rtol=1e-3, atol=1e-5)


def test_grpo_has_no_critic():
    trajectories = make_trajectories()
    subject = make_learner(estimator="group", group_size=2, ratio_level="token", whitening="none", entropy_coef=0.1,
                           dual_clip=None, critic=None, actor=NO_CLIP)  # fmt: skip
    actor, critic, result = one_step(subject, trajectories)
    assert critic is None and not any(name.startswith("value/") for name in result.metrics)
    assert result.turn_values == [[None] * len(t.turns) for t in trajectories]
    by_group = kernels.group_advantages([t.total_reward for t in trajectories], [t.group for t in trajectories])
    for line, want in zip(result.turn_advantages, by_group):
        np.testing.assert_allclose(line, np.full(len(line), want), rtol=1e-4)
    plain = -float(np.mean(by_group))
    np.testing.assert_allclose(result.metrics["policy/loss"], plain, rtol=1e-3, atol=1e-5)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(actor)) > 0


def test_a_shared_backbone_learns_from_both_losses():
    """The backbone's gradient is policy + coef · value; the head's own is that of the value loss."""
    trajectories = make_trajectories()
    subject = make_learner(share_backbone=True, value_loss_coef=0.25, actor=NO_CLIP, critic=NO_CLIP)
    actor, head, _ = one_step(subject, trajectories)
    ids, _ = learner_reference.lines(trajectories)
    value_head = critic_params()["value_head"]
    values = jax.jit(learner_reference.shared_values)
    advantages, returns = learner_reference.estimates(
        np.asarray(values(actor_params(), value_head, ids), np.float64), trajectories, 0.99, 0.9
    )

    def loss(params, head, coef):
        policy, _ = learner_reference.policy_loss(params, trajectories, advantages)
        return policy + coef * learner_reference.value_loss(values(params, head, ids), trajectories, returns)

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    assert_trees_close(actor, gradient(actor_params(), value_head, 0.25)[0])
    assert_trees_close(head["value_head"], gradient(actor_params(), value_head, 1.0)[1])


def test_missing_parts_are_named():
    with pytest.raises(ValueError, match=r"critic_optimizer=None with estimator='turn_gae'"):
        make_learner(critic=None)
    with pytest.raises(ValueError, match=r"critic_params=None with estimator='turn_gae'"):
        epochs().init_states(actor_params())

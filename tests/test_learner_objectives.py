"""Objectives, KL, importance weights and critic losses through the learner's own programs, against plain losses."""

import copy
import dataclasses
import functools

import jax
import numpy as np
import pytest

from tests import objective_oracle
from tests.learner_cases import (
    NO_CLIP,
    actor_params,
    assert_trees_close,
    critic_params,
    make_learner,
    make_trajectories,
    one_step,
    quick_compilation,  # noqa: F401  (a fixture of this module)
)
from tests.plain_rows import Rows
from turnppo_jax.training.algorithm import AlgorithmConfig
from turnppo_jax.training.mismatch import importance

GSPO = {
    "estimator": "group", "group_size": 2, "whitening": "none", "dual_clip": None, "ratio_level": "sequence",
    "ratio_pooling": "geometric_mean", "clip_low": 0.1, "clip_high": 0.1, "old_logprobs": "behavior", "kl_coef": 0.3,
    "kl_kind": "k1", "importance_high": 1.2, "kl_straight_through": True, "imitation_coef": 0.5, "critic": None,
    "actor": NO_CLIP,
}  # fmt: skip


@functools.cache
def gspo():
    return make_learner(**GSPO)


def some_succeed():
    trajectories = make_trajectories()
    for number in (1, 2, 4):
        trajectories[number].turns[-1].info = {"success": True}
    return trajectories


def group_advantages(scores, trajectories, scale=True):
    """(score − mean) / sample deviation, by group; of two members the scale hides by how much the scores differ."""
    groups, scores = np.array([t.group for t in trajectories]), np.asarray(scores, np.float64)
    members = [scores[groups == group] for group in groups]
    return np.array([(score - own.mean()) / (own.std(ddof=1) if scale else 1) for score, own in zip(scores, members)])


def every_token(trajectories):
    return np.concatenate([turn.behavior_logprobs for t in trajectories for turn in t.turns]).astype(np.float64)


def in_rows(by_turn):
    """(numbers [M, 24], turn_ids [M, 24], trajectory_ids [M, 4]): a row for each trajectory's sampled tokens."""
    x, ids = np.zeros((len(by_turn), 24)), np.full((len(by_turn), 24), -1)
    for m, own in enumerate(by_turn):
        row = np.concatenate(own)
        x[m, : len(row)] = row
        ids[m, : len(row)] = np.repeat(np.arange(len(own)), [len(turn) for turn in own])
    return x, ids, np.broadcast_to(np.arange(len(by_turn))[:, None], (len(by_turn), 4))


def test_gspo_with_kl_and_imitation_equals_the_plain_loss():
    """Ratio far from 1 (the old log-probs are the sampler's), value of k1 and gradient of k2, successes imitated."""
    trajectories = some_succeed()
    actor, _, result = one_step(gspo(), trajectories, ref_params=actor_params(5))
    assert_packed(result)
    rows = Rows(trajectories)
    new, ref = rows.logprobs(actor_params()), rows.logprobs(actor_params(5))
    advantages = group_advantages([t.total_reward for t in trajectories], trajectories)
    success = [t.success for t in trajectories]
    successful_tokens = sum(len(rows.columns[m]) for m in range(6) if success[m])
    assert sum(success) == 3
    slope, ratios, policy, imitation = np.zeros(new.shape), [], 0.0, 0.0
    for m, trajectory in enumerate(trajectories):
        columns, a = rows.columns[m], advantages[m]
        behavior = np.concatenate([turn.behavior_logprobs for turn in trajectory.turns])
        ratio = np.exp(np.mean(new[m, columns] - behavior))
        near = np.clip(ratio, 0.9, 1.1)
        ratios.append(ratio)
        policy -= min(ratio * a, near * a) / 6
        slope[m, columns] -= (ratio * a / (6 * len(columns))) * (ratio * a <= near * a)
        for start, n in rows.spans[m]:  # normalizer "trajectories": 1 / (M N_i n_k) a token
            where = slice(start, start + n)
            slope[m, where] += 0.3 * (new - ref)[m, where] / (6 * len(rows.spans[m]) * n)
        if success[m]:
            imitation += np.sum(new[m, columns]) / successful_tokens
            slope[m, columns] -= 0.5 / successful_tokens
    assert_trees_close(actor, rows.pull_back(slope))
    metrics, ratios, a = result.metrics, np.array(ratios), advantages
    np.testing.assert_allclose(metrics["policy/loss"], policy, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(metrics["policy/imitation_logprob"], imitation, rtol=1e-4)
    np.testing.assert_allclose(metrics["policy/sequence_log_ratio_std"], np.std(np.log(ratios)), rtol=1e-3)
    cut = np.mean(((a > 0) & (ratios > 1.1)) | ((a < 0) & (ratios < 0.9)))
    np.testing.assert_allclose(metrics["policy/clip_fraction_sequence"], cut)
    assert 0 < cut < 1
    new, ref, behavior = rows.sampled(new), rows.sampled(ref), every_token(trajectories)
    np.testing.assert_allclose(metrics["policy/ref_kl"], np.mean(new - ref), rtol=1e-3)
    # sampler against learner, though nothing is weighted: by token, truncated to [0, 1.2]
    weights, d = np.minimum(np.exp(new - behavior), 1.2), new - behavior
    assert_weight_metrics(metrics, weights, d > np.log(1.2))
    np.testing.assert_allclose(metrics["sampler/kl_k1"], np.mean(-d), rtol=1e-3)
    np.testing.assert_allclose(metrics["sampler/kl_k3"], np.mean(np.exp(d) - 1 - d), rtol=1e-3)


def assert_packed(result):
    """The plain losses have a line for each trajectory and no micro-batches; the learner packs, and takes several."""
    assert result.metrics["batch/rows"] < 6 and result.metrics["batch/micro_batches"] > 1


def assert_weight_metrics(metrics, weights, cut):
    np.testing.assert_allclose(metrics["sampler/importance_mean"], np.mean(weights), rtol=1e-4)
    ess = np.sum(weights) ** 2 / (len(weights) * np.sum(np.square(weights)))
    np.testing.assert_allclose(metrics["sampler/importance_ess"], ess, rtol=1e-4)
    np.testing.assert_allclose(metrics["sampler/importance_cut_share"], np.mean(cut), rtol=1e-5)
    assert 0 < np.mean(cut) < 1


def test_no_success_no_imitation():
    """The mean over no token is 0, not a division by 0."""
    actor, _, result = one_step(gspo(), make_trajectories(), ref_params=actor_params(5))
    assert "policy/imitation_logprob" not in result.metrics
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(actor))


def test_a_sequence_over_rows_is_refused():
    with pytest.raises(ValueError, match=r"ratio_level='sequence' with trajectory \d \(episode \d\) over several rows"):
        gspo().step(None, None, make_trajectories(2, window=True), step=0, ref_params=actor_params(5))


def test_st_ppo_scales_the_gradient_by_the_clipping_bias_of_the_whole_minibatch():
    """Turn ratio by geometric mean, loss over tokens; C is added over micro-batches before its absolute value."""
    trajectories = make_trajectories()
    subject = make_learner(
        estimator="group", group_size=2, whitening="none", ratio_level="turn", advantage_level="token",
        ratio_pooling="geometric_mean", clip_bias_correction=True, old_logprobs="behavior", dual_clip=None,
        clip_low=0.1, clip_high=0.1, actor=NO_CLIP, critic=None,
    )  # fmt: skip
    actor, _, result = one_step(subject, trajectories)
    assert_packed(result)
    rows = Rows(trajectories)
    new = rows.logprobs(actor_params())
    advantages = group_advantages([t.total_reward for t in trajectories], trajectories)
    slope, bias = np.zeros(new.shape), 0.0
    for m, (trajectory, a) in enumerate(zip(trajectories, advantages)):
        for turn, (start, n) in zip(trajectory.turns, rows.spans[m]):
            where = slice(start, start + n)
            ratio = np.exp(np.mean(new[m, where] - turn.behavior_logprobs))
            weight = 1 / (6 * len(rows.spans[m]))  # of the turn's n tokens together
            if ratio > 1.1 if a > 0 else ratio < 0.9:
                bias += weight * a * ratio
            else:
                slope[m, where] -= weight * a * ratio / n
    scale = 1 / (1 + abs(bias))
    assert scale < 0.98 and np.any(slope)
    np.testing.assert_allclose(result.metrics["policy/clip_bias_scale"], scale, rtol=1e-4)
    assert_trees_close(actor, rows.pull_back(slope * scale))


def test_kl_in_the_reward_and_weights_of_whole_trajectories_over_window_rows():
    """Every turn is a row: penalties, scores and importance weights are those of the trajectory all the same."""
    trajectories = make_trajectories(2, window=True)
    subject = make_learner(
        estimator="group", group_size=2, group_scale="none", whitening="none", kl_coef=0.2, kl_placement="reward",
        importance_level="sequence", importance_low=0.6, importance_high=1.4, objective="cispo", dual_clip=None,
        actor=NO_CLIP, critic=None,
    )  # fmt: skip
    actor, _, result = one_step(subject, trajectories, ref_params=actor_params(5))
    assert_packed(result)
    # a row for each turn, as the policy saw it
    turns = [(m, turn) for m, t in enumerate(trajectories) for turn in t.turns]
    rows = Rows([dataclasses.replace(trajectories[m], turns=[turn]) for m, turn in turns])
    old, ref = rows.logprobs(actor_params()), rows.logprobs(actor_params(5))
    kl = np.exp(ref - old) - 1 + old - ref
    scores, log_ratio, tokens = np.zeros((3, 6))
    for row, (m, turn) in enumerate(turns):
        columns = rows.columns[row]
        scores[m] += turn.reward - 0.2 * kl[row, columns].sum()
        log_ratio[m] += np.sum(old[row, columns] - turn.behavior_logprobs)
        tokens[m] += len(columns)
    advantages, ratios = group_advantages(scores, trajectories, scale=False), np.exp(log_ratio)
    weights = np.clip(ratios, 0.6, 1.4)
    slope, loss = np.zeros(old.shape), 0.0
    for row, (m, _) in enumerate(turns):
        slope[row, rows.columns[row]] = -weights[m] * advantages[m] / (6 * tokens[m])
        loss += np.sum(slope[row] * old[row])
    assert_trees_close(actor, rows.pull_back(slope))
    np.testing.assert_allclose(result.metrics["policy/loss"], loss, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(result.metrics["policy/ref_kl"], rows.sampled(kl).mean(), rtol=1e-3)
    assert_weight_metrics(result.metrics, weights, weights != ratios)


def solved_or_not():
    """Trajectories whose last turn has reward 1 or 0 and the others none."""
    trajectories = make_trajectories(truncated=False)
    for number, trajectory in enumerate(trajectories):
        for turn in trajectory.turns:
            turn.reward = 0.0
        trajectory.turns[-1].reward = float(number % 3 == 0)
    return trajectories


@functools.cache
def pretraining():
    return make_learner(
        value_loss_kind="cross_entropy", value_scale=2.0, critic_target="lambda_return", critic_warmup_steps=2,
        gamma=0.9, actor=NO_CLIP, critic=NO_CLIP,
    )  # fmt: skip


def test_value_pretraining_learns_monte_carlo_returns_of_a_policy_that_stands_still():
    """VC-PPO: critic-only steps, λ = 1 targets whatever critic_target says; here a critic that says probabilities."""
    trajectories = solved_or_not()
    actor, critic = pretraining().init_states(actor_params(), critic_params())
    _, gradient, result = one_step(pretraining(), trajectories)
    rows = Rows(trajectories)
    logits = rows.values(critic_params())
    slope, loss, returns = np.zeros(logits.shape), 0.0, []
    for m, trajectory in enumerate(trajectories):
        last = len(rows.spans[m]) - 1
        for k, (start, _) in enumerate(rows.spans[m]):
            returns.append(0.9 ** (last - k) * trajectory.turns[-1].reward)
            v, r, w = 1 / (1 + np.exp(-logits[m, start - 1])), returns[-1] / 2, 1 / (6 * (last + 1))
            loss -= w * (r * np.log(v) + (1 - r) * np.log(1 - v))
            slope[m, start - 1] = w * (v - r)
            np.testing.assert_allclose(result.turn_values[m][k], 2 * v, rtol=1e-5)
    assert_trees_close(gradient, rows.pull_back_values(slope))
    np.testing.assert_allclose(result.metrics["value/loss"], loss, rtol=1e-4)
    np.testing.assert_allclose(result.metrics["value/target_max"], 0.5, rtol=1e-6)
    np.testing.assert_allclose(result.metrics["value/return_mean"], np.mean(returns), rtol=1e-5)
    # a second step on a fresh rollout: the policy is the same to the last bit, and so are its moments and counter
    for step in range(2):
        actor, critic, result = pretraining().step(actor, critic, solved_or_not(), step=step)
        assert (int(actor.step), int(critic.step)) == (0, step + 1) and "optim/lr" not in result.metrics
    jax.tree.map(np.testing.assert_array_equal, actor.params, actor_params())
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(actor.opt_state))
    with pytest.raises(AssertionError):
        jax.tree.map(np.testing.assert_array_equal, critic.params, critic_params())


def test_a_return_that_a_probability_cannot_say_is_refused():
    actor, critic = pretraining().init_states(actor_params(), critic_params())
    for reward, said in ((-0.5, "-0.5"), (2.5, "2.5")):
        trajectories = copy.deepcopy(solved_or_not())
        trajectories[0].turns[-1].reward = reward
        with pytest.raises(ValueError, match=rf"value_scale=2.0 with value_loss_kind='cross_entropy' and a.* {said};"):
            pretraining().step(actor, critic, trajectories, step=0)


def test_old_logprobs_of_the_sampler_with_a_shared_backbone():
    """Values come from a scoring pass of the policy, whose log-probs are then not the old ones."""
    learner = make_learner(share_backbone=True, old_logprobs="behavior")
    actor, critic = learner.init_states(actor_params(), critic_params())
    (mini,) = learner._minibatches(make_trajectories(), np.arange(6), 0)
    scored = []
    learner._score(actor, critic, mini, learner.empty_table(), np.float32(1.0), None, scored)
    assert mini.old_logprobs is None and scored[0]["gap_sum"] > 0


def test_weights_by_token_reach_a_loss_over_turns_as_their_mean():
    """And those of turns and trajectories a loss over tokens at each of its tokens."""
    trajectories = make_trajectories()
    rows = Rows(trajectories)
    new = rows.logprobs(actor_params())
    old, turn_ids, trajectory_ids = in_rows([[new[m, s : s + n] for s, n in own] for m, own in enumerate(rows.spans)])
    behavior = in_rows([[turn.behavior_logprobs for turn in t.turns] for t in trajectories])[0]
    for level, loss_level in (("token", "turn"), ("turn", "token"), ("sequence", "turn")):
        want, *_ = objective_oracle.importance(
            old, behavior, turn_ids, trajectory_ids, level, "product", "truncate", 0, 2
        )
        if loss_level == "turn":
            own = [[row[ids == k] for k in range(4)] for row, ids in zip(want, turn_ids)]
            want = [[turn.mean() if len(turn) else 0 for turn in line] for line in own]
        cfg = AlgorithmConfig(estimator="group", group_size=2, ratio_level=loss_level, importance_level=level)
        got = jax.jit(functools.partial(importance, cfg=cfg))(old, behavior, turn_ids, trajectory_ids)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)

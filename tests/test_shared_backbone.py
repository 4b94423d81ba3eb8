"""A value head on the policy's own backbone, with a critic of tokens and one of prompts and everything beside it.

The critic of turns alone stands in test_learner_settings.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import kernel_oracle, learner_reference
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

BETA, COEF, IMITATION, GAMMA, LAMBDA = 0.3, 0.25, 0.5, 0.9, 0.8
PARTS = {
    "share_backbone": True, "value_loss_coef": COEF, "whitening": "none", "kl_coef": BETA, "kl_placement": "reward",
    "imitation_coef": IMITATION, "importance_high": 1.1, "actor": NO_CLIP, "critic": NO_CLIP,
}  # fmt: skip
SETTINGS = {
    "token": {
        "estimator": "token_gae", "ratio_level": "token", "gamma": GAMMA, "gae_lambda": LAMBDA,
        "importance_level": "token",
    },
    "prompt": {
        "estimator": "sequence_critic", "ratio_level": "turn", "importance_level": "sequence",
        "importance_pooling": "geometric_mean",
    },
}  # fmt: skip


@jax.jit
def _values(params, head, ids):
    return learner_reference.shared_values(params, head, ids)


@jax.jit
def _pull_back(params, head, ids, slope):
    return jax.grad(lambda p, h: jnp.sum(slope * learner_reference.shared_values(p, h, ids)), (0, 1))(params, head)


@pytest.mark.parametrize("critic", SETTINGS)
def test_the_backbone_learns_from_policy_and_value_and_the_head_from_the_value(critic):
    """∇ = Σ_t slope_t ∇ log π_t + coef · Σ_s slope_s ∇ V_s, with the slopes by hand in float64."""
    trajectories = make_trajectories()
    for number in (1, 2, 4):
        trajectories[number].turns[-1].info = {"success": True}
    learner = make_learner(**PARTS, **SETTINGS[critic])
    actor, head, result = one_step(learner, trajectories, ref_params=actor_params(5))
    assert result.metrics["batch/rows"] < 6 and result.metrics["batch/micro_batches"] > 1

    rows, value_head = Rows(trajectories), critic_params()["value_head"]
    new, ref = rows.logprobs(actor_params()), rows.logprobs(actor_params(5))
    values = np.asarray(_values(actor_params(), value_head, rows.ids), np.float64)
    kl = BETA * (np.exp(ref - new) - 1 + new - ref)
    imitated = sum(len(rows.columns[m]) for m in (1, 2, 4))
    of_policy, of_value, loss = np.zeros(new.shape), np.zeros(new.shape), 0.0
    for m, t in enumerate(trajectories):
        at = rows.columns[m]
        gap = new[m, at] - np.concatenate([turn.behavior_logprobs for turn in t.turns])
        if critic == "token":
            rewards = [r for turn in t.turns for r in [0.0] * (len(turn.response_ids) - 1) + [turn.reward]]
            rewards, known, everything = [np.array(rewards) - kl[m, at]], values[m, at - 1], [[True] * len(at)]
            advantages = kernel_oracle.gae(rewards, [known], everything, GAMMA, LAMBDA)[0][0]
            targets = kernel_oracle.gae(rewards, [0 * known], everything, GAMMA, 1.0)[1][0]
            read, importance = at - 1, np.minimum(np.exp(gap), 1.1)
            each = np.repeat([1 / (6 * len(t.turns) * n) for _, n in rows.spans[m]], [n for _, n in rows.spans[m]])
        else:
            read, each = at[:1] - 1, 1 / 6
            targets = t.total_reward - kl[m, at].sum()
            advantages, importance = targets - values[m, read], min(np.exp(gap.mean()), 1.1)
        of_policy[m, at] = -importance * advantages / (6 * len(at)) - IMITATION * t.success / imitated
        of_value[m, read] = each * (values[m, read] - targets)
        loss += np.sum(each * (values[m, read] - targets) ** 2) / 2
    backbone, own = jax.device_get(_pull_back(actor_params(), value_head, rows.ids, of_value.astype(np.float32)))
    want = jax.tree.map(lambda a, b: np.asarray(a) + COEF * b, rows.pull_back(of_policy), backbone)
    assert_trees_close(actor, want)
    assert_trees_close(head["value_head"], own)
    np.testing.assert_allclose(result.metrics["value/loss"], loss, rtol=1e-4)
    # Neither part is small beside the other: the sum could not be right without both.
    sizes = [
        max(np.abs(leaf).max() for leaf in jax.tree.leaves(tree)) for tree in (rows.pull_back(of_policy), backbone)
    ]
    assert 0.05 < COEF * sizes[1] / sizes[0] < 20

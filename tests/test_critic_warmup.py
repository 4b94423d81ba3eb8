"""Critic-only steps with a critic of tokens and one of prompts; that of turns stands in test_learner_objectives."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from tests import kernel_oracle
from tests.learner_cases import (
    ADAM,
    NO_CLIP,
    actor_params,
    assert_trees_close,
    critic_params,
    gradients,
    make_learner,
    make_trajectories,
    quick_compilation,  # noqa: F401  (a fixture of this module)
)
from tests.plain_rows import Rows, pull_back_values

GAMMA, LAMBDA = 0.9, 0.6


def slopes(rows, trajectories, values, name, gae_lambda):
    """Derivative of the value loss by the values [M, LENGTH]: weight times V minus target, in float64."""
    out = np.zeros(values.shape)
    for m, t in enumerate(trajectories):
        if name == "sequence_critic":  # one value a trajectory, that of its first prompt
            start = rows.spans[m][0][0]
            out[m, start - 1] = (values[m, start - 1] - t.total_reward) / len(trajectories)
            continue
        rewards = [r for turn in t.turns for r in [0.0] * (len(turn.response_ids) - 1) + [turn.reward]]
        before = rows.columns[m] - 1
        _, targets = kernel_oracle.gae([rewards], [values[m, before]], [[True] * len(before)], GAMMA, gae_lambda)
        weights = [1 / (len(trajectories) * len(t.turns) * n) for _, n in rows.spans[m] for _ in range(n)]
        out[m, before] = np.array(weights) * (values[m, before] - targets[0])
    return out


@functools.cache
def subject(name):
    rates = {"actor": dataclasses.replace(ADAM, warmup_steps=100), "critic": NO_CLIP}
    if name == "token_gae":
        rates |= {"gamma": GAMMA, "critic_target": "lambda_return", "critic_lambda": LAMBDA}
    return make_learner(estimator=name, critic_warmup_steps=1, **rates)


@pytest.mark.parametrize("name", ["token_gae", "sequence_critic"])
def test_the_critic_learns_alone_and_then_beside_the_policy(name):
    """Fault 56. Alone it learns returns, then the targets of the config; the policy counts its steps from its own 0."""
    trajectories = make_trajectories()
    rows = Rows(trajectories)
    actor, critic = subject(name).init_states(actor_params(), critic_params())
    untouched = jax.device_get(actor)
    actor, critic, result = subject(name).step(actor, critic, trajectories, step=0)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(actor), untouched)  # moments and counters, too
    assert int(critic.step) == 1 and not {"optim/lr", "policy/loss", "optim/steps_actor"} & result.metrics.keys()
    first = gradients(critic)
    slope = slopes(rows, trajectories, rows.values(critic_params()), name, 1.0)
    assert_trees_close(first, rows.pull_back_values(slope))
    if name == "sequence_critic":  # from here on the estimator's step is as without critic-only steps before it
        return

    learnt = jax.device_get(critic.params)
    actor, critic, result = subject(name).step(actor, critic, trajectories, step=1)
    assert (int(actor.step), int(critic.step)) == (1, 2)
    assert result.metrics["optim/lr"] == pytest.approx(ADAM.learning_rate / 100)  # of its first step
    assert (
        min(np.abs(a - b).max() for a, b in zip(jax.tree.leaves(actor.params), jax.tree.leaves(untouched.params))) > 0
    )
    # Adam's first moment is .9 of what it was and .1 of the new gradient, here in units of .1.
    second = jax.tree.map(lambda now, before: now - 0.9 * before, gradients(critic), first)
    slope = slopes(rows, trajectories, rows.values(learnt), name, LAMBDA)
    assert_trees_close(second, jax.device_get(pull_back_values(learnt, rows.ids, slope.astype(np.float32))))

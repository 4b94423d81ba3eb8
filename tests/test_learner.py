"""The learner against a plain reference, and what must not change its numbers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import learner_reference
from tests.learner_cases import (
    NO_CLIP,
    SHAPE,
    SIZES,
    actor_params,
    assert_trees_close,
    critic_params,
    make_learner,
    make_trajectories,
    one_step,
    quick_compilation,  # noqa: F401  (a fixture of this module)
)
from turnppo_jax.models.critic import init_critic
from turnppo_jax.training.batching import BatchShape, pack
from turnppo_jax.training.estimators import TrajectoryFacts
from turnppo_jax.training.optimizer import init_state, make_optimizer
from turnppo_jax.training.selection import select

# Every part is in play: critic, KL reference, discount, a temperature other than 1.
SETUP = {"actor": NO_CLIP, "critic": NO_CLIP, "kl_coef": 0.3, "gamma": 0.9, "gae_lambda": 0.8}
STEP = {"temperature": 0.7, "ref_params": actor_params(5)}


@functools.cache
def subject():
    return make_learner(**SETUP)


@functools.cache
def baseline():
    return one_step(subject(), make_trajectories(), **STEP)


def assert_same_numbers(got, want):
    assert_trees_close(got[0], want[0])
    assert_trees_close(got[1], want[1])
    for name, value in want[2].metrics.items():
        if not name.startswith(("batch/", "time/")):
            np.testing.assert_allclose(got[2].metrics[name], value, rtol=1e-3, atol=1e-5, err_msg=name)


def test_a_whole_step_equals_the_plain_reference():
    trajectories = make_trajectories()
    actor, critic, result = baseline()
    policy, value, want_actor, want_critic, advantages = learner_reference.turn_ppo(
        actor_params(), critic_params(), actor_params(5), trajectories,
        gamma=0.9, gae_lambda=0.8, temperature=0.7, kl_coef=0.3,
    )  # fmt: skip
    assert_trees_close(actor, want_actor)
    assert_trees_close(critic, want_critic)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(actor)) > 0.01
    np.testing.assert_allclose(result.metrics["value/loss"], value, rtol=1e-4)
    np.testing.assert_allclose(result.metrics["policy/loss"], policy, rtol=1e-3, atol=1e-5)
    for got, want in zip(result.turn_advantages, advantages):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(want_actor)))
    np.testing.assert_allclose(result.metrics["optim/grad_norm"], norm, rtol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        # unpacked: a row for every trajectory, all of them one micro-batch
        {"turns": 3, "sampled": 12, "tokens": 24, "micro_rows": 8},
        # a micro-batch for every row, and padding rows beyond those in use
        {"micro_rows": 1, "rows": 11},
    ],
)
def test_packing_and_micro_batches_change_nothing(changes):
    """Packed = unpacked, one micro-batch = many, padding rows add nothing (fault 6); metrics too (fault 53)."""
    shape = dataclasses.replace(SHAPE, max_sampled=24, **changes)
    assert_same_numbers(one_step(make_learner(shape, **SETUP), make_trajectories(), **STEP), baseline())


def test_window_rows_are_one_trajectory():
    """Turns as rows of their own, packed together or one a row: the same table, the same gradient."""
    trajectories = make_trajectories(2, window=True)
    apart = BatchShape(rows=16, tokens=9, turns=1, sampled=5, trajectories=8, max_turns=4, max_sampled=24, micro_rows=4)
    together = one_step(subject(), trajectories, **STEP)
    assert_same_numbers(one_step(make_learner(apart, **SETUP), trajectories, **STEP), together)


def test_permuted_trajectories_give_permuted_outputs():
    """Fault 17: values and advantages go back to their own trajectory and turn."""
    trajectories = make_trajectories()
    order = [3, 0, 5, 1, 4, 2]
    got = one_step(subject(), [trajectories[i] for i in order], **STEP)
    assert_same_numbers(got, baseline())
    for position, i in enumerate(order):
        np.testing.assert_allclose(got[2].turn_values[position], baseline()[2].turn_values[i], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            got[2].turn_advantages[position], baseline()[2].turn_advantages[i], rtol=1e-3, atol=1e-5
        )


def test_the_same_numbers_twice():
    """Fault 55: nothing random in scoring or update; bit for bit."""
    again = one_step(subject(), make_trajectories(), **STEP)
    jax.tree.map(np.testing.assert_array_equal, again[:2], baseline()[:2])


def test_garbage_under_padding_changes_nothing():
    """Ids in padding, numbers under masks: state and sums of an update stay as they are, bit for bit."""
    learner, rng = subject(), np.random.default_rng(0)
    batch, stats = pack(make_trajectories(), SHAPE)
    empty, real = batch.segment_ids == 0, batch.turn_mask
    poisoned = dataclasses.replace(
        batch,
        tokens=np.where(empty, rng.integers(-5, 10**6, size=empty.shape), batch.tokens).astype(np.int32),
        positions=np.where(empty, 10**6, batch.positions).astype(np.int32),
        behavior_logprobs=np.where(batch.turn_ids >= 0, batch.behavior_logprobs, np.nan).astype(np.float32),
        turn_rewards=np.where(real, batch.turn_rewards, np.inf).astype(np.float32),
        turn_last=batch.turn_last | ~real,
    )
    out = [_raw_step(learner, b, stats.num_micro) for b in (batch, poisoned)]
    jax.tree.map(np.testing.assert_array_equal, *out)


def _raw_step(learner, batch, num_micro):
    """The programs of one step on a given batch."""
    programs, shape = learner._programs, SHAPE
    batch = jax.device_put(batch)
    actor, critic = learner.init_states(actor_params(), critic_params())
    num_micro, temperature = jnp.int32(num_micro), jnp.float32(0.7)
    values = programs["critic_score"](critic.params, batch, num_micro)
    table = programs["collect"](learner.empty_table(), batch, batch, values)
    facts = TrajectoryFacts(np.zeros(shape.trajectories, np.float32), np.asarray(batch.group_ids))
    estimated = programs["estimate"](table, facts, jax.random.key(0))
    ref = programs["reference_score"](STEP["ref_params"], None, batch, num_micro, temperature)["logprobs"]
    critic, sums = programs["critic_update"](critic, batch, estimated, table, num_micro)
    actor, _, more = programs["actor_update"](actor, None, batch, estimated, table, None, ref, num_micro, temperature)
    return jax.device_get((actor.params, critic.params, sums, more))


def test_temperature_reaches_logprobs_and_never_values():
    """Faults 2 and 56: the sampler's temperature scales logits alone."""
    actor, critic, result = one_step(subject(), make_trajectories(), **(STEP | {"temperature": 0.5}))
    want_actor, want_critic, want = baseline()
    assert result.turn_values == want.turn_values
    jax.tree.map(np.testing.assert_array_equal, critic, want_critic)
    assert result.metrics["policy/entropy"] < want.metrics["policy/entropy"]
    assert np.abs(actor["embed"]["embedding"] - want_actor["embed"]["embedding"]).max() > 1e-3
    with pytest.raises(ValueError, match=r"temperature=0.0; allowed: above 0"):
        subject().step(None, None, [], step=0, temperature=0.0)


def test_reference_and_source_outlive_the_donated_states():
    """Fault 24: the reference is the very tree that the policy was made from."""
    params = actor_params()
    actor, critic = subject().init_states(params, critic_params())
    for step in range(2):
        old = actor
        actor, critic, result = subject().step(actor, critic, make_trajectories(), step=step, ref_params=params)
        assert old.params["embed"]["embedding"].is_deleted()  # donated indeed
    assert result.metrics["policy/ref_kl"] > 0
    np.testing.assert_array_equal(params["embed"]["embedding"], actor_params()["embed"]["embedding"])
    with pytest.raises(ValueError, match=r"ref_params=None with kl_coef=0.3"):
        subject().step(actor, critic, make_trajectories(), step=2)


def test_a_fresh_critic_says_zero_and_advantages_are_returns():
    """Fault 19: the value head starts at exactly 0."""
    actor, critic = subject().init_states(actor_params(), init_critic(SIZES, jax.random.key(3)))
    _, _, result = subject().step(actor, critic, make_trajectories(), step=0, **STEP)
    assert all(value == 0 for line in result.turn_values for value in line)
    assert result.metrics["value/explained_variance"] == 0


def test_programs_lower_from_shapes_alone():
    """No array is needed to compile: `plan` and the tests of other meshes use the same factories."""
    learner = subject()
    state = jax.eval_shape(lambda: init_state(make_optimizer(NO_CLIP), actor_params()))
    batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, pack([], SHAPE)[0]))
    count, one = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)
    logprobs = jax.ShapeDtypeStruct((SHAPE.rows, SHAPE.sampled), jnp.float32)
    table = jax.eval_shape(lambda: learner.empty_table())
    facts = select([], SHAPE, learner.settings.algorithm).facts
    estimated = jax.eval_shape(learner._programs["estimate"], table, facts, jax.eval_shape(jax.random.key, 0))
    lowered = learner._programs["actor_update"].lower(state, None, batch, estimated, table, None, logprobs, count, one)
    assert "while" in lowered.as_text()

"""The average minibatch, what a perfect program needs for it, and the load of a host in the rollout."""

import dataclasses

import numpy as np
import pytest

from turnppo_jax.command_line import UserError
from turnppo_jax.models.sizes import SIZES
from turnppo_jax.planning.rollout_load import further_load, rollout_load
from turnppo_jax.planning.workload import PlanSettings, expected_workload, model_flops, unneeded_flops
from turnppo_jax.rollout.sampler import SamplerSettings
from turnppo_jax.training.algorithm import AlgorithmConfig
from turnppo_jax.training.batching import BatchShape
from turnppo_jax.training.presets import algorithm_by_name

SHAPE = BatchShape(
    rows=16, tokens=256, turns=16, sampled=200, trajectories=32, max_turns=4, max_sampled=160, micro_rows=4
)
ALGORITHM = AlgorithmConfig(num_minibatches=2)
PLAN = PlanSettings(turns=3, first_prompt_tokens=40, next_prompt_tokens=10, response_tokens=20, spread=0.0)


def workload(plan=PLAN, algorithm=ALGORITHM, **limits):
    return expected_workload(plan, SHAPE, algorithm, **{"max_turn_tokens": 40, "context_length": 256} | limits)


def test_equal_episodes_by_hand():
    work = workload()
    # 16 episodes a minibatch of 40 + 2 * 10 + 3 * 20 = 120 tokens: two a row, eight rows, two micro-batches.
    assert (work.actor.tokens, work.actor.rows, work.actor.num_micro, work.actor.sampled) == (16 * 120, 8, 2, 16 * 60)
    assert work.segments.tolist() == [120] * 16 and work.context == 120 and work.prompt_tokens == 60
    # The critic reads up to the last prompt: 100 tokens, two a row still.
    assert (work.critic.tokens, work.critic.rows) == (16 * 100, 8)
    assert work.critic_segments.tolist() == [100] * 16
    assert work.batch.tokens.shape == (16, 256)


def test_responses_spread_around_their_mean_and_limits_give_the_defaults():
    work = workload(dataclasses.replace(PLAN, spread=0.5))
    assert 10 * 3 <= work.episode_tokens.min() < 55 and 65 < work.episode_tokens.max() <= 30 * 3
    assert abs(work.episode_tokens.mean() - 60) < 5
    assert len(set(work.segments.tolist())) > 5
    from_limits = workload(dataclasses.replace(PLAN, turns=0, response_tokens=0, spread=0.0))
    assert (from_limits.turns, from_limits.episode_tokens.tolist()) == (4, [80] * 32)
    shared = workload(algorithm=AlgorithmConfig(num_minibatches=2, share_backbone=True))
    assert shared.critic == shared.actor


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"turns": 5}, "config.plan.turns=5 exceeds rollout.max_turns=4"),
        ({"response_tokens": 50}, "config.plan.response_tokens=50 exceeds rollout.max_turn_tokens=40"),
        ({"first_prompt_tokens": 190}, "up to 270 tokens, sampler.context_length=256"),
    ],
)
def test_an_episode_over_the_limits_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        workload(dataclasses.replace(PLAN, **change))


@pytest.mark.parametrize("change", [{"turns": -1}, {"first_prompt_tokens": 0}, {"spread": 1.0}])
def test_settings_name_the_field(change):
    with pytest.raises(ValueError, match=f"plan.{next(iter(change))}=.*allowed"):
        PlanSettings(**change)


def test_model_flops_against_the_usual_numbers():
    sizes = SIZES["qwen2.5-7b"]
    # 6 N per token, and per token of a context n: 6 · L · N · H · n for causal attention, forward and backward.
    n, tokens = 1000, 8000
    expected = 6 * 7e9 * tokens + 6 * 28 * 28 * 128 * n * tokens
    assert model_flops(sizes, 7e9, tokens, [n] * 8) == pytest.approx(expected)
    assert model_flops(sizes, 7e9, tokens, [n] * 8, passes=1) == pytest.approx(expected / 3)


@pytest.mark.parametrize(("name", "tables"), [("qwen2.5-3b", 1), ("qwen2.5-7b", 2)])
def test_what_embedding_and_head_do_not_need(name, tables):
    sizes = SIZES[name]
    tokens, sampled = 1000.0, 400.0
    table = sizes.vocab_size * sizes.hidden_size
    layers = sizes.num_parameters - tables * table
    needed = model_flops(sizes, sizes.num_parameters, tokens, []) - unneeded_flops(sizes, tables, tokens, sampled)
    assert needed == pytest.approx(6 * (layers * tokens + table * sampled))
    of_critic = model_flops(sizes, layers + table, tokens, []) - unneeded_flops(sizes, 1, tokens, 0)
    assert of_critic == pytest.approx(6 * layers * tokens)


def test_load_of_a_host():
    sampler = SamplerSettings(num_slots=4, context_length=256, prefill_chunk=32)
    load = rollout_load(workload(), PLAN, sampler, hosts=2)
    # 16 episodes of 60 sampled tokens in 4 slots: four one after the other.
    assert (load.episodes, load.decode_steps) == (16, 240)
    # 39 tokens before the pending one: pieces of 32 and 7; then twice 10 new ones, in buckets of 16.
    assert load.prefills == ((16, 3), (32, 1))
    assert load.mean_context == (40 + 120) / 2
    assert load.prefill_calls(rows=8) == 16 * 4 / 8
    spread = rollout_load(workload(dataclasses.replace(PLAN, spread=0.5)), PLAN, sampler, hosts=2)
    assert spread.decode_steps >= np.ceil(workload(dataclasses.replace(PLAN, spread=0.5)).episode_tokens[:16].sum() / 4)


def test_load_of_the_rollouts_that_an_estimator_asks_for():
    sampler = SamplerSettings(num_slots=1, context_length=256, prefill_chunk=32)
    greedy = further_load(workload(), PLAN, sampler, algorithm_by_name("remax"), hosts=2)
    assert greedy == rollout_load(workload(), PLAN, sampler, hosts=2)  # one more episode for each
    grouped = algorithm_by_name("remax", group_size=4)
    assert further_load(workload(), PLAN, sampler, grouped, hosts=2).episodes == 4  # one for each of 8 prompts
    branches = algorithm_by_name("vine_ppo", num_branches=2)
    load = further_load(workload(), PLAN, sampler, branches, hosts=2)
    # 32 trajectories, two branches from before each of three turns, which still sample 60, 40 and 20 tokens.
    assert (load.episodes, load.decode_steps) == (96, 32 * (60 + 40 + 20))
    # Contexts of 40, 70 and 100 tokens but the pending one: pieces of 32, 7 | 32, 32, 5 | 32, 32, 32, 3; 2, 1, 0 turns.
    assert [bucket for bucket, _ in load.prefills] == [16, 32]
    np.testing.assert_allclose([prompts for _, prompts in load.prefills], [(3 + 2 + 1) / 3, (1 + 2 + 3) / 3])
    assert load.mean_context == (70 + 120) / 2
    assert further_load(workload(), PLAN, sampler, ALGORITHM, hosts=2) is None

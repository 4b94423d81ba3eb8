"""Greedy scores and branch values: against episodes that a plain loop plays without pool, scheduler or collector."""

import dataclasses

import jax
import numpy as np
import pytest

from envs.registry import make
from tests.context_sampler import ContextSampler, CountingEnv, say
from tests.thread_hosts import ThreadHosts
from turnppo_jax.models.decoder import init_decoder
from turnppo_jax.models.sizes import SIZES
from turnppo_jax.parallel.mesh import make_mesh
from turnppo_jax.rollout.builtin_tokenizer import build_tokenizer
from turnppo_jax.rollout.chat import Chat
from turnppo_jax.rollout.collector import Collector, EnvSettings, training_episodes
from turnppo_jax.rollout.episodes import Episode, PlayLimits
from turnppo_jax.rollout.extra_rollouts import branch_values, greedy_scores
from turnppo_jax.rollout.prefix import Prefix
from turnppo_jax.rollout.sampler import Sampler, SamplerSettings, Sampling, folded_keys

COUNTING = f"{CountingEnv.__module__}:{CountingEnv.__name__}"
FORGETFUL = "tests.context_sampler:ForgetfulEnv"
SEED, STEP = 5, 2
LIMITS = PlayLimits(max_turns=9, max_turn_tokens=4, max_retries=0)


@pytest.fixture(scope="module")
def chat():
    return Chat(build_tokenizer())


def collector(chat, env=COUNTING, limits=LIMITS, lockstep=False, sampler=None, num_workers=0, **kwargs):
    settings = EnvSettings(env, tuple(sorted(kwargs.items())), num_workers=num_workers)
    return Collector(sampler or ContextSampler(chat), chat, settings, limits, lockstep=lockstep)


def rollout(players, num_prompts=3, group_size=2):
    episodes = training_episodes(SEED, STEP, num_prompts, group_size)
    return players.play(None, episodes, Sampling(), policy_step=STEP)[0]


def branches(players, trajectories, num_branches=3, gamma=0.5, params=None, sampling=Sampling(), **options):  # noqa: B008
    return branch_values(
        players, params, trajectories, num_branches=num_branches, gamma=gamma, sampling=sampling, seed=SEED, step=STEP,
        **options,
    )  # fmt: skip


def plain_episode(chat, seed, key, texts=(), num_turns=3, breaks_at=""):
    """(rewards of the turns after `texts`, None where the environment breaks), by a loop of its own."""
    env = make("echo", num_turns=num_turns, partial=0.25)
    observation, _ = env.reset(seed)
    context, rewards = chat.first_prompt(observation, "say it").tolist(), []
    for number in range(num_turns):
        if number < len(texts):
            ids = [*chat.encode_response(texts[number]).tolist(), chat.end_id]
        else:
            symbol = say(chat, context, key)
            ids = [symbol, say(chat, [*context, symbol], key)]
        text = chat.decode(ids)
        if breaks_at and text == breaks_at:
            return None
        observation, reward, terminated, _, _ = env.step(text)
        if number >= len(texts):
            rewards.append(reward)
        context += ids
        context += chat.next_prompt(observation, ended=True).tolist()
        assert terminated == (number == num_turns - 1)
    return rewards


def plain_value(chat, trajectory, turn, num_branches, gamma, breaks_at=""):
    returns = []
    for key in folded_keys(SEED, (3, STEP, trajectory.episode, turn), num_branches):
        texts = [played.action for played in trajectory.turns[:turn]]
        rewards = plain_episode(chat, trajectory.seed, key, texts, breaks_at=breaks_at)
        if rewards is not None:
            returns.append(sum(gamma**j * reward for j, reward in enumerate(rewards)))
    return np.mean(returns) if returns else np.nan


def test_branch_values_are_the_means_of_returns_that_a_plain_loop_plays(chat):
    with collector(chat) as players:
        trajectories = rollout(players)
        CountingEnv.resets.clear()
        CountingEnv.steps.clear()
        values, metrics = branches(players, trajectories, gamma=0.7)
    expected = [[plain_value(chat, t, k, 3, 0.7) for k in range(3)] for t in trajectories]
    np.testing.assert_allclose(values, expected, rtol=1e-6)  # float32 of float64 sums of three
    assert values.dtype == np.float32 and len(np.unique(values)) > 6
    # One reset a branch, and three turns each, those of the prefix replayed.
    assert len(CountingEnv.resets) == metrics["rollout/branch_episodes"] == 6 * 3 * 3
    assert len(CountingEnv.steps) == 6 * 3 * 3 * 3
    assert metrics["rollout/branch_sampled_tokens"] == 6 * 3 * (3 + 2 + 1) * 2
    assert metrics["rollout/branch_missing_values"] == 0


def test_a_value_depends_neither_on_the_other_states_nor_on_slots_and_workers(chat):
    with collector(chat) as players:
        trajectories = rollout(players)
        whole, _ = branches(players, trajectories)
        some, _ = branches(players, [trajectories[4], trajectories[1]])
    with collector(chat, sampler=ContextSampler(chat, num_slots=1)) as players:
        alone, _ = branches(players, trajectories)
    with collector(chat, num_workers=2) as players:
        elsewhere, _ = branches(players, trajectories)
    np.testing.assert_array_equal(some, whole[[4, 1]])
    np.testing.assert_array_equal(alone, whole)
    np.testing.assert_array_equal(elsewhere, whole)


def test_hand_checked_values_of_a_policy_that_is_always_right(chat, monkeypatch):
    """Rewards 1, 1, 1 and gamma .5: 1.75, 1.5, 1 from every state."""
    import tests.context_sampler as fake

    def right(chat, context, key):
        asked = context[-2]  # the observation's symbol stands before the generation prompt
        return int(asked) if context[-1] == chat.first_prompt("x")[-1] else chat.end_id

    monkeypatch.setattr(fake, "say", right)
    with collector(chat) as players:
        values, _ = branches(players, rollout(players), num_branches=2)
        scores, _ = greedy_scores(players, None, rollout(players), seed=SEED, step=STEP)
    np.testing.assert_array_equal(values, [[1.75, 1.5, 1.0]] * 6)
    np.testing.assert_array_equal(scores, [3.0] * 6)


def test_dropped_branches_are_left_out_of_the_mean_and_all_dropped_is_nan(chat):
    with collector(chat) as players:
        trajectories = rollout(players, num_prompts=12, group_size=1)
    with collector(chat, breaks_at="C") as players:
        values, metrics = branches(players, trajectories, num_branches=2)
    expected = np.asarray([[plain_value(chat, t, k, 2, 0.5, breaks_at="C") for k in range(3)] for t in trajectories])
    assert 0 < np.isnan(expected).sum() < expected.size
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    assert metrics["rollout/branch_missing_values"] == np.isnan(expected).sum()
    assert metrics["rollout/branch_dropped_episodes"] == metrics["rollout/branch_env_errors"] > 2 * 8


def test_an_environment_that_cannot_be_replayed_has_no_values_but_for_the_first_state(chat, capsys):
    with collector(chat, env=FORGETFUL) as players:
        values, metrics = branches(players, rollout(players, num_prompts=2, group_size=1), num_branches=1)
    assert np.isfinite(values[:, 0]).all() and np.isnan(values[:, 1:]).all()
    assert metrics["rollout/branch_missing_values"] == 4
    assert "after 1 turns it shows something else than it did before" in capsys.readouterr().out


def test_trajectories_of_different_lengths(chat):
    with collector(chat) as players:
        trajectories = rollout(players, num_prompts=2, group_size=1)
        short = dataclasses.replace(trajectories[0], turns=trajectories[0].turns[:1])
        empty = dataclasses.replace(trajectories[0], turns=[])
        values, _ = branches(players, [short, empty, trajectories[1]])
        nothing, metrics = branches(players, [])
    assert values.shape == (3, 3) and (values[0, 1:] == 0).all() and (values[1] == 0).all()
    assert nothing.shape == (0, 0) and metrics["rollout/branch_episodes"] == 0


def test_limits_hold_over_the_turns_before_and_the_new_ones(chat):
    limits = PlayLimits(max_turns=2, max_turn_tokens=4)
    with collector(chat, limits=limits, num_turns=5) as players:
        [trajectory] = rollout(players, num_prompts=1, group_size=1)
        assert len(trajectory.turns) == 2 and trajectory.truncated
        episode = Episode(0, trajectory.seed, 0, np.uint32([1, 2]), Prefix.before_turn(trajectory, 1))
        [again], _ = players.play(None, [episode], Sampling(), policy_step=8)
        assert [turn.policy_step for turn in again.turns] == [STEP, 8] and again.truncated
        assert again.turns[0] is trajectory.turns[0]
        env = make("echo", num_turns=5)
        env.reset(trajectory.seed)
        assert again.final_observation == [env.step(turn.action)[0] for turn in again.turns][1]
        past = dataclasses.replace(episode, prefix=Prefix(tuple(trajectory.turns), trajectory.final_observation))
        [ended], _ = players.play(None, [past], Sampling(), policy_step=8)
        assert len(ended.turns) == 2 and ended.truncated and ended.final_prompt_ids is not None
    # The context: room for both turns but not for a third prompt.
    used = sum(len(turn.prompt_ids) + len(turn.response_ids) for turn in trajectory.turns)
    sampler = ContextSampler(chat, context_length=used)
    with collector(chat, sampler=sampler, num_turns=5) as players:
        [again], counts = players.play(None, [episode], Sampling(), policy_step=8)
        assert (len(again.turns), again.truncated, counts["context_overflows"]) == (2, True, 1)
        [ended], counts = players.play(None, [past], Sampling(), policy_step=8)
        assert (len(ended.turns), ended.final_prompt_ids, counts["context_overflows"]) == (2, None, 1)


def test_a_prefix_that_does_not_exist_is_refused(chat):
    with collector(chat) as players:
        [trajectory] = rollout(players, num_prompts=1, group_size=1)
        with pytest.raises(ValueError, match="turn 3 of an episode; allowed: 0 to 2"):
            Prefix.before_turn(trajectory, 3)
        trajectory.turns[1].starts_row = True
        with pytest.raises(ValueError, match="window prompts"):
            branches(players, [trajectory])
        with pytest.raises(ValueError, match="num_branches=0; allowed: at least 1"):
            branches(players, [trajectory], num_branches=0)


@pytest.mark.parametrize("lockstep", [False, True])
def test_several_hosts_get_the_numbers_of_one(chat, monkeypatch, lockstep):
    with collector(chat) as players:
        trajectories = rollout(players)
        values, _ = branches(players, trajectories)
        scores, _ = greedy_scores(players, None, trajectories, seed=SEED, step=STEP)
    group = ThreadHosts(monkeypatch, 2)

    def body(index):
        with collector(chat, lockstep=lockstep) as players:
            return (
                branches(players, trajectories),
                greedy_scores(players, None, trajectories, seed=SEED, step=STEP),
            )

    results, errors = group.run(body)
    assert errors == [None, None]
    for (their_values, metrics), (their_scores, _) in results:
        np.testing.assert_array_equal(their_values, values)
        np.testing.assert_array_equal(their_scores, scores)
        assert metrics["rollout/branch_episodes"] == 54


def test_greedy_scores_play_each_seed_once_and_stand_beside_its_trajectories(chat):
    with collector(chat) as players:
        trajectories = rollout(players)
        CountingEnv.resets.clear()
        scores, metrics = greedy_scores(players, None, trajectories, seed=SEED, step=STEP)
        resets = sorted(CountingEnv.resets)
        other_run, _ = greedy_scores(players, None, trajectories[::-1], seed=99, step=7)
    seeds = [trajectory.seed for trajectory in trajectories]
    assert resets == sorted(set(seeds)) and len(resets) == 3
    np.testing.assert_allclose(scores, [sum(plain_episode(chat, seed, None)) for seed in seeds], rtol=1e-6)
    np.testing.assert_array_equal(other_run, scores[::-1])  # no randomness is left
    assert (metrics["rollout/greedy_episodes"], metrics["rollout/greedy_missing_scores"]) == (3, 0)
    np.testing.assert_allclose(metrics["rollout/greedy_score_mean"], scores[::2].mean(), rtol=1e-6)


def test_a_dropped_greedy_episode_is_nan_for_its_whole_group(chat):
    with collector(chat) as players:
        trajectories = rollout(players)
    broken = trajectories[2].seed
    with collector(chat, fail_seeds=(broken,)) as players:
        scores, metrics = greedy_scores(players, None, trajectories, seed=SEED, step=STEP)
    assert np.isnan(scores).tolist() == [trajectory.seed == broken for trajectory in trajectories]
    assert (metrics["rollout/greedy_missing_scores"], metrics["rollout/greedy_dropped_episodes"]) == (2, 1)


def test_other_rewards_than_the_environments(chat):
    """What the learner trains on, also where it looks back beyond the branch."""

    def turn_number(trajectory):
        return np.arange(len(trajectory.turns), dtype=np.float32)

    with collector(chat) as players:
        trajectories = rollout(players)
        values, _ = branches(players, trajectories, gamma=1.0, rewards=turn_number)
        scores, _ = greedy_scores(players, None, trajectories, seed=SEED, step=STEP, rewards=turn_number)
    np.testing.assert_array_equal(values, [[3.0, 3.0, 2.0]] * 6)
    np.testing.assert_array_equal(scores, [3.0] * 6)


def test_a_model_goes_on_from_a_prefix_as_it_did_in_the_episode(chat):
    """Greedy tokens and their log-probs after replayed tokens equal those of the episode that was played through."""
    sizes = dataclasses.replace(
        SIZES["tiny-qwen3"], hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
        intermediate_size=64, vocab_size=chat.num_token_ids, num_token_ids=chat.num_token_ids,
    )  # fmt: skip
    settings = SamplerSettings(num_slots=4, context_length=96, decode_chunk=4, prefill_chunk=16, prefill_rows=2)
    params = init_decoder(sizes, jax.random.key(1))
    sampler = Sampler(sizes, make_mesh(), settings, chat.eos_ids)
    limits = PlayLimits(max_turns=4, max_turn_tokens=6)
    with collector(chat, sampler=sampler, limits=limits, num_turns=9) as players:
        episodes = training_episodes(SEED, STEP, 3, 1)
        fresh, _ = players.play(params, episodes, Sampling(temperature=0.0), policy_step=STEP)
        branch = [
            Episode(4 * m + k, t.seed, m, np.uint32([7, 7]), Prefix.before_turn(t, k))
            for m, t in enumerate(fresh)
            for k in range(4)
        ]
        again, _ = players.play(params, branch, Sampling(temperature=0.0), policy_step=STEP)
        values, _ = branches(players, fresh, num_branches=1, params=params, sampling=Sampling(temperature=0.0))
    assert len({tuple(turn.response_ids) for t in fresh for turn in t.turns}) > 1
    for trajectory in again:
        m = trajectory.episode // 4
        assert len(trajectory.turns) == 4
        for turn, before in zip(trajectory.turns, fresh[m].turns, strict=True):
            np.testing.assert_array_equal(turn.prompt_ids, before.prompt_ids)
            np.testing.assert_array_equal(turn.response_ids, before.response_ids)
            # float32; the tokens before were cached by prefill in one and by decoding in the other.
            np.testing.assert_allclose(turn.behavior_logprobs, before.behavior_logprobs, rtol=1e-4, atol=1e-5)
    expected = [[sum(0.5**j * t.turns[k + j].reward for j in range(4 - k)) for k in range(4)] for t in fresh]
    np.testing.assert_allclose(values, expected, rtol=1e-6)

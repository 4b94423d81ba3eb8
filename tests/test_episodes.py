"""Playing episodes: the limits, the failures and what a trajectory holds, with a scripted sampler."""

import numpy as np
import pytest

from tests.pool_envs import ScriptedEnv
from turnppo_jax.rollout.builtin_tokenizer import build_tokenizer
from turnppo_jax.rollout.chat import Chat
from turnppo_jax.rollout.episodes import Episode, PlayLimits, play_episodes
from turnppo_jax.rollout.pool import EnvPool
from turnppo_jax.rollout.scheduler import Response
from turnppo_jax.types import StopReason

ENV = f"{ScriptedEnv.__module__}:{ScriptedEnv.__name__}"


@pytest.fixture(scope="module")
def chat():
    return Chat(build_tokenizer())


class ScriptedScheduler:
    """Says what `say(key, turn)` returns; holds contexts like the real one."""

    def __init__(self, chat, say, context_length=1000):
        self.counts, self.context_length = {}, context_length
        self._chat, self._say = chat, say
        self._contexts, self._keys, self._turns, self._asked = {}, {}, {}, []

    @property
    def busy(self):
        return bool(self._asked)

    def open(self, slot, key):
        self._contexts[slot], self._keys[slot], self._turns[slot] = [], int(key[0]), 0

    def close(self, slot):
        self._contexts.pop(slot, None)

    def room(self, slot):
        return self.context_length - len(self._contexts[slot])

    def extend(self, slot, prompt_ids, max_new_tokens):
        assert self.room(slot) > len(prompt_ids)
        self._contexts[slot] += prompt_ids.tolist()
        self._asked.append(slot)

    def launch(self):
        pass

    def collect(self):
        responses = []
        for slot in self._asked:
            text, stop = self._say(self._keys[slot], self._turns[slot])
            ids = self._chat.encode_response(text).tolist() + ([self._chat.end_id] if stop == StopReason.EOS else [])
            ids = ids[: self.room(slot)]
            self._contexts[slot] += ids
            self._turns[slot] += 1
            responses.append(Response(slot, np.int32(ids), np.zeros(len(ids), np.float32), stop))
        self._asked = []
        return responses


def play(chat, say, num_episodes=3, limits=PlayLimits(max_turns=3, max_turn_tokens=20), num_envs=2, **options):  # noqa: B008
    episodes = [Episode(index=i, seed=100 + i, group=i // 2, key=np.uint32([i, 0])) for i in range(num_episodes)]
    scheduler = ScriptedScheduler(chat, say, **options)
    with EnvPool(ENV, {}, num_envs, 0) as pool:
        return play_episodes(episodes, scheduler, pool, chat, limits, policy_step=7)


def ids_of(trajectory):
    return [i for turn in trajectory.turns for i in (*turn.prompt_ids.tolist(), *turn.response_ids.tolist())]


def test_a_trajectory_holds_the_tokens_rewards_and_texts_of_its_episode(chat):
    trajectories, _ = play(chat, lambda key, turn: (("end" if turn else f"hello {key}"), StopReason.EOS))
    assert [(t.episode, t.seed, t.group) for t in trajectories] == [(0, 100, 0), (1, 101, 0), (2, 102, 1)]
    for number, trajectory in enumerate(trajectories):
        assert (trajectory.terminated, trajectory.truncated, trajectory.final_prompt_ids) == (True, False, None)
        assert [turn.reward for turn in trajectory.turns] == [0.5, 1.0]
        assert [turn.action for turn in trajectory.turns] == [f"hello {number}", "end"]
        assert [turn.observation for turn in trajectory.turns] == [f"seed {100 + number}", f"hello {number}"]
        assert {turn.policy_step for turn in trajectory.turns} == {7}
        assert (trajectory.instructions, trajectory.final_observation) == ("do as told", "over")
        messages = [
            {"role": "system", "content": "do as told"},
            {"role": "user", "content": f"seed {100 + number}"},
            {"role": "assistant", "content": f"hello {number}"},
            {"role": "user", "content": f"hello {number}"},
            {"role": "assistant", "content": "end"},
        ]
        # Turn by turn it is the rendering of the whole conversation.
        assert ids_of(trajectory) == chat.encode_messages(messages)[0].tolist()


def test_the_turn_limit_truncates_once_and_keeps_the_unanswered_prompt(chat):
    trajectories, _ = play(chat, lambda key, turn: (f"t{turn}", StopReason.EOS), num_episodes=1)
    [trajectory] = trajectories
    assert (len(trajectory.turns), trajectory.terminated, trajectory.truncated) == (3, False, True)
    assert trajectory.final_prompt_ids.tolist() == chat.next_prompt("t2", ended=True).tolist()
    assert trajectory.final_observation == "t2"


def test_a_cut_response_gets_its_end_of_turn_id_with_the_next_prompt(chat):
    trajectories, _ = play(chat, lambda key, turn: ("cut", StopReason.TURN_LIMIT), num_episodes=1)
    first, second, _ = trajectories[0].turns
    assert first.response_ids[-1] != chat.end_id
    assert second.prompt_ids[0] == chat.end_id
    assert second.prompt_ids.tolist() == chat.next_prompt("cut", ended=False).tolist()


def test_a_full_context_truncates_and_counts_the_prompt_that_did_not_fit(chat):
    prompt = len(chat.first_prompt("seed 100", "do as told"))
    trajectories, counts = play(
        chat, lambda key, turn: ("x" * 10, StopReason.EOS), num_episodes=1, context_length=prompt + 12
    )
    [trajectory] = trajectories
    assert (len(trajectory.turns), trajectory.truncated, trajectory.final_prompt_ids) == (1, True, None)
    assert counts["context_overflows"] == 1


def test_a_first_prompt_beyond_the_context_is_a_trajectory_without_turns(chat):
    trajectories, counts = play(chat, lambda key, turn: ("x", StopReason.EOS), num_episodes=2, context_length=4)
    assert [(len(t.turns), t.terminated, t.truncated) for t in trajectories] == [(0, False, True)] * 2
    assert [t.final_observation for t in trajectories] == [None] * 2
    assert counts["context_overflows"] == 2


def test_a_failing_environment_costs_its_episode_after_the_retries_and_no_other(chat, capsys):
    tries = []

    def say(key, turn):
        if key == 1:
            tries.append(turn)
            return "raise", StopReason.EOS
        return "end", StopReason.EOS

    trajectories, counts = play(
        chat, say, num_episodes=4, limits=PlayLimits(max_turns=3, max_turn_tokens=20, max_retries=2)
    )
    assert [trajectory.episode for trajectory in trajectories] == [0, 2, 3]
    assert tries == [0, 0, 0]
    assert (counts["env_errors"], counts["dropped_episodes"]) == (3, 1)
    assert "episode 1 (seed 101) is dropped after 3 tries" in capsys.readouterr().out


def test_a_retried_episode_starts_over_and_counts_once(chat):
    failed = []

    def say(key, turn):
        if key == 0 and not failed:
            failed.append(True)
            return "raise", StopReason.EOS
        return "end", StopReason.EOS

    trajectories, counts = play(chat, say, num_episodes=2)
    assert [len(trajectory.turns) for trajectory in trajectories] == [1, 1]
    assert (counts["env_errors"], counts["dropped_episodes"]) == (1, 0)


@pytest.mark.parametrize("field", ["max_turns", "max_turn_tokens"])
def test_limits_are_checked_by_name(field):
    values = {"max_turns": 1, "max_turn_tokens": 1, field: 0}
    with pytest.raises(ValueError, match=f"rollout.{field} must be at least 1, got 0"):
        PlayLimits(**values)

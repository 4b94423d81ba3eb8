"""Rejection sampling: trajectories of a run become conversations whose tokens are those that were sampled."""

import dataclasses
import json

import numpy as np
import pytest

from configs.sections import sft_section
from tests.context_sampler import ContextSampler, CountingEnv
from turnppo_jax import sft
from turnppo_jax.command_line import finalise
from turnppo_jax.rollout.builtin_tokenizer import build_tokenizer
from turnppo_jax.rollout.chat import Chat
from turnppo_jax.rollout.collector import Collector, EnvSettings, training_episodes
from turnppo_jax.rollout.episodes import PlayLimits
from turnppo_jax.rollout.sampler import Sampling
from turnppo_jax.training import warm_start
from turnppo_jax.training.conversation_files import Selection, read_conversations
from turnppo_jax.training.trajectory_log import write_trajectories
from turnppo_jax.types import StopReason

COUNTING = f"{CountingEnv.__module__}:{CountingEnv.__name__}"


@pytest.fixture(scope="module")
def chat():
    return Chat(build_tokenizer())


def play(chat, *, stop_strings=(), step=1, max_turn_tokens=4):
    settings = EnvSettings(COUNTING, num_workers=0)
    limits = PlayLimits(max_turns=3, max_turn_tokens=max_turn_tokens)
    with Collector(ContextSampler(chat), chat, settings, limits, stop_strings=stop_strings) as players:
        return players.play(None, training_episodes(0, step, 8, 1), Sampling(), policy_step=step)[0]


def prepare(chat, path, **settings):
    settings = {"path": str(path), "heldout": 0, "row_tokens": 128} | settings
    return warm_start.prepare(warm_start.sft_settings(settings), chat, "echo", {}, 0)


def sampled_tokens(trajectory):
    """(ids, True where sampled) of a trajectory."""
    parts = [
        (ids, own) for turn in trajectory.turns for ids, own in ((turn.prompt_ids, False), (turn.response_ids, True))
    ]
    return np.concatenate([ids for ids, _ in parts]), np.concatenate([np.full(len(ids), own) for ids, own in parts])


def test_rebuilt_conversations_are_the_sampled_tokens(chat, tmp_path):
    trajectories = play(chat)
    write_trajectories(tmp_path, 1, trajectories)
    data = prepare(chat, tmp_path / "trajectories")
    assert len(data.train) == len(trajectories) == 8 and data.retokenised == data.dropped == 0
    assert data.selection.line == ""
    for demonstration, trajectory in zip(data.train, trajectories, strict=True):
        ids, own = sampled_tokens(trajectory)
        np.testing.assert_array_equal(demonstration.ids, ids)
        np.testing.assert_array_equal(demonstration.action_mask, own)
    assert "say it" in chat.decode(data.train[0].ids)  # the environment's instructions


def test_responses_that_a_stop_string_ended(chat, tmp_path):
    trajectories = play(chat, stop_strings=("A", "B"))
    stops = {turn.stop for trajectory in trajectories for turn in trajectory.turns}
    assert stops == {StopReason.EOS, StopReason.STOP_STRING}
    assert {trajectory.turns[-1].stop for trajectory in trajectories} == stops
    write_trajectories(tmp_path, 1, trajectories)
    data = prepare(chat, tmp_path / "trajectories")
    assert data.retokenised == 0
    for demonstration, trajectory in zip(data.train, trajectories, strict=True):
        ids, own = sampled_tokens(trajectory)
        ended = trajectory.turns[-1].stop == StopReason.EOS
        # Imitation ends every response with the end-of-turn id, also where the run cut it off.
        np.testing.assert_array_equal(demonstration.ids, ids if ended else [*ids, chat.end_id])
        assert demonstration.action_mask[: len(ids)][own].all()


def test_text_that_encodes_to_other_tokens_is_counted_and_imitated(chat, tmp_path):
    trajectories = play(chat)
    turn = trajectories[3].turns[1]
    ids = np.asarray([*chat.encode_text("U"), *chat.encode_text("p"), chat.end_id], np.int32)
    assert len(chat.encode_response("Up")) == 1 and chat.decode(ids) == "Up"
    trajectories[3].turns[1] = dataclasses.replace(turn, response_ids=ids, action="Up")
    write_trajectories(tmp_path, 1, trajectories)
    data = prepare(chat, tmp_path / "trajectories")
    assert (len(data.train), data.retokenised) == (8, 1)


def test_what_is_no_good_example_is_left_out_and_counted(chat, tmp_path):
    trajectories = play(chat)
    returns = [trajectory.total_reward for trajectory in trajectories]
    assert len(set(returns)) > 2
    cut = dataclasses.replace(trajectories[0].turns[-1], stop=StopReason.TURN_LIMIT)
    full = dataclasses.replace(trajectories[1].turns[0], stop=StopReason.CONTEXT_LIMIT)
    won = dataclasses.replace(trajectories[4].turns[-1], info={"success": True})
    trajectories[0].turns[-1], trajectories[1].turns[0], trajectories[4].turns[-1] = cut, full, won
    trajectories[2].turns.clear()
    write_trajectories(tmp_path, 1, trajectories)
    path = tmp_path / "trajectories"
    assert [c.tokens_crc32 for c in read_conversations(path)] == [
        json.loads(line)["tokens_crc32"] for line in (path / "step_000001.jsonl").read_text().splitlines()[3:]
    ]
    least = sorted(returns[3:])[3]
    data = prepare(chat, path, min_reward=least)
    kept = sum(value >= least for value in returns[3:])
    assert len(data.train) == kept < 5
    assert dict(data.selection.counts) == {
        "read": 8, "without_turns": 1, "cut": 2, "unsuccessful": 0, "below_min_reward": 5 - kept,
    }  # fmt: skip
    assert data.selection.line == (
        f"of 8 conversations left out: 1 without a turn, 2 with a turn cut by a limit of tokens, "
        f"{5 - kept} below sft.min_reward"
    )
    data = prepare(chat, path, only_success=True)
    expected = sum(trajectory.success for trajectory in trajectories[3:])
    assert len(data.train) == expected >= 1 and data.selection.counts["unsuccessful"] == 5 - expected
    with pytest.raises(
        ValueError, match=r"no conversation is left to imitate; of 8 conversations left out: .* 5 below"
    ):
        prepare(chat, path, min_reward=100.0)


def test_files_directories_and_patterns(chat, tmp_path):
    for step in (1, 2, 12):
        write_trajectories(tmp_path, step, play(chat, step=step))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "trajectories" / "notes.txt").write_text("no JSON")
    (tmp_path / "more.jsonl").write_text(json.dumps({"messages": messages, "success": True}) + "\n")
    whole = list(read_conversations(tmp_path / "trajectories"))
    assert len(whole) == 24
    assert list(read_conversations(str(tmp_path / "trajectories" / "step_00001*.jsonl"))) == whole[16:]
    assert list(read_conversations(str(tmp_path / "**" / "step_000002.jsonl"))) == whole[8:16]
    assert list(read_conversations(tmp_path / "trajectories" / "step_000001.jsonl")) == whole[:8]
    [conversation] = read_conversations(tmp_path / "more.jsonl", Selection(only_success=True))
    assert conversation.messages == messages and conversation.tokens_crc32 is None
    with pytest.raises(ValueError, match=r"more.jsonl:1: sft.min_reward is set, but the conversation says no 'return'"):
        list(read_conversations(tmp_path / "more.jsonl", Selection(min_reward=0.0)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty' holds no"):
        list(read_conversations(tmp_path / "empty"))
    with pytest.raises(ValueError, match="does not exist"):
        list(read_conversations(str(tmp_path / "step_*.jsonl")))
    with pytest.raises(ValueError, match=r"sft.min_reward=nan; allowed: a finite number"):
        Selection(min_reward=float("nan"))


def test_trajectories_of_an_older_version_and_broken_ones_end_in_one_line(chat, tmp_path):
    path = write_trajectories(tmp_path, 1, play(chat))
    row = json.loads(path.read_text().splitlines()[0])
    for change, message in [
        (lambda row: row.pop("instructions"), ":1: this trajectory holds no 'instructions': an older version wrote it"),
        (lambda row: row["turns"][1].pop("action"), ":1: turn 1 of the trajectory needs a text 'action'"),
        (lambda row: row.pop("turns"), 'or a trajectory with a list "turns"'),
    ]:
        broken = json.loads(json.dumps(row))
        change(broken)
        path.write_text(json.dumps(broken) + "\n")
        with pytest.raises(ValueError) as caught:
            list(read_conversations(path))
        assert f"{path}:1: " in str(caught.value) and message in str(caught.value)


def test_successes_of_an_environments_own_demonstrations(chat):
    settings = {"num_demonstrations": 40, "heldout": 0, "options": {"noise": 0.5}, "only_success": True}
    data = warm_start.prepare(warm_start.sft_settings(settings), chat, "bandit", {"prompt": "compact"}, 0)
    assert 8 < len(data.train) < 32 and len(data.train) + data.selection.counts["unsuccessful"] == 40
    with pytest.raises(ValueError, match=r"sft.min_reward is set, but the conversation says no 'return'"):
        warm_start.prepare(warm_start.sft_settings(settings | {"min_reward": 0.5}), chat, "bandit", {}, 0)


def test_the_command_trains_on_the_good_episodes_of_a_run(chat, tmp_path, capsys):
    trajectories = play(chat)
    returns = [trajectory.total_reward for trajectory in trajectories]
    write_trajectories(tmp_path / "run", 1, trajectories)
    least = sorted(returns)[2]
    good = sum(value >= least for value in returns)
    section = finalise(
        sft_section(
            path=str(tmp_path / "run" / "trajectories"), min_reward=least, rows=2, row_tokens=128, heldout=2, steps=1,
            evaluate_every=1,
        )
    )  # fmt: skip
    config = {"seed": 3, "model": {"name": "tiny-qwen2"}, "env": {"id": "echo"}, "sft": section}
    sft.run(config, tmp_path / "sft")
    printed = capsys.readouterr().out
    assert f"sft: of 8 conversations left out: {8 - good} below sft.min_reward" in printed
    assert f"sft: {good - 2} demonstrations, 0 longer than a row left out" in printed
    rows = [json.loads(line) for line in (tmp_path / "sft" / "sft_metrics.jsonl").read_text().splitlines()]
    assert (rows[-1]["sft/left_out"], rows[-1]["sft/retokenised"]) == (8 - good, 0)


def test_a_flag_can_set_the_least_reward():
    section = sft_section(steps=0)
    section.min_reward = 0.5  # a field without a type would refuse it
    assert finalise(section)["min_reward"] == 0.5 and finalise(sft_section())["min_reward"] is None

"""The packer: what stands where, what is cut, what is counted, and what is refused."""

import dataclasses

import numpy as np
import pytest

from tests.learner_cases import make_trajectories, make_turn
from turnppo_jax.training.batching import BatchShape, PackingError, kept_turns, pack
from turnppo_jax.types import StopReason, Trajectory, Turn

SHAPE = BatchShape(rows=8, tokens=32, turns=4, sampled=16, trajectories=8, max_turns=4, micro_rows=2)


def turn(prompt, response, reward=0.0, **more):
    return Turn(
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
        behavior_logprobs=-np.arange(1.0, len(response) + 1).astype(np.float32),
        reward=reward,
        stop=StopReason.EOS,
        policy_step=0,
        **more,
    )


def trajectory(*turns, terminated=True, truncated=False, group=0, final=None):
    final = None if final is None else np.array(final, np.int32)
    return Trajectory(list(turns), terminated, truncated, group, seed=0, episode=0, final_prompt_ids=final)


def test_golden():
    """A trajectory of two turns and one of a single turn share a row; the longer one comes first or second as given."""
    batch, stats = pack(
        [trajectory(turn([5, 6], [7], 1.0), turn([8], [9, 10], 2.0)), trajectory(turn([1, 2], [3], 0.25), group=4)],
        dataclasses.replace(SHAPE, rows=2, tokens=10, turns=3, sampled=5),
    )
    np.testing.assert_array_equal(batch.tokens, [[5, 6, 7, 8, 9, 10, 1, 2, 3, 0], [0] * 10])
    np.testing.assert_array_equal(batch.positions[0], [0, 1, 2, 3, 4, 5, 0, 1, 2, 0])
    np.testing.assert_array_equal(batch.segment_ids[0], [1, 1, 1, 1, 1, 1, 2, 2, 2, 0])
    np.testing.assert_array_equal(batch.turn_ids[0], [-1, -1, 0, -1, 1, 1, -1, -1, 2, -1])
    np.testing.assert_array_equal(batch.sampled_positions, [[2, 4, 5, 8, -1], [-1] * 5])
    np.testing.assert_array_equal(batch.behavior_logprobs[0], [0, 0, -1, 0, -1, -2, 0, 0, -1, 0])
    np.testing.assert_array_equal(batch.value_positions, [[1, 3, 7], [-1] * 3])
    np.testing.assert_array_equal(batch.turn_rewards, [[1, 2, 0.25], [0] * 3])
    np.testing.assert_array_equal(batch.turn_mask, [[1, 1, 1], [0] * 3])
    np.testing.assert_array_equal(batch.turn_last, [[0, 1, 1], [0] * 3])
    np.testing.assert_array_equal(batch.trajectory_ids, [[0, 0, 1], [-1] * 3])
    np.testing.assert_array_equal(batch.turn_index, [[0, 1, 0], [-1] * 3])
    np.testing.assert_array_equal(batch.bootstrap_positions, [[-1] * 3] * 2)
    np.testing.assert_array_equal(batch.group_ids, [0, 4] + [-1] * 6)
    assert (stats.rows, stats.num_micro, stats.tokens, stats.sampled, stats.turns) == (1, 1, 9, 4, 3)
    assert stats.padding_share == pytest.approx(1 - 9 / 20)
    for name in ("turn_rewards", "behavior_logprobs"):
        assert getattr(batch, name).dtype == np.float32  # fault 58


def unpack(batch):
    """{(trajectory, turn): (tokens of the segment up to the response, response, log-probs, reward)}."""
    out = {}
    for row, slot in zip(*np.nonzero(batch.turn_mask)):
        columns = np.flatnonzero(batch.turn_ids[row] == slot)
        segment = batch.segment_ids[row] == batch.segment_ids[row, columns[0]]
        before = np.flatnonzero(segment & (np.arange(batch.tokens.shape[1]) < columns[0]))
        assert batch.value_positions[row, slot] == columns[0] - 1 == before[-1]
        np.testing.assert_array_equal(batch.positions[row, before], np.arange(len(before)))
        key = int(batch.trajectory_ids[row, slot]), int(batch.turn_index[row, slot])
        assert key not in out
        out[key] = (
            batch.tokens[row, before].tolist(),
            batch.tokens[row, columns].tolist(),
            batch.behavior_logprobs[row, columns].tolist(),
            float(batch.turn_rewards[row, slot]),
        )
    return out


@pytest.mark.parametrize("window", [False, True])
def test_everything_packed_comes_out_again(window):
    shape = BatchShape(rows=24, tokens=32, turns=4, sampled=12, trajectories=12, max_turns=4)
    trajectories = make_trajectories(5, count=12, window=window)
    batch, stats = pack(trajectories, shape, bootstrap=True)
    found = unpack(batch)
    context: list[int] = []
    for number, t in enumerate(trajectories):
        for index, one in enumerate(t.turns):
            context = [] if window or index == 0 else context
            context = context + one.prompt_ids.tolist()
            want = context, one.response_ids.tolist(), one.behavior_logprobs.tolist(), np.float32(one.reward)
            assert found.pop((number, index)) == want
            context = context + one.response_ids.tolist()
    assert not found
    assert stats.sampled == sum(len(one.response_ids) for t in trajectories for one in t.turns)
    for row in range(24):  # capacities hold and sampled positions are the sampled tokens, in order
        at = batch.sampled_positions[row]
        np.testing.assert_array_equal(at[at >= 0], np.flatnonzero(batch.turn_ids[row] >= 0))
    # every truncated trajectory's unanswered prompt ends at its bootstrap position
    for row, slot in zip(*np.nonzero(batch.bootstrap_positions >= 0)):
        t = trajectories[batch.trajectory_ids[row, slot]]
        end = batch.bootstrap_positions[row, slot]
        assert t.truncated and not t.terminated and batch.turn_last[row, slot]
        np.testing.assert_array_equal(batch.tokens[row, end - 2 : end + 1], t.final_prompt_ids)
        same = batch.segment_ids[row, end] == batch.segment_ids[row, batch.value_positions[row, slot]]
        assert same == (not window)
    assert (batch.bootstrap_positions >= 0).sum() == 6
    assert batch.turn_last.sum() == 12


def test_packing_is_the_same_every_time_and_saves_rows():
    trajectories = make_trajectories(1, count=8, truncated=False)
    batch, stats = pack(trajectories, SHAPE)
    again, _ = pack(trajectories, SHAPE)
    for field in dataclasses.fields(batch):
        np.testing.assert_array_equal(getattr(batch, field.name), getattr(again, field.name))
    lengths = [sum(len(t.prompt_ids) + len(t.response_ids) for t in one.turns) for one in trajectories]
    assert stats.rows < 8 and stats.rows >= np.ceil(sum(lengths) / 32)
    assert stats.num_micro == -(-stats.rows // 2)


def test_turns_without_tokens_keep_their_reward():
    """Faults 12 and 13: the reward of an empty response goes to the turn before; what has none before is counted."""
    empty = turn([4], [], 0.5)
    t = trajectory(turn([1], [2], 1.0), empty, turn([3], [5], 2.0), turn([6], [], 0.25))
    assert kept_turns(t) == ([0, 2], [1.5, 2.25], 0.0)
    batch, stats = pack([t, trajectory(turn([1], [], -3.0)), trajectory()], SHAPE)
    np.testing.assert_array_equal(batch.tokens[0, :6], [1, 2, 4, 3, 5, 6])  # context stays as it was seen
    np.testing.assert_array_equal(batch.turn_ids[0, :6], [-1, 0, -1, -1, 1, -1])
    np.testing.assert_array_equal(batch.turn_rewards[0, :2], [1.5, 2.25])
    np.testing.assert_array_equal(batch.turn_last[0, :2], [False, True])
    assert (stats.empty_turns, stats.empty_trajectories, stats.lost_reward) == (3, 2, -3.0)
    assert (batch.turn_mask.sum(), batch.group_ids[2]) == (2, 0)


def test_bootstrap_only_where_it_is_wanted_and_the_task_goes_on():
    cut = trajectory(turn([1], [2]), terminated=False, truncated=True, final=[8, 9])
    both = trajectory(turn([1], [2]), terminated=True, truncated=True, final=[8, 9])
    unfit = trajectory(turn([1], [2]), terminated=False, truncated=True)
    batch, stats = pack([cut, both, unfit], SHAPE)
    assert not (batch.bootstrap_positions >= 0).any() and stats.tokens == 6
    batch, stats = pack([cut, both, unfit], SHAPE, bootstrap=True)
    assert stats.tokens == 8 and stats.missing_bootstraps == 1
    row, slot = np.argwhere(batch.bootstrap_positions >= 0)[0]
    assert batch.trajectory_ids[row, slot] == 0
    np.testing.assert_array_equal(batch.tokens[row, : batch.bootstrap_positions[row, slot] + 1], [1, 2, 8, 9])


def test_rows_of_a_turn_level_critic_end_at_the_last_state():
    t = trajectory(turn([1, 2], [3, 4]), turn([5], [6, 7, 8]))
    batch, stats = pack([t], SHAPE, values_only=True)
    np.testing.assert_array_equal(batch.tokens[0, :6], [1, 2, 3, 4, 5, 0])
    np.testing.assert_array_equal(batch.value_positions[0, :2], [1, 4])
    assert stats.tokens == 5 and (batch.turn_ids == -1).all() and batch.turn_mask[0, :2].all()
    cut = dataclasses.replace(t, terminated=False, truncated=True, final_prompt_ids=np.array([9, 9], np.int32))
    batch, stats = pack([cut], SHAPE, values_only=True, bootstrap=True)
    assert stats.tokens == 10 and batch.bootstrap_positions[0, 1] == 9


def test_members_keep_the_ids_of_the_whole_list():
    trajectories = make_trajectories(2, count=6)
    batch, _ = pack(trajectories, SHAPE, members=[1, 4])
    assert set(batch.trajectory_ids[batch.turn_mask]) == {1, 4}
    np.testing.assert_array_equal(batch.group_ids[:6], [0, 0, 1, 1, 2, 2])


def test_row_length_counts_every_token():
    """Fault 61: environment tokens take room too."""
    t = trajectory(turn([1, 2, 3, 4, 5], [6]), turn([7, 8, 9], [10]))
    with pytest.raises(PackingError, match=r"needs 10 tokens in one row, but tokens=9; raise tokens"):
        pack([t], dataclasses.replace(SHAPE, tokens=9, sampled=9))


def test_what_does_not_fit_is_named():
    rng = np.random.default_rng(0)
    many = trajectory(*[make_turn(rng) for _ in range(4)])
    cases = [
        ({"turns": 3}, r"needs 4 turns in one row, but turns=3; raise turns"),
        ({"sampled": 7, "max_sampled": 8}, r"needs 8 sampled in one row, but sampled=7; raise sampled"),
        ({"sampled": 8, "max_sampled": 7}, r"has 8 sampled tokens, but max_sampled=7; raise max_sampled"),
        ({"max_turns": 3}, r"has 4 turns, but max_turns=3; raise max_turns"),
    ]
    for change, message in cases:
        with pytest.raises(PackingError, match=message):
            pack([many], dataclasses.replace(SHAPE, **change))
    with pytest.raises(PackingError, match=r"3 pieces of the minibatch need 3 rows, but rows=2; raise rows"):
        pack([many] * 3, dataclasses.replace(SHAPE, rows=2))
    with pytest.raises(PackingError, match=r"9 trajectories exceed trajectories=8"):
        pack([many] * 9, SHAPE)
    with pytest.raises(PackingError, match="turn 0 has no token before its response"):
        pack([trajectory(turn([], [1]))], SHAPE)
    with pytest.raises(ValueError, match=r"rows=7 is not a multiple of micro_rows=2"):
        dataclasses.replace(SHAPE, rows=7)


def test_an_empty_rollout_packs_to_nothing():
    batch, stats = pack([], SHAPE)
    assert (stats.rows, stats.num_micro, stats.padding_share) == (0, 0, 0.0)
    assert not batch.turn_mask.any()

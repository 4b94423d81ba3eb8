"""What hosts say to each other, with threads as hosts; tests/test_hosts.py has real processes."""

import dataclasses
import json

import numpy as np
import pytest

from tests.thread_hosts import ThreadHosts
from turnppo_jax.parallel import hosts
from turnppo_jax.parallel.agreement import HostError, StopRequested, agree, together
from turnppo_jax.parallel.exchange import exchange, exchange_json
from turnppo_jax.parallel.hosts import share_of
from turnppo_jax.parallel.trajectory_bytes import decode_trajectories, encode_trajectories
from turnppo_jax.rollout.divided import play_divided
from turnppo_jax.rollout.lockstep import LockstepPool
from turnppo_jax.rollout.pool import EnvPool, EnvReply, EnvStartError
from turnppo_jax.types import StopReason, Trajectory, Turn


def make_turn(rng, prompt, response, stop, **fields):
    return Turn(
        prompt_ids=rng.integers(0, 151_936, prompt).astype(np.int32),
        response_ids=rng.integers(0, 151_936, response).astype(np.int32),
        behavior_logprobs=-rng.random(response).astype(np.float32),
        stop=stop,
        **fields,
    )


def awkward_trajectories():
    """One of each kind that could be lost on the way: no turn, an empty response, odd text, fractions, NaN."""
    rng = np.random.default_rng(0)
    first = make_turn(
        rng, 7, 3, StopReason.EOS, reward=0.1, policy_step=4, observation="a\u2028b \ud800 \U0001f9f1",
        action="\x00", info={"success": False, "moves": [1, 2.5, None], "text": "ü"},
    )  # fmt: skip
    second = make_turn(rng, 2, 0, StopReason.CONTEXT_LIMIT, reward=-1 / 3, policy_step=4, starts_row=True)
    third = make_turn(rng, 1, 33, StopReason.TURN_LIMIT, reward=float("nan"), policy_step=5)
    third.behavior_logprobs[2] = np.inf
    return [
        Trajectory(
            [first, second],
            True,
            False,
            group=2,
            seed=2**31 - 1,
            episode=5,
            info={"level": 3},
            instructions="play \ud801",
            final_observation="",
        ),
        Trajectory([], False, True, group=0, seed=0, episode=0, final_observation=None),
        Trajectory([third], False, True, group=1, seed=9, episode=3, final_prompt_ids=np.arange(4, dtype=np.int32)),
        Trajectory([third], False, True, group=1, seed=9, episode=4, final_prompt_ids=np.zeros(0, np.int32)),
    ]


def assert_same(one, other):
    assert dataclasses.asdict(one).keys() == dataclasses.asdict(other).keys()
    for field in dataclasses.fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if field.name == "turns":
            assert len(a) == len(b)
            for turn, copy in zip(a, b):
                assert_same(turn, copy)
        elif isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        else:
            assert type(a) is type(b), field.name
            np.testing.assert_equal(a, b)  # NaN equals NaN


def test_trajectories_come_back_bit_for_bit():
    sent = awkward_trajectories()
    counts = {"env_errors": 2, "rollout_s": 0.1}
    received, extra = decode_trajectories(encode_trajectories(sent, counts))
    assert extra == counts
    assert len(received) == len(sent)
    for one, other in zip(sent, received):
        assert_same(one, other)


def test_no_trajectories_come_back_as_none():
    assert decode_trajectories(encode_trajectories([])) == ([], {})


@pytest.mark.parametrize(("num", "count"), [(8, 2), (5, 2), (1, 2), (0, 3), (7, 4), (256, 64), (3, 5)])
def test_shares_are_a_partition_of_neighbours_that_differs_by_one_at_most(num, count):
    shares = [share_of(num, index, count) for index in range(count)]
    assert [i for share in shares for i in share] == list(range(num))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_one_host_exchanges_with_itself():
    assert exchange(b"abc") == [b"abc"]
    assert exchange_json({"a": [1]}) == [{"a": [1]}]
    assert agree(payload=b"x") == [b"x"]
    with pytest.raises(StopRequested):
        agree(stop=True)
    with pytest.raises(KeyError), together():
        raise KeyError("mine")


@pytest.mark.parametrize("longest", [0, 1, 4087, 4088, 4089, 9000, 2**20 + 4088, 3_000_000])
def test_messages_of_any_length_arrive_whole(monkeypatch, longest):
    group = ThreadHosts(monkeypatch, 2)
    sent = [np.random.default_rng(longest).bytes(longest), b"short"]
    results, errors = group.run(lambda index: exchange(sent[index]))
    assert errors == [None, None]
    assert results == [sent, sent]


def test_few_shapes_serve_all_messages(monkeypatch):
    """Each shape is a program to compile."""
    group = ThreadHosts(monkeypatch, 2)
    for longest in range(0, 5_000_000, 50_000):
        group.run(lambda index, longest=longest: exchange(bytes(longest * index)))
    shapes = set(group.collectives[0])
    assert len(shapes) <= 9 and max(shapes) == (2**20,)


def test_an_error_on_one_host_is_known_to_all(monkeypatch):
    group = ThreadHosts(monkeypatch, 3)

    def body(index):
        with together():
            if index == 1:
                raise KeyError("lost\nthing")
        agree()

    _, errors = group.run(body)
    assert isinstance(errors[1], KeyError)
    for index in (0, 2):
        assert isinstance(errors[index], HostError)
        assert str(errors[index]) == "host 1 failed: KeyError: 'lost\\nthing'"
    assert len(group.collectives[0]) == 1


def test_a_stop_on_one_host_stops_all_and_an_error_outweighs_it(monkeypatch):
    group = ThreadHosts(monkeypatch, 2)
    _, errors = group.run(lambda index: agree(stop=index == 1))
    assert [type(error) for error in errors] == [StopRequested, StopRequested]
    _, errors = group.run(lambda index: agree(StopRequested() if index else ValueError("x")))
    assert [type(error) for error in errors] == [ValueError, HostError]


def test_payloads_arrive_by_index(monkeypatch):
    group = ThreadHosts(monkeypatch, 3)
    results, errors = group.run(lambda index: agree(payload=bytes([index]) * (index * 5000)))
    assert errors == [None] * 3
    assert results == [[b"", b"\x01" * 5000, b"\x02" * 10000]] * 3


def test_different_configs_are_refused_by_field(monkeypatch):
    group = ThreadHosts(monkeypatch, 2)
    _, errors = group.run(lambda index: hosts.check_same("config", {"a": 1, "env": {"id": "x", "seed": index}}))
    assert {str(error) for error in errors} == {
        "config.env.seed is 0 on host 0 and 1 on host 1; allowed: the same on all"
    }


def test_a_directory_that_is_not_shared_is_refused(monkeypatch, tmp_path):
    group = ThreadHosts(monkeypatch, 2)
    _, errors = group.run(lambda index: hosts.check_shared(tmp_path / "shared"))
    assert errors == [None, None]
    assert list((tmp_path / "shared").iterdir()) == []
    monkeypatch.setattr(hosts, "SHARED_WITHIN_S", 0.0)
    (tmp_path / "1").mkdir()
    _, errors = group.run(lambda index: hosts.check_shared(tmp_path / str(index)))
    assert all("of host 1 is not that of host 0" in str(error) for error in errors)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"coordinator": "localhost:1234"}, "--num_processes is missing; allowed: all of --coordinator"),
        ({"coordinator": "localhost", "num_processes": 2, "process_id": 0}, "--coordinator=localhost; allowed: HOST"),
        ({"coordinator": "a:1", "num_processes": 0, "process_id": 0}, "--num_processes=0; allowed: at least 1"),
        ({"coordinator": "a:1", "num_processes": 2, "process_id": 2}, "--process_id=2; allowed: 0 to 1"),
    ],
)
def test_wrong_start_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        hosts.start(**arguments)


def test_a_host_of_several_that_was_started_alone_is_told_so(monkeypatch):
    monkeypatch.setattr("jax.process_count", lambda: 4)
    with pytest.raises(ValueError, match=r"number 0 of 4 hosts and was started alone; .* --multihost"):
        hosts.start()
    monkeypatch.undo()
    hosts.start()  # one process without any variable set


def played(episodes, **counts):
    turn = make_turn(np.random.default_rng(0), 2, 2, StopReason.EOS, reward=1.0, policy_step=1)
    trajectories = [Trajectory([turn], True, False, group=e, seed=e, episode=e) for e in episodes]
    return trajectories, {"dropped_episodes": 0, "rollout_s": 0.0} | counts


def test_divided_rollouts_sum_their_counts(monkeypatch):
    group = ThreadHosts(monkeypatch, 2)

    def body(index):
        # The second host drops two of its three episodes, and it alone has something to discard.
        if index == 0:
            return play_divided(lambda mine: played(mine, rollout_s=2.0, sampled_tokens=7), list(range(5)))
        return play_divided(
            lambda mine: played(mine[:1], dropped_episodes=2, rollout_s=1.0, sampled_tokens=5, discarded_tokens=1),
            list(range(5)),
        )

    results, errors = group.run(body)
    assert errors == [None, None]
    for trajectories, counts in results:
        assert [trajectory.episode for trajectory in trajectories] == [0, 1, 2]
        counts.pop("exchange_s")
        assert counts == {"dropped_episodes": 2, "rollout_s": 2.0, "sampled_tokens": 12, "discarded_tokens": 1}


def test_a_host_without_episodes_takes_part(monkeypatch):
    group = ThreadHosts(monkeypatch, 3)
    results, errors = group.run(lambda index: play_divided(played, [7]))
    assert errors == [None] * 3
    assert [[t.episode for t in trajectories] for trajectories, _ in results] == [[7]] * 3


def lockstep(host, count=4, env="tests.pool_envs:ScriptedEnv", **kwargs):
    def make_pool(num_envs):
        return EnvPool(env, kwargs, num_envs, num_workers=0)

    pool = LockstepPool(make_pool, count)
    assert pool.num_envs == count
    return pool


def collect(pool, num):
    replies = []
    while len(replies) < num:
        replies += pool.poll(1.0)
    return replies


def test_lockstep_gives_every_host_all_replies_in_one_order(monkeypatch):
    group = ThreadHosts(monkeypatch, 2)

    def body(index):
        pool = lockstep(index, count=5)
        for env in range(5):
            pool.reset(env, 100 + env)
        seen = collect(pool, 5)
        for env in range(5):
            pool.step(env, "raise" if env == 4 else f"text {env}")
        seen += collect(pool, 5)
        pool.settle()
        pool.close()
        return seen

    results, errors = group.run(body)
    assert errors == [None, None]
    assert json.dumps([dataclasses.asdict(r) for r in results[0]]) == json.dumps(
        [dataclasses.asdict(r) for r in results[1]]
    )
    assert [reply.index for reply in results[0]] == [0, 1, 2, 3, 4] * 2
    assert [reply.observation for reply in results[0][:5]] == [f"seed {100 + env}" for env in range(5)]
    assert results[0][9].kind == "error"


def test_lockstep_hosts_fail_and_stop_together(monkeypatch):
    group = ThreadHosts(monkeypatch, 2)

    def body(index):
        pool = lockstep(index, fail_to_start=index == 1)
        for env in range(4):
            pool.reset(env, env)
        collect(pool, 4)

    _, errors = group.run(body)
    assert isinstance(errors[1], EnvStartError)
    assert isinstance(errors[0], HostError) and "host 1 failed: EnvStartError" in str(errors[0])

    def stop(index):
        pool = lockstep(index)
        if index == 0:
            pool.defer(StopRequested())
        pool.settle()

    _, errors = group.run(stop)
    assert [type(error) for error in errors] == [StopRequested, StopRequested]


def test_more_hosts_than_lockstep_environments(monkeypatch):
    group = ThreadHosts(monkeypatch, 3)

    def body(index):
        pool = lockstep(index, count=2)
        pool.reset(0, 5)
        pool.reset(1, 6)
        return collect(pool, 2)

    results, errors = group.run(body)
    assert errors == [None] * 3
    assert all([(r.index, r.observation) for r in replies] == [(0, "seed 5"), (1, "seed 6")] for replies in results)
    assert isinstance(results[0][0], EnvReply)

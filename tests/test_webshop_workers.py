"""WebShop in worker processes, and its demonstrations as the data of a warm start."""

import json
import os
import signal

import pytest

from envs.registry import make
from envs.webshop.demonstrations import main
from envs.webshop.shoppers import knowing
from turnppo_jax.rollout.pool import EnvPool
from turnppo_jax.training import warm_start

KWARGS = {"num_products": 60, "prompt": "compact", "thinking": False}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """The workers' built-in catalogue goes here, as they inherit the environment's variables."""
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


def gather(pool: EnvPool) -> dict:
    replies = []
    while pool.num_in_flight:
        replies += pool.poll(None)
    return {reply.index: reply for reply in replies}


def responses(seed: int) -> list[str]:
    """What the shopper answers in the episode of a seed."""
    env, shopper = make("webshop", **KWARGS), knowing("request")
    env.reset(seed)
    written, ended = [], False
    while not ended:
        written.append(env.write_response(shopper(env.session, env.goal)))
        *_, terminated, truncated, _ = env.step(written[-1])
        ended = terminated or truncated
    return written


def transcripts(num_workers: int) -> list:
    """Everything that four environments say, played together turn by turn."""
    scripts = {index: responses(100 + index) for index in range(4)}
    heard: list = [[] for _ in scripts]
    with EnvPool("webshop", KWARGS, 4, num_workers, reset_timeout_s=60.0, step_timeout_s=60.0) as pool:
        for index in scripts:
            pool.reset(index, 100 + index)
        for turn in range(max(map(len, scripts.values())) + 1):
            for index, reply in gather(pool).items():
                assert reply.kind != "error", reply.error
                heard[index].append((reply.observation, reply.reward, reply.terminated, reply.info))
            for index, script in scripts.items():
                if turn < len(script):
                    pool.step(index, script[turn])
    return heard


def test_episodes_are_the_same_in_any_number_of_processes():
    alone = transcripts(0)
    for heard in alone:
        assert heard[-1][1:3] == (1.0, True) and heard[-1][3]["success"] is True
    assert transcripts(2) == alone


def test_a_killed_worker_costs_its_episode_alone():
    with EnvPool("webshop", KWARGS, 2, 2, reset_timeout_s=60.0, step_timeout_s=60.0) as pool:
        for index in range(2):
            pool.reset(index, index)
        first = gather(pool)
        os.kill(pool._workers[0].process.pid, signal.SIGKILL)
        for index in range(2):
            pool.step(index, "<answer>search[shirts]</answer>")
        replies = gather(pool)
        assert sorted(reply.kind for reply in replies.values()) == ["error", "step"]
        dead = next(index for index, reply in replies.items() if reply.kind == "error")
        assert replies[1 - dead].info["page"] == "results"
        pool.reset(dead, dead)
        assert gather(pool)[dead].observation == first[dead].observation


def test_a_warm_start_takes_the_demonstrations():
    sft = warm_start.sft_settings({"num_demonstrations": 12, "options": {"query": "request", "only_success": True}})
    found = list(warm_start.conversations(sft, "webshop", KWARGS, seed=0))
    assert len(found) == 12
    for messages in (conversation.messages for conversation in found):
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert messages[-1]["content"] == "<answer>click[buy now]</answer>"
    # Another run is shown other episodes.
    assert found != list(warm_start.conversations(sft, "webshop", KWARGS, seed=1))
    assert "webshop-ragen" in warm_start.DEMONSTRATIONS


def test_demonstrations_are_written_to_a_file_that_a_warm_start_reads(tmp_path, capsys):
    out = tmp_path / "shop.jsonl"
    flags = [f"--out={out}", f"--env_kwargs={json.dumps(KWARGS)}", "--first_seed=10000", "--query=request"]
    main([*flags, "--episodes=12", "--only_success"])
    assert capsys.readouterr().out == f"12 demonstrations, 12 of them successful, in {out}\n"
    settings = warm_start.sft_settings({"num_demonstrations": 12, "options": {"query": "request"}})
    made = list(warm_start.conversations(settings, "webshop", KWARGS, seed=0))
    assert list(warm_start.conversations(settings | {"path": str(out)}, "webshop", KWARGS, seed=0)) == made
    with pytest.raises(SystemExit):
        main([*flags, "--noise=2"])
    assert capsys.readouterr().err == "demonstrations: noise must be in [0, 1], got 2.0\n"

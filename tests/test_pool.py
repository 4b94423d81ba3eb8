"""The pool of environments: any order, any text, and workers that die, hang or raise."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from turnppo_jax.rollout.pool import EnvPool, EnvReply, EnvStartError

SCRIPTED = "tests.pool_envs:ScriptedEnv"
ROOT = pathlib.Path(__file__).resolve().parents[1]


def make_pool(num_envs=2, num_workers=1, env_id=SCRIPTED, reset_timeout_s=30.0, step_timeout_s=30.0, **kwargs):
    return EnvPool(
        env_id, kwargs, num_envs, num_workers, reset_timeout_s=reset_timeout_s, step_timeout_s=step_timeout_s
    )


def gather(pool: EnvPool) -> list[EnvReply]:
    """All replies in flight, in the order they came."""
    replies = []
    while pool.num_in_flight:
        replies += pool.poll(None)
    return replies


def reset_all(pool: EnvPool) -> dict[int, EnvReply]:
    for index in range(pool.num_envs):
        pool.reset(index, 100 + index)
    return {reply.index: reply for reply in gather(pool)}


def step(pool: EnvPool, index: int, text: str) -> EnvReply:
    pool.step(index, text)
    (reply,) = gather(pool)
    return reply


def exists(pid: int) -> bool:
    """Whether the process lives; one that is dead but not yet reaped does not."""
    try:
        os.kill(pid, 0)
        stat = pathlib.Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_until_gone(pid: int, timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while exists(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not exists(pid)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_an_episode_looks_the_same_with_any_number_of_workers(num_workers):
    with make_pool(4, num_workers) as pool:
        replies = reset_all(pool)
        assert sorted(replies) == [0, 1, 2, 3]
        for index, reply in replies.items():
            assert (reply.kind, reply.observation, reply.instructions) == ("reset", f"seed {100 + index}", "do as told")
        reply = step(pool, 2, "hello")
        assert reply == EnvReply(2, "step", "hello", 0.5, False, False, {"success": False, "turns": 1, "seed": 102})
        reply = step(pool, 2, "end")
        assert (reply.observation, reply.reward, reply.terminated) == ("over", 1.0, True)
        # A finished environment is never stepped; resetting it begins anew.
        with pytest.raises(RuntimeError, match="episode of environment 2 has ended"):
            pool.step(2, "again")
        pool.reset(2, 7)
        assert gather(pool)[0].observation == "seed 7"
        assert pool.poll(None) == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_any_text_passes(num_workers):
    texts = [
        "",
        "\n\r\n",
        "a\u2028b\u2029c\x85d",
        "nul\0byte",
        "lone \ud800 and \udfff",
        "🧱√" * 1000,
        '"}\\n{',
        "\x1b",
    ]
    with make_pool(1, num_workers) as pool:
        reset_all(pool)
        for text in texts:
            assert step(pool, 0, text).observation == text


def test_prints_of_an_environment_do_not_reach_the_protocol():
    with make_pool(1, 1) as pool:
        reset_all(pool)
        assert step(pool, 0, "print").observation == "print"
        assert step(pool, 0, "read").observation == "read ''"
        assert step(pool, 0, "still here").observation == "still here"


def test_workers_are_forced_onto_the_cpu_and_import_no_jax():
    with make_pool(2, 2) as pool:
        replies = reset_all(pool)
        assert not any(reply.info["jax"] for reply in replies.values())
        assert replies[0].info["pid"] != replies[1].info["pid"] != os.getpid()
        assert step(pool, 0, "platform").observation == "cpu"


def test_late_answers_belong_to_the_right_environment():
    # Eight environments in eight workers, the earlier the slower, three of them not playing any more.
    with make_pool(8, 8) as pool:
        reset_all(pool)
        for index in (1, 4, 6):
            assert step(pool, index, "end").terminated
        playing = [0, 2, 3, 5, 7]
        for index in playing:
            pool.step(index, f"sleep:{0.08 * (7 - index)}")
        replies = gather(pool)
        assert sorted(reply.index for reply in replies) == playing
        for reply in replies:
            assert reply.observation == f"sleep:{0.08 * (7 - reply.index)}"
            assert reply.info == {"success": False, "turns": 1, "seed": 100 + reply.index}
        assert replies[0].index != 0  # the slowest did not hold up the others


def test_replies_of_one_worker_keep_their_environment():
    with make_pool(6, 2) as pool:
        reset_all(pool)
        for index in range(6):
            pool.step(index, f"text {index}")
        assert {reply.index: reply.observation for reply in gather(pool)} == {i: f"text {i}" for i in range(6)}


def test_a_killed_worker_costs_its_episodes_and_no_others():
    with make_pool(4, 2) as pool:
        replies = reset_all(pool)
        pool.step(0, "sleep:60")
        pool.step(1, "fine")
        os.kill(replies[0].info["pid"], signal.SIGKILL)
        answers = {reply.index: reply for reply in gather(pool)}
        assert answers[1].observation == "fine"
        assert answers[0].kind == "error" and not answers[0].timed_out
        assert answers[0].error == "its worker process died (signal SIGKILL)"
        # Environment 2 lived in the same worker and had nothing in flight: it says so when stepped.
        lost = step(pool, 2, "go on")
        assert lost.kind == "error" and "SIGKILL" in lost.error
        assert step(pool, 3, "go on").observation == "go on"
        pool.reset(0, 5)
        pool.reset(2, 6)
        assert {reply.observation for reply in gather(pool)} == {"seed 5", "seed 6"}
        assert pool.num_restarts == 1


def test_a_worker_that_exits_says_with_what_code():
    with make_pool(2, 1) as pool:
        reset_all(pool)
        pool.step(0, "exit")
        pool.step(1, "behind it")
        replies = gather(pool)
        assert [reply.index for reply in replies] == [0, 1]
        assert {reply.error for reply in replies} == {"its worker process died (exit code 3)"}


def test_a_hanging_step_times_out():
    with make_pool(4, 2, step_timeout_s=0.5) as pool:
        pid = reset_all(pool)[0].info["pid"]
        start = time.monotonic()
        pool.step(0, "sleep:600")
        pool.step(2, "behind it")
        pool.step(1, "other worker")
        answers = {reply.index: reply for reply in gather(pool)}
        # Bounds: the limit below, and above only that nobody waited for the sleep.
        assert 0.5 <= time.monotonic() - start < 20
        assert answers[0].timed_out and answers[0].error == "step of environment 0 took longer than 0.5 s"
        # It never had its turn, so it is not the one that was late.
        assert answers[2].kind == "error" and not answers[2].timed_out
        assert answers[1].observation == "other worker"
        assert not exists(pid)
        pool.reset(0, 1)
        assert gather(pool)[0].kind == "reset"


def test_waiting_behind_others_does_not_count_against_the_limit():
    with make_pool(4, 1, step_timeout_s=1.5) as pool:
        reset_all(pool)
        for index in range(4):
            pool.step(index, "sleep:0.6")  # 2.4 s in all, none longer than the limit
        assert [reply.kind for reply in gather(pool)] == ["step"] * 4


def test_a_worker_that_answered_before_anyone_looked_is_not_late():
    with make_pool(1, 1, step_timeout_s=0.3) as pool:
        reset_all(pool)
        pool.step(0, "quick")
        time.sleep(0.6)
        assert [reply.kind for reply in pool.poll(0)] == ["step"]


def test_a_kill_reaches_what_the_environment_started(tmp_path):
    pid_file = tmp_path / "pid"
    with make_pool(1, 1, step_timeout_s=2.0, pid_file=str(pid_file)) as pool:
        reset_all(pool)
        assert step(pool, 0, "child").timed_out
        assert wait_until_gone(int(pid_file.read_text()))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_environment_that_raises_costs_its_own_episode(num_workers):
    with make_pool(3, num_workers) as pool:
        reset_all(pool)
        for text, expected in [("raise", "KeyError"), ("nan", "reward must be finite"), ("system_exit", "leaving")]:
            reply = step(pool, 0, text)
            assert reply.kind == "error" and expected in reply.error
            assert len(reply.error.splitlines()) == 1
            assert step(pool, 0, "on").kind == "error"
            pool.reset(0, 1)
            assert gather(pool)[0].observation == "seed 1"
        pool.reset(1, -666)
        assert gather(pool)[0].error.startswith("reset raised RuntimeError: no such seed")
        assert step(pool, 2, "untouched").info["turns"] == 1
        assert pool.num_restarts == 0


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_environment_that_cannot_be_made_ends_the_pool_with_one_line(num_workers):
    for kwargs, expected in [({"fail_to_start": True}, "fail_to_start was asked for"), ({"size": 3}, "'size'")]:
        pool = make_pool(2, num_workers, **kwargs)
        pool.reset(0, 0)
        with pytest.raises(EnvStartError, match=expected) as caught:
            gather(pool)
        assert "\n" not in str(caught.value)
        with pytest.raises(RuntimeError, match="closed"):
            pool.poll(0)


def test_wrong_use_is_refused():
    with pytest.raises(ValueError, match=r"unknown environment id 'sokobam'; known: .*sokoban"):
        EnvPool("sokobam", {}, 1, 1)
    with pytest.raises(ValueError, match="num_envs must be >= 1"):
        make_pool(0, 1)
    with pytest.raises(ValueError, match="must be JSON"):
        make_pool(1, 1, size=object())
    with pytest.raises(ValueError, match="step_timeout_s must be above 0"):
        make_pool(1, 1, step_timeout_s=0.0)
    with make_pool(1, 0) as pool:
        with pytest.raises(IndexError, match="no environment 1"):
            pool.reset(1, 0)
        pool.reset(0, 0)
        with pytest.raises(RuntimeError, match="request in flight"):
            pool.step(0, "too early")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_step_before_any_reset_is_answered_with_an_error(num_workers):
    with make_pool(1, num_workers) as pool:
        assert step(pool, 0, "too early").error == "no episode to step: it was never reset"


def test_large_texts_both_ways_do_not_block():
    # 20 requests of 200 kB fill both pipes many times over while the worker is still asleep.
    with make_pool(20, 1) as pool:
        reset_all(pool)
        pool.step(0, "sleep:0.3")
        for index in range(1, 20):
            pool.step(index, "x" * 200_000)
        assert sum(len(reply.observation) for reply in gather(pool)) == 19 * 200_000 + len("sleep:0.3")


def test_close_leaves_no_process_and_no_thread():
    threads = threading.active_count()
    pool = make_pool(3, 3)
    pids = [reply.info["pid"] for reply in reset_all(pool).values()]
    pool.step(0, "sleep:600")
    start = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - start < 10
    assert not any(exists(pid) for pid in pids)
    assert threading.active_count() == threads
    with pytest.raises(RuntimeError, match="closed"):
        pool.reset(0, 0)


@pytest.mark.parametrize("how", ["return", "raise", "kill"])
def test_a_program_that_ends_leaves_no_worker(how, tmp_path):
    script = f"""
        import os, signal, sys
        sys.path.insert(0, {str(ROOT)!r})
        from turnppo_jax.rollout.pool import EnvPool
        pool = EnvPool({SCRIPTED!r}, {{}}, 1, 1)
        pool.reset(0, 0)
        print(pool.poll(None)[0].info["pid"], flush=True)
        pool.step(0, "sleep:600")
        if {how!r} == "raise":
            raise SystemExit("an error")
        if {how!r} == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=tmp_path, stdout=subprocess.PIPE, timeout=60
    )
    assert wait_until_gone(int(done.stdout))


def test_environments_come_from_the_current_directory(tmp_path):
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
            from envs.base import TextEnv

            class Mine(TextEnv):
                def __init__(self, word):
                    self.word = word

                def reset(self, seed):
                    return f"{self.word} {seed}", {}

                def step(self, text):
                    return text, 1, True, False, {"success": True}
        """)
    )
    script = f"""
        import sys
        sys.path.append({str(ROOT)!r})
        from turnppo_jax.rollout.pool import EnvPool
        for num_workers in (0, 1):
            with EnvPool("mine:Mine", {{"word": "mine"}}, 1, num_workers) as pool:
                pool.reset(0, 3)
                print(pool.poll(None)[0].observation)
    """
    script_path = tmp_path / "elsewhere" / "run.py"
    script_path.parent.mkdir()
    script_path.write_text(textwrap.dedent(script))
    # As a script, so that the current directory is not on the path of the program itself.
    done = subprocess.run([sys.executable, str(script_path)], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["mine 3", "mine 3"], done.stderr


def test_two_thousand_resets_keep_memory_and_threads_flat():
    def footprint(pid):
        status = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in status)
        return int(fields["VmRSS"].split()[0]), int(fields["Threads"]), len(os.listdir(f"/proc/{pid}/fd"))

    if not pathlib.Path("/proc/self/status").exists():
        pytest.skip("needs /proc to read memory and threads")
    with make_pool(8, 1, env_id="sokoban") as pool:
        pid = pool._workers[0].process.pid

        def play(rounds):
            for round_ in range(rounds):
                for index in range(8):
                    pool.reset(index, 8 * round_ + index)
                gather(pool)

        play(50)
        before = [footprint(pid), footprint(os.getpid())]
        play(250)
        after = [footprint(pid), footprint(os.getpid())]
    for (rss, threads, files), (new_rss, new_threads, new_files) in zip(before, after, strict=True):
        # 2,000 leaked rooms of a few kilobytes each would be several times this.
        assert new_rss - rss < 2048, f"{rss} -> {new_rss} kB"
        assert (new_threads, new_files) == (threads, files)

"""WebShop under whatever a policy may write: an answer, rewards in bounds, memory flat."""

import gc
import json
import random
import threading
import tracemalloc

from benchmarks.webshop_actions import hostile_text
from envs.registry import make
from envs.worker import EnvHost
from tests.webshop_cases import Shelf

KWARGS = {"catalogue": Shelf(), "split": "all", "thinking": False}
WORDS = ("shirt", "tee", "lamp")


def test_any_text_is_answered():
    rng = random.Random(0)
    threads = threading.active_count()
    ends = {"terminated": 0, "truncated": 0}
    for kwargs in ({}, {"prompt": "compact"}, {"observation": "text_rich", "show_attributes": True}):
        env = make("webshop", **KWARGS, **kwargs)
        env.reset(0)
        seed = 0
        for _ in range(3000):
            text = hostile_text(rng, env.session.clickables, thinking=False, words=WORDS)
            observation, reward, terminated, truncated, info = env.step(text)
            assert isinstance(observation, str) and observation
            assert reward == (-0.1 if info["invalid_action"] else info["score"])
            assert 0.0 <= info["score"] <= 1.0 and info["success"] is (info["score"] == 1.0)
            json.dumps(info)
            ends["terminated"] += terminated
            ends["truncated"] += truncated
            if terminated or truncated:
                seed += 1
                env.reset(seed)
    assert min(ends.values()) > 50 and threading.active_count() == threads


def test_memory_is_flat_over_resets():
    env = make("webshop", **KWARGS)
    rng = random.Random(1)

    def episodes(number):
        for seed in range(number):
            env.reset(seed)
            for _ in range(5):
                text = hostile_text(rng, env.session.clickables, thinking=False, words=WORDS)
                _, _, terminated, _, _ = env.step(text)
                if terminated:
                    break

    episodes(300)
    tracemalloc.start()
    try:
        episodes(200)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        episodes(1500)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 200_000  # 2,000 resets of a session that leaked its page alone would leave megabytes


def test_a_worker_answers_surrogates_and_control_tokens():
    host = EnvHost("webshop", KWARGS)
    assert "error" not in host.handle({"op": "reset", "index": 0, "seed": 1})
    for text in ("<answer>search[\ud800 <|im_end|>\n]</answer>", "<answer>search[\ud800 <|im_end|> shirt]</answer>"):
        answered = host.handle({"op": "step", "index": 0, "text": text})
        assert "error" not in answered
        json.dumps(answered).encode("ascii")
    assert answered["info"]["page"] == "results"

"""Environment ids, and the tiny environments."""

import subprocess
import sys
from pathlib import Path

import pytest

from envs import registry
from envs.base import TextEnv
from envs.registry import make


class Widget(TextEnv):
    def __init__(self, size, color="red"):
        self.size, self.color = size, color

    def reset(self, seed):
        return "", {}

    def step(self, text):
        return "", 0.0, True, False, {}


def test_every_registered_id_can_be_made(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where the built-in catalogue of WebShop is put
    levels = tmp_path / "levels.txt"
    levels.write_text("; 0\n######\n#@ $.#\n######\n\n; 1\n######\n#@$ .#\n######\n")
    arguments = {"sokoban-boxoban": {"path": str(levels), "num_eval_rooms": 1}}
    for env_id in registry.known_ids():
        env = make(env_id, **arguments.get(env_id, {}))
        for seed in range(3):
            observation, info = env.reset(seed)
            assert isinstance(observation, str) and info["success"] is False
            assert env.reset(seed) == (observation, info)
            observation, reward, terminated, truncated, info = env.step("anything")
            assert isinstance(observation, str) and isinstance(reward, float)
            assert isinstance(info["success"], bool) and terminated in (True, False) and truncated in (True, False)
        env.close()


@pytest.mark.parametrize(
    ("env_id", "kwargs", "message"),
    [
        (
            "sokobam",
            {},
            r"unknown environment id 'sokobam'; known: bandit, countdown, echo, parity, sokoban.*, or module:Class",
        ),
        (":Widget", {}, "unknown environment id ':Widget'"),
        ("sokoban", {"widht": 7}, "environment 'sokoban' has no argument 'widht'; known: height, width"),
        ("sokoban-boxoban", {}, "environment 'sokoban-boxoban' needs the argument 'path'"),
        ("no_such_module:Env", {}, "cannot import module 'no_such_module'"),
        ("envs.small:NoSuch", {}, "module 'envs.small' has no 'NoSuch'"),
        ("tests.test_envs_registry:Widget", {"size": 1, "weight": 2}, "has no argument 'weight'; known: size, color"),
    ],
)
def test_errors_are_one_line_that_names_it(env_id, kwargs, message):
    with pytest.raises(ValueError, match=message) as caught:
        make(env_id, **kwargs)
    assert "\n" not in str(caught.value)


def test_register_and_override(monkeypatch):
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))
    registry.register("widget", "tests.test_envs_registry:Widget", size=3)
    assert (make("widget").size, make("widget").color) == (3, "red")
    assert (make("widget", size=4, color="blue").size, make("widget", color="blue").color) == (4, "blue")
    registry.register("widget-class", Widget)
    assert make("widget-class", size=5).size == 5
    assert make("tests.test_envs_registry:Widget", size=6).size == 6
    with pytest.raises(ValueError, match="'widget' is already registered"):
        registry.register("widget", Widget)
    with pytest.raises(ValueError, match="must not hold ':'"):
        registry.register("a:b", Widget)


def test_environments_import_neither_jax_nor_turnppo_jax():
    script = (
        "import sys, envs.worker, envs.small, envs.sokoban.env, envs.sokoban.demonstrations\n"
        "import envs.webshop.env, envs.webshop.demonstrations\n"
        "bad = {'jax', 'flax', 'turnppo_jax', 'torch'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).resolve().parents[1], check=True)


def test_echo():
    env = make("echo", alphabet="AB", num_turns=2)
    seen = set()
    for seed in range(20):
        first, _ = env.reset(seed)
        seen.add(first)
        second, reward, terminated, truncated, info = env.step(f" {first}\n")
        assert (reward, terminated, truncated, info["success"]) == (1.0, False, False, False)
        _, reward, terminated, _, info = env.step(second)
        assert (reward, terminated, info) == (1.0, True, {"success": True, "num_right": 2})
    assert seen == {"A", "B"}
    first, _ = env.reset(0)
    assert env.step(first + first)[1] == 0.2
    _, reward, terminated, _, info = env.step("?")
    assert (reward, terminated, info["success"]) == (0.0, True, False)


def test_parity():
    env = make("parity", num_turns=3)
    observation, _ = env.reset(5)
    for turn in range(3):
        right = {"0": "b", "1": "a"}[observation]  # codes 98 and 97
        observation, reward, terminated, _, info = env.step(f" {right} and more")
        assert (reward, terminated) == (1.0, turn == 2)
    assert info["success"]
    observation, _ = env.reset(6)
    assert env.step("")[1] == 0.0
    assert env.reset(6)[0] == observation
    assert env.step({"0": "a", "1": "b"}[observation])[1] == 0.0


@pytest.mark.parametrize(
    ("env_id", "kwargs", "message"),
    [
        ("echo", {"alphabet": "AA"}, "alphabet"),
        ("echo", {"num_turns": 0}, "num_turns"),
        ("echo", {"partial": 1.0}, "partial"),
        ("parity", {"num_turns": -1}, "num_turns"),
    ],
)
def test_small_arguments_are_refused_by_name(env_id, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(env_id, **kwargs)

"""The bandit: which name is which arm, what it pays, any text, demonstrations."""

import json
import random

import pytest

from envs.bandit.demonstrations import demonstrations
from envs.bandit.env import NAMES, pairs_of
from envs.registry import make


def reply(answer, thought="hm"):
    return f"<think>{thought}</think><answer>{answer}</answer>"


def arms(env):
    return {arm: name for name, arm in env.arm_of.items()}


def test_both_arms_pay_what_they_should():
    env = make("bandit", prompt="compact")
    paid = {"low": [], "high": []}
    for seed in range(4000):
        for arm in paid:
            _, info = env.reset(seed)
            assert info == {"success": False, "arm": None, "invalid_action": False}
            name = arms(env)[arm]
            after, reward, terminated, truncated, info = env.step(reply(f" {name.upper()}\n"))
            assert (terminated, truncated) == (True, False) and after == f"{name} {reward:g}"
            assert info == {"success": arm == "high", "arm": arm, "invalid_action": False}
            paid[arm].append(reward)
    assert set(paid["low"]) == {0.1} and set(paid["high"]) == {0.0, 1.0}
    # 4,000 draws of probability .25: standard deviation .0068.
    assert abs(sum(paid["high"]) / 4000 - 0.25) < 0.03


def test_names_roles_order_and_draw_come_from_the_seed_and_nothing_tells_them_apart_but_the_hint():
    env, other = make("bandit", prompt="compact"), make("bandit", prompt="compact")
    other.reset(5)
    other.step("no history")
    high_first = high_by_name = 0
    for seed in range(2000):
        observation, _ = env.reset(seed)
        assert other.reset(seed)[0] == observation
        names = arms(env)
        assert sorted(observation.splitlines()) == sorted([f"{names['low']} steady", f"{names['high']} risky"])
        text = reply(names["high"])
        assert env.step(text) == other.step(text)
        high_first += observation.startswith(names["high"])
        high_by_name += names["high"] < names["low"]
    # Coins of 2,000 throws: standard deviation 22.
    assert abs(high_first - 1000) < 110 and abs(high_by_name - 1000) < 110
    blind = make("bandit", prompt="compact", hint=False)
    observation, _ = blind.reset(0)
    assert sorted(observation.splitlines()) == sorted(blind.arm_of)


def test_evaluation_pairs_are_never_shown_in_training():
    train, held_out = set(pairs_of("train")), set(pairs_of("eval"))
    assert not train & held_out and len(train | held_out) == len(NAMES) * (len(NAMES) - 1) // 2 == 120
    assert {name for pair in train for name in pair} == set(NAMES)
    for split, pairs in (("train", train), ("eval", held_out)):
        env = make("bandit", split=split)
        seen = set()
        for seed in range(1500):
            env.reset(seed)
            seen.add(tuple(sorted(env.arm_of)))
        assert seen == pairs


def test_other_pays_make_the_other_arm_the_right_one():
    env = make("bandit", low_reward=0.5, high_reward=2.0, high_probability=0.2)
    env.reset(0)
    assert env.step(reply(arms(env)["low"]))[1:] == (
        0.5, True, False, {"success": True, "arm": "low", "invalid_action": False},
    )  # fmt: skip


def test_rewards_stay_in_bounds_for_any_text():
    rng = random.Random(0)
    pieces = [
        *("<think>", "</think>", "<answer>", "</answer>", " ", "\n", "\0", "\u2028", "\ud800", "<|im_end|>", "1e999"),
        *(*NAMES, "dragon", "DRAGON", "Dragon Dragon", "{0}", "%s", "steady", "risky", "<think></think><answer>"),
    ]
    invalid = 0
    for thinking in (True, False):
        env = make("bandit", thinking=thinking, format_penalty=-0.25)
        for seed in range(6000):
            env.reset(seed)
            text = "".join(rng.choices([*pieces, *env.arm_of], k=rng.randrange(9)))
            if rng.random() < 0.5:  # something that is close to an answer
                text = f"<think></think><answer>{rng.choice(list(env.arm_of))}{rng.choice(['', ' ', '.'])}</answer>"
            observation, reward, terminated, truncated, info = env.step(text)
            assert reward in (-0.25, 0.0, 0.1, 1.0) and (reward == -0.25) == info["invalid_action"]
            assert terminated and not truncated and isinstance(observation, str) and json.dumps(info)
            invalid += info["invalid_action"]
    assert 5000 < invalid < 11_000


@pytest.mark.parametrize("text", ["", "Dragon", "<answer>{name}</answer>", "<think></think><answer>{name}.</answer>",
                                  "<think></think><answer>{name} or not</answer>",
                                  "<think><answer>{name}</answer></think>"])  # fmt: skip
def test_only_the_name_alone_in_the_response_format_is_an_answer(text):
    env = make("bandit")
    env.reset(3)
    observation, reward, *_, info = env.step(text.replace("{name}", arms(env)["high"]))
    assert (observation, reward, info["invalid_action"], info["success"]) == (
        "That named neither arm.", -0.1, True, False,
    )  # fmt: skip


def test_full_prompt_says_what_there_is_to_know():
    env = make("bandit")
    for word in ("pays 0.1", "pays 1 with probability 0.25", "<think>...</think><answer>NAME</answer>"):
        assert word in env.instructions
    observation, _ = env.reset(0)
    names = arms(env)
    for line in (f"{names['low']} is the steady one.", f"{names['high']} is the risky one.", "<think>"):
        assert line in observation
    assert "<think>" not in make("bandit", thinking=False).instructions


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"split": "test"}, "unknown split 'test'; known: train, eval, seed"),
        ({"prompt": "long"}, "unknown prompt 'long'; known: full, compact"),
        ({"format_penalty": 0.1}, "format_penalty must be finite and at most 0, got 0.1"),
        ({"format_penalty": float("nan")}, "format_penalty"),
        ({"high_probability": 1.5}, r"high_probability must be in \[0, 1\], got 1.5"),
        ({"low_reward": float("inf")}, "low_reward must be finite"),
    ],
)
def test_arguments_are_refused_by_name(kwargs, message):
    with pytest.raises(ValueError, match=message):
        make("bandit", **kwargs)


def test_demonstrations_pull_the_better_arm_but_for_the_noise():
    demos = list(demonstrations({"prompt": "compact"}, range(300)))
    assert len(demos) == 300 and all(demo["success"] for demo in demos)
    assert json.loads(json.dumps(demos[0])) == demos[0]
    env = make("bandit", prompt="compact")
    for demo in demos[:50]:
        [user, assistant] = demo["messages"]
        assert user == {"role": "user", "content": env.reset(demo["seed"])[0]}
        assert not env.step(assistant["content"])[4]["invalid_action"]
    noisy = list(demonstrations({"prompt": "compact"}, range(300), noise=0.3))
    assert 60 < sum(not demo["success"] for demo in noisy) < 120
    assert noisy[7] == next(demonstrations({"prompt": "compact"}, [7], noise=0.3))
    assert all(d["success"] for d in demonstrations({}, range(50), noise=0.5, only_success=True))
    planned = next(demonstrations({}, [0], think="plan"))["messages"]
    assert planned[0]["role"] == "system" and " is risky.</think><answer>" in planned[2]["content"]
    assert next(demonstrations({"thinking": False}, [0], think="plan"))["messages"][2]["content"].startswith("<answer>")
    with pytest.raises(ValueError, match="noise must be in"):
        demonstrations({}, [0], noise=-1)
    with pytest.raises(ValueError, match="unknown think 'long'; known: none, plan"):
        demonstrations({}, [0], think="long")

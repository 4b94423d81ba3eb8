"""The Sokoban environment: episodes, rewards, limits, prompts, any text; demonstrations."""

import json
import random

import pytest

from envs.registry import make
from envs.sokoban import rules, solver
from envs.sokoban.demonstrations import demonstrations

LEVELS = "; 0\n########\n#@$. $.#\n########\n\n; 1\n######\n#@ $.#\n######\n"


def reply(actions: str) -> str:
    return f"<think>hm</think><answer>{actions}</answer>"


@pytest.fixture
def golden_env(tmp_path):
    """Both levels of LEVELS, level 0 at even seeds."""
    path = tmp_path / "levels.txt"
    path.write_text(LEVELS)

    def build(**kwargs):
        return make("sokoban-boxoban", path=str(path), num_eval_rooms=1, split="seed", prompt="compact", **kwargs)

    return build


def test_golden_episode_with_rewards(golden_env):
    env = golden_env(max_turns=4, max_actions=10)
    observation, info = env.reset(0)
    assert observation == "PXO_XO\n10"
    assert info == {
        "success": False,
        "num_actions": 0,
        "actions_left": 10,
        "num_turns": 0,
        "invalid_action": False,
        "boxes_on_target": 0,
    }
    # Onto the target: -.1 + 1. Off it again: -.1 - 1.
    observation, reward, terminated, truncated, info = env.step(reply("Right || right"))
    assert (observation, reward, terminated, truncated) == ("__SXXO\n8", -0.2, False, False)
    # One move that does nothing, one unknown name, the penalty once.
    observation, reward, terminated, truncated, info = env.step(reply("Jump || RIGHT || Fly"))
    assert (observation, reward, terminated, truncated) == ("__SXXO\n7", -0.2, False, False)
    assert info["invalid_action"] and info["num_actions"] == 3 and info["num_turns"] == 2
    # No answer at all: the penalty, no action.
    observation, reward, *_, info = env.step("Right")
    assert (reward, info["actions_left"], info["invalid_action"]) == (-0.1, 7, True)
    # The last turn: the limit of turns ends the episode as truncated.
    _, reward, terminated, truncated, info = env.step(reply("Left"))
    assert (reward, terminated, truncated, info["success"]) == (-0.1, False, True, False)


def test_solving_terminates_and_pays(golden_env):
    env = golden_env()
    env.reset(1)
    # What follows the solution is not played.
    observation, reward, terminated, truncated, info = env.step(reply("Right || Right || Left || Left"))
    assert (reward, terminated, truncated) == (10.8, True, False)
    assert info["success"] and info["num_actions"] == 2 and info["boxes_on_target"] == 1
    assert observation.splitlines()[0] == "__P√"


def test_solving_with_the_last_action_of_the_last_turn_is_terminated_alone(golden_env):
    env = golden_env(max_actions=2, max_turns=1)
    env.reset(1)
    _, reward, terminated, truncated, info = env.step(reply("Right||Right"))
    assert (reward, terminated, truncated, info["success"]) == (10.8, True, False, True)


def test_the_limit_of_actions_truncates_and_drops_the_rest(golden_env):
    env = golden_env(max_actions=3, max_turns=9)
    env.reset(1)
    env.step(reply("Up || Up"))
    _, reward, terminated, truncated, info = env.step(reply("Right || Right"))
    assert (reward, terminated, truncated, info["actions_left"]) == (-0.1, False, True, 0)
    assert not info["invalid_action"] and not info["success"]


def test_one_action_a_turn(golden_env):
    env = golden_env(actions_per_turn=1)
    env.reset(1)
    assert env.step(reply("Right || Right"))[4]["num_actions"] == 1
    assert "exactly one action" in make("sokoban", actions_per_turn=1).instructions


def test_a_response_without_thinking(golden_env):
    env = golden_env(thinking=False)
    env.reset(1)
    assert not env.step("<answer>Right</answer>")[4]["invalid_action"]
    env = golden_env()
    env.reset(1)
    assert env.step("<answer>Right</answer>")[4]["invalid_action"]


def test_invalid_turns_cost_the_format_penalty_and_turns_only(golden_env):
    env = golden_env(max_turns=5, max_actions=10, format_penalty=-0.3)
    env.reset(0)
    rewards = [env.step("?")[1] for _ in range(5)]
    assert rewards == [-0.3] * 5
    assert env.actions_left == 10


def test_rewards_stay_bounded_for_any_text():
    env = make("sokoban", prompt="compact")
    rng = random.Random(0)
    pieces = [
        *("<think>", "</think>", "<answer>", "</answer>", "||", " || ", "|", "Up", "down", "LEFT", "Right", "Jump"),
        *("\n", "\0", "\u2028", "\ud800", "<|im_end|>", "🧱", "Ｕｐ", "1e999", "-", "%s", "{0}", "<answer", "/answer>"),
        *("<think></think><answer>Up || Down</answer>", "<answer>Up||Left||Left||Down||Up||Up</answer>"),
    ]
    ended = True
    seed = 0
    some_valid = 0
    for _ in range(20_000):
        if ended:
            env.reset(seed)
            seed += 1
        text = "".join(rng.choices(pieces, k=rng.randrange(12)))
        before = env.actions_left
        observation, reward, terminated, truncated, info = env.step(text)
        played = before - info["actions_left"]
        # At best one box onto its target and the room solved, at worst the box off its target.
        assert -0.1 * played - 1.0 - 0.1 - 1e-9 <= reward <= 11.0 - 0.1 * played + 1e-9
        assert 0 <= played <= 5 and 0 <= info["actions_left"] <= 10
        assert (terminated, info["success"]) in ((True, True), (False, False))
        assert isinstance(observation, str)
        ended = terminated or truncated
        some_valid += not info["invalid_action"]
    assert 500 < some_valid < 19_500  # both kinds of text were met


def test_an_episode_is_a_function_of_seed_and_actions():
    env, other = make("sokoban"), make("sokoban")
    other.reset(99)
    other.step("not the same history")
    texts = [reply("Up || Left"), "?", reply("Down || Down || Right")]
    for seed in range(20):
        assert env.reset(seed) == other.reset(seed)
        for text in texts:
            step = env.step(text)
            assert step == other.step(text)
            if step[2] or step[3]:
                break


def test_full_prompt_says_what_there_is_to_know():
    env = make("sokoban", max_actions=7, max_turns=3, actions_per_turn=4)
    for word in (
        *"#_OX√PS",
        "Up, Down, Left, Right",
        "||",
        "7 actions",
        "3 turns",
        "up to 4",
        "<think>",
        "-0.1",
        "+10",
    ):
        assert word in env.instructions
    first, _ = env.reset(0)
    grid = "\n".join(env.room.rows())
    assert first.startswith(f"Turn 1 of 3\nState:\n{grid}\nYou have 7 actions left.")
    second = env.step(reply("Up"))[0]
    assert second.startswith("Reward of your last turn: -0.1\nTurn 2 of 3\nState:\n")
    assert "You have 6 actions left." in second
    assert "not valid" in env.step("what?")[0]
    assert "<think>" not in make("sokoban", thinking=False).instructions


def test_compact_prompt_is_the_grid_inside_its_border_and_the_actions_left():
    env = make("sokoban", prompt="compact")

    def inside():
        rows = env.room.rows()
        assert {*rows[0], *rows[-1], *(row[0] for row in rows), *(row[-1] for row in rows)} == {"#"}
        return [row[1:-1] for row in rows[1:-1]]

    assert env.instructions == ""
    observation, _ = env.reset(0)
    assert observation.splitlines() == [*inside(), "10"]
    assert env.step(reply("Up || Down"))[0].splitlines() == [*inside(), "8"]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"split": "test"}, "unknown split 'test'; known: train, eval, seed"),
        ({"num_eval_rooms": 0}, "num_eval_rooms"),
        ({"max_actions": 0}, "max_actions must be a whole number of at least 1, got 0"),
        ({"max_turns": 2.5}, "max_turns"),
        ({"actions_per_turn": True}, "actions_per_turn"),
        ({"format_penalty": 0.1}, "format_penalty"),
        ({"format_penalty": float("nan")}, "format_penalty"),
        ({"prompt": "long"}, "unknown prompt 'long'; known: full, compact"),
        ({"height": 3, "width": 3}, "height=3, width=3"),
    ],
)
def test_arguments_are_refused_by_name(kwargs, message):
    with pytest.raises(ValueError, match=message):
        make("sokoban", **kwargs)


def test_demonstrations_are_replayable_and_well_formed():
    demos = list(demonstrations({"prompt": "compact"}, range(60)))
    assert len(demos) == 60
    lengths = set()
    env = make("sokoban", prompt="compact")
    for demo in demos:
        assert json.loads(json.dumps(demo)) == demo
        observation, _ = env.reset(demo["seed"])
        shortest = len(solver.solve(env.room))
        assert [message["role"] for message in demo["messages"]] == ["user", "assistant"] * (len(demo["messages"]) // 2)
        for user, assistant in zip(demo["messages"][::2], demo["messages"][1::2], strict=True):
            assert user["content"] == observation
            observation, _, terminated, truncated, info = env.step(assistant["content"])
            assert not info["invalid_action"]
            lengths.add(assistant["content"].count("||") + 1)
        assert terminated or truncated
        assert demo["success"] == info["success"] == (shortest <= 10)
        if demo["success"]:
            assert info["num_actions"] == shortest
    assert lengths == {1, 2, 3, 4, 5}


def test_demonstrations_depend_on_their_seed_alone_and_meet_no_evaluation_room():
    kwargs = {"prompt": "compact", "num_eval_rooms": 64}
    some = list(demonstrations(kwargs, [5, 3], noise=0.3))
    assert some == list(demonstrations(kwargs, range(10), noise=0.3))[5:2:-2]
    evaluation = make("sokoban", split="eval", **kwargs)
    evaluation.reset(0)
    held_out = set()
    for seed in range(64):
        evaluation.reset(seed)
        held_out.add(rules.canonical(evaluation.room))
    for demo in demonstrations(kwargs, range(400)):
        inside = demo["messages"][0]["content"].splitlines()[:-1]
        grid = ["######", *(f"#{row}#" for row in inside), "######"]
        assert rules.canonical(rules.parse_rows(grid)) not in held_out


def test_demonstration_options():
    full = next(demonstrations({}, [0]))
    assert full["messages"][0]["role"] == "system" and "Sokoban" in full["messages"][0]["content"]
    assert full["messages"][2]["content"].startswith("<think></think><answer>")
    one = list(demonstrations({"thinking": False}, range(20), actions_per_turn=1))
    assert all(m["content"].count("||") == 0 for d in one for m in d["messages"] if m["role"] == "assistant")
    assert all(m["content"].startswith("<answer>") for d in one for m in d["messages"] if m["role"] == "assistant")
    # Five turns of one action each solve only what takes five moves.
    assert 0 < sum(demo["success"] for demo in one) < 20
    assert all(demo["success"] for demo in demonstrations({}, range(20), actions_per_turn=1, only_success=True))
    plan = next(demonstrations({"prompt": "compact"}, [0], think="plan"))["messages"][1]["content"]
    assert plan.startswith("<think>player at row ") and ", target at row " in plan
    moves = plan[plan.index(". ") + 2 : plan.index("</think>")].split()
    answered = plan[plan.index("<answer>") + 8 : plan.index("</answer>")].split(" || ")
    assert moves[: len(answered)] == answered


def test_noise_deviates_and_replans():
    quiet = list(demonstrations({"prompt": "compact"}, range(200)))
    noisy = list(demonstrations({"prompt": "compact"}, range(200), noise=0.3))
    success = [sum(demo["success"] for demo in demos) / 200 for demos in (quiet, noisy)]
    assert success[0] > 0.97 and 0.6 < success[1] < 0.95
    assert sum(a != b for a, b in zip(quiet, noisy, strict=True)) > 100
    with pytest.raises(ValueError, match="noise must be in"):
        demonstrations({}, [0], noise=1.5)
    with pytest.raises(ValueError, match="unknown think 'long'"):
        demonstrations({}, [0], think="long")
    with pytest.raises(ValueError, match="actions_per_turn"):
        demonstrations({}, [0], actions_per_turn=0)

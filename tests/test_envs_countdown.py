"""Countdown: what counts as an expression, its value, problems and splits, any text, demonstrations."""

import ast
import json
import operator
import random
import time
from fractions import Fraction

import pytest

from envs.countdown import expression
from envs.countdown.demonstrations import demonstrations
from envs.countdown.problems import NoProblemError, ProblemSettings, evaluation_problems, generate, problem_of
from envs.registry import make

SMALL = {"min_numbers": 3, "max_numbers": 3, "max_number": 9, "max_target": 30}


def reply(answer, thought="hm"):
    return f"<think>{thought}</think><answer>{answer}</answer>"


def value(text):
    """The value by Python's own parser, in fractions."""
    operators = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}

    def of(node):
        if isinstance(node, ast.BinOp):
            return operators[type(node.op)](of(node.left), of(node.right))
        return Fraction(node.value)

    return of(ast.parse(text, mode="eval").body)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1), (" 7 \n", 7), ("2+3*4", 14), ("(2+3)*4", 20), ("8-3-2", 3), ("8/4/2", 1), ("8/(4/2)", 4),
        ("((((5))))", 5), ("7/2", Fraction(7, 2)), ("1/3*3", 1), ("2 * ( 3 + 4 ) - 5 / 5", 13), ("1/(2-2)", None),
        ("0/0", None), ("3-10", -7),
    ],
)  # fmt: skip
def test_values_by_hand(text, expected):
    postfix = expression.parse(text)
    assert postfix is not None and expression.value_of(postfix) == expected


@pytest.mark.parametrize(
    "text",
    ["", " ", "+", "1+", "+1", "-1", "1--1", "(1", "1)", "()", "(1)(2)", "1 2", "2(3)", "1+*2", "1**2", "1//2", "1%2",
     "1.5", "1e3", "1=1", "x", "1+x", "a()", "__import__('os')", "1,2", "１+１", "²", "1\u00a0+2", "1+2;", "1_0", "0x1",
     "1+2\n=3", "[1]", "1 + 2 # 3", "\ud800", "(1+2", "1+2)", ")1("],
)  # fmt: skip
def test_what_is_no_expression(text):
    assert expression.parse(text) is None


def test_random_expressions_have_pythons_values():
    rng = random.Random(0)

    def tree(depth):
        if depth == 0 or rng.random() < 0.3:
            return str(rng.randrange(20))
        text = f"{tree(depth - 1)}{rng.choice('+-*/')}{tree(depth - 1)}"
        return f"({text})" if rng.random() < 0.5 else text

    nothing = 0
    for _ in range(2000):
        text = tree(4)
        postfix = expression.parse(text)
        try:
            expected = value(text)
        except ZeroDivisionError:
            expected = None
            nothing += 1
        assert expression.value_of(postfix) == expected
        assert "".join(expression.numbers_of(postfix)) == "".join(c if c.isdigit() else "" for c in text)
    assert 20 < nothing < 1000


def test_no_text_is_too_long_or_too_deep():
    env = make("countdown")
    started = time.perf_counter()
    for text in (
        "(" * 200_000 + "1" + ")" * 200_000,
        "9" * 500_000,
        "1+" * 300_000 + "1",
        "(" * 500_000,
        "9*" * 200_000,
    ):
        env.reset(0)
        _, reward, terminated, _, info = env.step(reply(text))
        assert reward in (-0.1, 0.1) and terminated and not info["success"]
    assert time.perf_counter() - started < 10  # linear: well under a second on a quiet machine


def test_golden_answers():
    env = make("countdown", prompt="compact", **SMALL)
    observation, info = env.reset(11)
    problem = env.problem
    assert observation == f"{' '.join(map(str, problem.numbers))}\n{problem.target}"
    assert info == {"success": False, "numbers_right": False, "invalid_action": False}

    def play(answer):
        env.reset(11)
        _, reward, terminated, truncated, info = env.step(reply(answer))
        assert (terminated, truncated) == (True, False)
        return reward, info["success"], info["numbers_right"], info["invalid_action"]

    a, b, c = problem.numbers
    assert play(problem.solution) == (1.0, True, True, False)
    assert play(f" ( {problem.solution} ) ") == (1.0, True, True, False)
    wrong = next(t for t in (f"{a}+{b}+{c}", f"{a}*{b}*{c}") if value(t) != problem.target)
    assert play(wrong) == (0.1, False, True, False)
    # The target's value from other numbers, a number left out, one twice, another spelling of a number.
    assert play(str(problem.target)) == (0.1, False, False, False)
    assert play(f"{a}+{b}") == (0.1, False, False, False)
    assert play(f"{problem.solution}+{a}-{a}") == (0.1, False, False, False)
    assert play(problem.solution.replace(str(a), f"0{a}", 1))[:3] == (0.1, False, False)
    assert play(f"{problem.solution}={problem.target}") == (-0.1, False, False, True)
    assert play("") == (-0.1, False, False, True)
    env.reset(11)
    assert env.step(problem.solution)[1] == -0.1  # not in the response format
    zero = make("countdown", prompt="full")
    zero._problem = type(problem)((2, 3, 3), 2, "2+3-3", ())
    assert zero.step(reply("2/(3-3)"))[:2] == ("That is nothing.", 0.1)


def test_every_problem_is_solvable_and_says_how():
    for kwargs in (SMALL, {"min_numbers": 2, "max_numbers": 5, "max_number": 99, "max_target": 200}):
        settings = ProblemSettings(**kwargs)
        for seed in range(500):
            problem = generate(settings, "seed", seed)
            assert kwargs["min_numbers"] <= len(problem.numbers) <= kwargs["max_numbers"]
            assert all(1 <= number <= kwargs["max_number"] for number in problem.numbers)
            assert 1 <= problem.target <= kwargs["max_target"]
            assert value(problem.solution) == problem.target == int(problem.steps[-1].split("=")[1])
            numbers = expression.numbers_of(expression.parse(problem.solution))
            assert sorted(map(int, numbers)) == sorted(problem.numbers)
            assert len(problem.steps) == len(problem.numbers) - 1
            assert all(value(step.split("=")[0]) == int(step.split("=")[1]) for step in problem.steps)
    counts = [sum(sign in generate(settings, "seed", seed).solution for seed in range(300)) for sign in "+-*/"]
    assert min(counts) > 15


def test_evaluation_problems_are_distinct_and_never_trained_on_or_demonstrated():
    settings = ProblemSettings(**SMALL)
    held_out = [problem.content for problem in evaluation_problems(settings, 128)]
    assert len(set(held_out)) == 128
    assert held_out[:32] == [problem.content for problem in evaluation_problems(settings, 32)]
    env = make("countdown", split="eval", num_eval_problems=128, **SMALL)
    env.reset(5)
    assert env.problem.content == held_out[5]
    env.reset(133)
    assert env.problem.content == held_out[5]
    plain = [generate(settings, "train", seed).content for seed in range(1500)]
    assert any(content in set(held_out) for content in plain)  # or the test shows nothing
    for seed in range(1500):
        problem = problem_of(settings, "train", seed, 128)
        assert problem.content not in set(held_out)
        # Seeds that did not meet an evaluation problem are left as they are.
        assert (problem.content == plain[seed]) == (plain[seed] not in set(held_out))
    for demo in demonstrations({"num_eval_problems": 128, "prompt": "compact", **SMALL}, range(300)):
        numbers, target = demo["messages"][0]["content"].split("\n")
        assert (tuple(sorted(map(int, numbers.split()))), int(target)) not in set(held_out)
    tiny = ProblemSettings(2, 2, 1, 1)
    with pytest.raises(NoProblemError, match="hold out fewer"):
        problem_of(tiny, "train", 0, 1)


def test_an_episode_is_a_function_of_the_seed():
    env, other = make("countdown"), make("countdown")
    other.reset(99)
    for seed in range(50):
        assert env.reset(seed) == other.reset(seed)
        assert env.step(reply("1+1")) == other.step(reply("1+1"))
    assert env.reset(0) != env.reset(1)


def test_rewards_stay_in_bounds_for_any_text():
    rng = random.Random(0)
    env = make("countdown", prompt="compact", format_reward=0.2, format_penalty=-0.3, **SMALL)
    pieces = [
        *("<think>", "</think>", "<answer>", "</answer>", "+", "-", "*", "/", "(", ")", "1e999", "**", "9" * 50, " "),
        *("\n", "\0", "\u2028", "\ud800", "<|im_end|>", "%s", "{0}", "lambda:0", "<think></think><answer>", "０"),
    ]
    met = dict.fromkeys((-0.3, 0.2, 1.0), 0)
    for seed in range(8000):
        env.reset(seed)
        numbers = list(map(str, env.problem.numbers))
        if rng.random() < 0.5:  # something that is close to an answer
            body = rng.choice("+-*/").join(rng.sample(numbers, k=rng.choice((3, 3, 3, 2))))
            text = reply(rng.choice((body, body, env.problem.solution, body + ")")))
        else:
            text = "".join(rng.choices([*pieces, *numbers], k=rng.randrange(12)))
        observation, reward, terminated, truncated, info = env.step(text)
        met[reward] += 1
        assert (reward == 1.0) == info["success"] and (reward == -0.3) == info["invalid_action"]
        assert terminated and not truncated and isinstance(observation, str) and json.dumps(info)
    assert min(met.values()) > 300


def test_full_prompt_says_what_there_is_to_know():
    env = make("countdown")
    for word in (
        "exactly once",
        "+, -, *, /",
        "1 for a right expression, 0.1 for",
        "-0.1",
        "<think>...</think><answer>",
    ):
        assert word in env.instructions
    observation, _ = env.reset(0)
    numbers = " ".join(map(str, env.problem.numbers))
    assert observation.startswith(f"Numbers: {numbers}\nTarget: {env.problem.target}\n")
    assert env.step(reply(env.problem.solution))[0] == f"That is {env.problem.target}."
    assert "<think>" not in make("countdown", thinking=False).instructions
    assert env.problem.solution not in observation


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"split": "test"}, "unknown split 'test'"),
        ({"prompt": "long"}, "unknown prompt 'long'"),
        ({"format_penalty": 1}, "format_penalty"),
        ({"format_reward": 1.0}, r"format_reward must be in \[0, 1\), got 1.0"),
        ({"num_eval_problems": 0}, "num_eval_problems must be a whole number of at least 1, got 0"),
        ({"min_numbers": 1}, "min_numbers must be a whole number from 2 to 8, got 1"),
        ({"min_numbers": 4, "max_numbers": 3}, "max_numbers must be a whole number from 4 to 8, got 3"),
        ({"max_number": 2.5}, "max_number"),
        ({"max_target": True}, "max_target"),
    ],
)
def test_arguments_are_refused_by_name(kwargs, message):
    with pytest.raises(ValueError, match=message):
        make("countdown", **kwargs)


def test_demonstrations_solve_their_problem_but_for_the_noise():
    demos = list(demonstrations({"prompt": "compact"}, range(100)))
    assert len(demos) == 100 and all(demo["success"] for demo in demos)
    assert json.loads(json.dumps(demos[0])) == demos[0]
    noisy = list(demonstrations({"prompt": "compact"}, range(300), noise=0.4))
    assert 70 < sum(not demo["success"] for demo in noisy) < 150
    assert noisy[7] == next(demonstrations({"prompt": "compact"}, [7], noise=0.4))
    env = make("countdown", prompt="compact")
    for demo in noisy[:50]:
        env.reset(demo["seed"])
        info = env.step(demo["messages"][1]["content"])[4]
        assert info["numbers_right"] and info["success"] == demo["success"]
    assert all(d["success"] for d in demonstrations({}, range(50), noise=0.5, only_success=True))
    planned = next(demonstrations({}, [0], think="plan"))["messages"]
    thought = planned[2]["content"].split("</think>")[0].removeprefix("<think>")
    assert thought.endswith(f"={planned[1]['content'].split('Target: ')[1].split()[0]}")
    assert next(demonstrations({"thinking": False}, [0], think="plan"))["messages"][2]["content"].startswith("<answer>")
    with pytest.raises(ValueError, match="noise must be in"):
        demonstrations({}, [0], noise=2)
    with pytest.raises(ValueError, match="unknown think 'long'"):
        demonstrations({}, [0], think="long")

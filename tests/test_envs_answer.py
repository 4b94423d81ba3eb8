"""The response format: which text counts as the answer, and which actions it names."""

import pytest

from envs.answer import find_answer
from envs.sokoban.env import parse_actions

# text, the answer with a thinking block required, the answer without
CASES = [
    ("<think>a</think><answer>Up</answer>", "Up", "Up"),
    ("<think></think><answer>Up</answer>", "Up", "Up"),
    ("<think>a\nb</think>\n\n<answer>\n Up \n</answer>\n", "\n Up \n", "\n Up \n"),
    ("well <think>a</think> so <answer>Up</answer> done<|im_end|>", "Up", "Up"),
    # The last complete answer after the thinking block counts.
    ("<think>a</think><answer>Up</answer><answer>Down</answer>", "Down", "Down"),
    ("<think>a</think><answer>Up</answer><answer>Down", "Up", "Up"),
    ("<think>a</think><answer>Up</answer></answer>", "Up", "Up"),
    ("<think><answer>Left</answer></think><answer>Up</answer>", "Up", "Up"),
    ("<think><answer>Left</answer></think>", None, None),
    ("<answer>Left</answer><think>a</think>", None, None),
    # Nested tags: the innermost pair.
    ("<think>a</think><answer>Up<answer>Down</answer></answer>", "Down", "Down"),
    ("<think><think>a</think></think><answer>Up</answer>", "Up", "Up"),
    ("<think>a</think><answer><think>b</think>Up</answer>", "<think>b</think>Up", "<think>b</think>Up"),
    # No thinking block, or one that does not end.
    ("<answer>Up</answer>", None, "Up"),
    ("a</think><answer>Up</answer>", None, "Up"),
    ("<think>a<answer>Up</answer>", None, None),
    ("</think><think><answer>Up</answer>", None, None),
    # Empty and broken.
    ("", None, None),
    ("<think>a</think><answer></answer>", "", ""),
    ("<think>a</think></answer>Up<answer>", None, None),
    ("<think>a</think><answer>Up< /answer>", None, None),
    ("<THINK>a</THINK><ANSWER>Up</ANSWER>", None, None),
    ("<think>a</think><answer>Up", None, None),
]


@pytest.mark.parametrize(("text", "with_thinking", "without"), CASES)
def test_find_answer(text, with_thinking, without):
    assert find_answer(text, thinking=True) == with_thinking
    assert find_answer(text, thinking=False) == without


# inside of the answer, the actions played, invalid
ANSWERS = [
    ("Up", ["Up"], False),
    ("up", ["Up"], False),
    ("  rIGHT  ", ["Right"], False),
    ("Up || Down", ["Up", "Down"], False),
    ("Up||Down||LEFT", ["Up", "Down", "Left"], False),
    ("Up ||\n Down\t||", ["Up", "Down"], False),
    ("|| ||Up", ["Up"], False),
    # Unknown names are passed over, the others played, the penalty charged.
    ("Up || Jump || Left", ["Up", "Left"], True),
    ("Up | Down", [], True),
    ("Up, Down", [], True),
    ("Up Down", [], True),
    ("Up ||| Down", ["Up"], True),
    ("Up.", [], True),
    ("", [], True),
    ("   ", [], True),
    ("||", [], True),
    # Letters that only look like ours are other letters.
    ("Ｕｐ", [], True),
    ("Up｜｜Down", [], True),
    ("U\u0440", [], True),
    ("Up\u200b", [], True),
    # Names beyond the limit of a turn are not looked at.
    ("Up || Up || Up || Up || Up || Down", ["Up"] * 5, False),
    ("Up || Up || Up || Up || Up || Jump", ["Up"] * 5, False),
    ("Jump || Up || Up || Up || Up || Up", ["Up"] * 4, True),
]


@pytest.mark.parametrize(("inside", "actions", "invalid"), ANSWERS)
def test_parse_actions(inside, actions, invalid):
    text = f"<think>a</think><answer>{inside}</answer>"
    assert parse_actions(text, actions_per_turn=5, thinking=True) == (actions, invalid)


def test_one_action_a_turn():
    text = "<answer>Left || Right</answer>"
    assert parse_actions(text, actions_per_turn=1, thinking=False) == (["Left"], False)


def test_parsing_is_linear_in_the_text():
    # With a search that starts over at every tag, each of these would take minutes.
    n = 200_000
    for text in ("<answer>" * n, "</answer>" * n, "<think>" * n + "</answer>" * n, "<think></think>" + "<answer>" * n):
        assert find_answer(text, thinking=True) is None
    assert find_answer("<think></think>" + "<answer>" * n + "</answer>" * n, thinking=True) == ""

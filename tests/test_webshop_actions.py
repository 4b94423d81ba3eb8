"""Actions of the shop: the original's grammar, and how answers of a policy are read."""

import random
import re
import time

import pytest

from envs.webshop.actions import Action, parse, read_answer

CLICKABLES = ("back to search", "< prev", "b00000shrt", "light blue", "a [b]", "3] wide", "search", "x")


def original_grammar(text: str):
    """Name and lower-case argument as the original finds them, where the name is one of its two."""
    match = re.match(r"(.+)\[(.+)\]", text)
    if match is None or match[1] not in ("search", "click"):
        return None
    return Action(match[1], match[2].lower())


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("search[Red Shoes]", Action("search", "red shoes")),
        ("click[Buy Now]", Action("click", "buy now")),
        ("click[x] and more", Action("click", "x")),
        ("click[x]y]", Action("click", "x]y")),
        ("search[ ]", Action("search", " ")),
        ("click[x]\nclick[y]", Action("click", "x")),
        ("search[]", None),
        ("Search[x]", None),
        (" click[x]", None),
        ("click [x]", None),
        ("click[a[b]]", None),
        ("click[a] click[b]", None),
        ("garbage", None),
        ("[x]", None),
        ("", None),
        ("click[x\n]", None),
        ("click［x］", None),
    ],
)
def test_grammar_of_the_original(text, action):
    assert parse(text) == action == original_grammar(text)


def test_grammar_equals_the_expression_on_random_texts():
    rng = random.Random(0)
    pieces = ["search", "click", "[", "]", "[", "]", "a", " ", "\n", "B[", "］"]
    found = 0
    for _ in range(20_000):
        text = rng.choice(["", "search[", "click["]) + "".join(rng.choices(pieces, k=rng.randint(0, 8)))
        assert parse(text) == original_grammar(text), text
        found += parse(text) is not None
    assert found > 500


def test_time_is_linear_where_the_expression_is_not():
    started = time.perf_counter()
    for text in ("[" * 1_000_000, "a[" * 500_000, "search[" + "]" * 1_000_000):
        parse(text)
        read_answer(text, CLICKABLES)
    assert time.perf_counter() - started < 2.0  # the expression needs hours for the second


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ("search[red shoes]", Action("search", "red shoes")),
        ("\n  search[red shoes] \n", Action("search", "red shoes")),
        ("Search[Red Shoes]", Action("search", "red shoes")),
        ("CLICK[Light Blue]", Action("click", "light blue")),
        ("click[B00000SHRT]", Action("click", "b00000shrt")),
        ("search[a [b] c]", Action("search", "a [b] c")),
        ("search[ a ]", Action("search", " a ")),
        ("search[ｘ（ｙ）]", Action("search", "ｘ（ｙ）")),
        ("search[<r>]", Action("search", "<r>")),
        ("click[a [b]]", Action("click", "a [b]")),
        ("click[3] wide]", Action("click", "3] wide")),
        (None, None),
        ("", None),
        ("red shoes", None),
        ("search", None),
        ("search red shoes", None),
        ("search(red shoes)", None),
        ("search [x]", None),
        ("search:[x]", None),
        ("search[x].", None),
        ("I will search[x]", None),
        ("`search[x]`", None),
        ("buy[x]", None),
        ("search[]", None),
        ("search[ \t]", None),
        ("click[]", None),
        ("search[x] search[y]", None),
        ("search[x] click[x]", None),
        ("click[x] click[x]", None),
        ("search[x]\nclick[x]", None),
        ("search[x\ny]", None),
        ("search[x\ry]", None),
        ("search[a]b]", None),
        ("search[a[b]", None),
        ("search[a", None),
        ("search]a[", None),
        ("click[buy now]", None),
        ("click[light  blue]", None),
        ("click[ x ]", None),
        ("search［x］", None),
        ("ｓｅａｒｃｈ[x]", None),
        ("clic\N{KELVIN SIGN}[x]", None),
        ("search[x]\0", None),
    ],
)
def test_answers(answer, action):
    assert read_answer(answer, CLICKABLES) == action


def test_an_action_is_written_as_it_is_read():
    for action in (Action("search", "a b"), Action("click", "x")):
        assert parse(str(action)) == read_answer(str(action), CLICKABLES) == action

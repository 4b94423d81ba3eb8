"""Scripted shoppers and the conversations that they make."""

import dataclasses
import json

import pytest

from envs.registry import make
from envs.webshop import shoppers
from envs.webshop.demonstrations import demonstrations
from envs.webshop.goals import GoalTable
from envs.webshop.product import HumanInstruction, Product
from tests.webshop_cases import LAMP, PLAIN, SHIRT, TEE, Shelf, many

SHELF = Shelf(SHIRT, LAMP, PLAIN)
KWARGS = {"catalogue": SHELF, "split": "all"}


def demonstrate(seeds, kwargs=None, **options):
    return list(demonstrations(KWARGS | (kwargs or {}), seeds, **options))


def test_the_shopper_buys_what_is_asked_for():
    env = make("webshop", **KWARGS)
    played = shoppers.play(env, shoppers.knowing("query"), range(env.num_goals))
    # Search, product, options, purchase; "2005black" and what it costs is the original's rule.
    assert [row["num_turns"] for row in played].count(5) == 6 and [row["num_turns"] for row in played].count(3) == 1
    fair = shoppers.play(make("webshop", fair_options=True, **KWARGS), shoppers.knowing("query"), range(env.num_goals))
    assert all(row["success"] and row["score"] == 1.0 for row in fair)
    assert 0 < sum(row["success"] for row in played) < len(played)


def test_the_shopper_turns_pages():
    env = make("webshop", catalogue=many(40), split="all", products_per_page=3)
    played = shoppers.play(env, shoppers.knowing("request"), range(env.num_goals))
    # Search, product, option, purchase; product 39 is on page 14, 13 turns further, which is too far.
    turns = [row["num_turns"] for row in played]
    assert min(turns) == 4 and max(turns) == 15
    assert all(row["success"] == (row["score"] == 1.0) for row in played)
    # 12 pages are within reach: 36 products of one, two or three sizes.
    assert sum(row["success"] for row in played) == 72


def test_the_shopper_searches_again_and_then_takes_what_there_is():
    def asking(query, instruction):
        changed = {"query": query, "instruction": instruction, "asin": "B00000GOAL"}
        return dataclasses.replace(SHIRT, **changed)

    found = make("webshop", catalogue=Shelf(LAMP, asking("nowhere", "Find me an acme shirt")), split="all")
    found.reset(seed := next(seed for seed in range(7) if found.reset(seed)[1]["goal"]["asin"] == "B00000GOAL"))
    first = shoppers.knowing("query")(found.session, found.goal)
    assert str(first) == "search[nowhere]"
    assert shoppers.play(found, shoppers.knowing("query"), [seed])[0]["num_turns"] == 6  # one search more
    cheap = Product(asin="B0000CHEAP", title="Red rag", prices=(1.0,), title_nouns=("shirt",))
    astray = make("webshop", catalogue=Shelf(cheap, asking("nowhere", "Find me a red rag")), split="all")
    row = shoppers.play(astray, shoppers.knowing("query"), [0])[0]
    # Two searches, the product, bought: of five parts only the price is met.
    assert (row["num_turns"], row["score"]) == (4, pytest.approx(0.2))


def test_the_first_item_is_bought_unseen():
    env = make("webshop", **KWARGS)
    played = shoppers.play(env, shoppers.first_item, range(env.num_goals))
    # It is the right one here, but its options are not chosen: only the lamp has none.
    assert {row["num_turns"] for row in played} == {3} and sum(row["success"] for row in played) == 1


def test_choices_for_people_who_do_not_know_the_names():
    table = GoalTable(Shelf(SHIRT), "human")
    assert shoppers.choices(SHIRT, table.goal(0, 0)) == ["light blue", "large"]
    other = Product(asin="A", title="", options={"size": ("small", "x-large"), "colour": ("red", "dark blue")})
    assert shoppers.choices(other, table.goal(0, 0)) == ["dark blue", "x-large"]
    # A value that stands under two names is clicked once; one that would undo another is not clicked.
    wanted = {("small", "small"): ["small"], ("small", "buy now"): ["small", "buy now"]}
    wanted |= {("slim", "small"): ["slim"], ("slim", "buy now"): ["slim", "buy now"]}
    both = GoalTable(Shelf(TEE))
    for number in range(4):
        goal = both.goal(0, number)
        assert shoppers.choices(TEE, goal) == wanted[goal.options["fit"], goal.options["size"]]
    env = make("webshop", catalogue=Shelf(dataclasses.replace(TEE, query="tee")), split="all")
    # Search, product, one option ("buy now" is a button), purchase.
    assert {row["num_turns"] for row in shoppers.play(env, shoppers.knowing("query"), range(4))} == {4}


def test_searches_fit_the_brackets_of_an_action():
    human = HumanInstruction("Find [me] a\nthing ]", ("x",), ())
    table = GoalTable(Shelf(Product(asin="A", title="t", query="desk [x", human_instructions=(human,))), "human")
    goal = table.goal(0, 0)
    assert shoppers.search_text(goal, "query") == "desk x"
    assert shoppers.search_text(goal, "request") == "a thing"
    assert shoppers.search_text(goal, "instruction").startswith("find me a thing , and price lower than")
    synthetic = GoalTable(Shelf(SHIRT)).goal(0, 0)
    assert shoppers.search_text(synthetic, "request") == "long sleeve men's shirts with classic fit"


@pytest.mark.parametrize("kwargs", [{}, {"prompt": "compact"}, {"prompt": "compact", "thinking": False}])
def test_demonstrations_are_what_the_policy_will_see(kwargs):
    env = make("webshop", **KWARGS, **kwargs)
    rows = demonstrate(range(7), kwargs, query="query")
    assert len(rows) == 7
    for row in rows:
        assert json.loads(json.dumps(row)) == row
        messages = row["messages"]
        if env.instructions:
            assert messages.pop(0) == {"role": "system", "content": env.instructions}
        observation, info = env.reset(row["seed"])
        for prompt, response in zip(messages[::2], messages[1::2], strict=True):
            assert prompt == {"role": "user", "content": observation} and response["role"] == "assistant"
            observation, _, terminated, _, info = env.step(response["content"])
            assert not info["invalid_action"]
        assert terminated and info["score"] == row["score"] and info["success"] == row["success"]


def test_options_of_demonstrations():
    plain = demonstrate(range(20), query="query")
    assert plain == demonstrate(range(20), query="query")
    assert plain[5:7] == demonstrate(range(5, 7), query="query")
    noisy = demonstrate(range(20), query="query", noise=0.4)
    assert noisy != plain and noisy == demonstrate(range(20), query="query", noise=0.4)
    assert noisy != demonstrate(range(20), query="query", noise=0.4, run_seed=1)
    assert sum(len(row["messages"]) for row in noisy) > sum(len(row["messages"]) for row in plain)
    successes = demonstrate(range(20), query="query", only_success=True)
    assert successes == [row for row in plain if row["success"]] and 0 < len(successes) < 20
    thoughts = [
        message["content"] for row in demonstrate(range(7), query="query", think="plan") for message in row["messages"]
    ]
    assert any(text.startswith("<think>The size is large.</think><answer>click[large]") for text in thoughts)
    assert any(text.startswith("<think>Acme Cotton Shirt fits the instruction.</think>") for text in thoughts)


def test_held_out_products_are_not_demonstrated():
    kwargs = {"catalogue": many(100), "split": "train", "products_per_page": 100}
    held_out = make("webshop", **kwargs | {"split": "eval"})
    asked = {held_out.reset(seed)[1]["goal"]["asin"].lower() for seed in range(held_out.num_goals)}
    env = make("webshop", **kwargs)
    for row in demonstrations(kwargs, range(300)):
        assert env.reset(row["seed"])[1]["goal"]["asin"].lower() not in asked


def test_errors_name_the_option():
    for options, message in (
        ({"noise": 2}, "noise must be in \\[0, 1\\], got 2"),
        ({"think": "long"}, "unknown think 'long'; known: none, plan"),
        ({"query": "title"}, "unknown query 'title'; known: instruction, request, query"),
    ):
        with pytest.raises(ValueError, match=message):
            demonstrate([0], **options)

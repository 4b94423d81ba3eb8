"""The reward of a purchase: numbers a person can check, and the similarity against thefuzz."""

import dataclasses
import json
import pathlib

import pytest

from envs.webshop.goals import NO_LIMIT, Goal, GoalTable
from envs.webshop.reward import kind_reward, matched_attributes, matched_options, purchase_reward
from envs.webshop.similarity import COLOURS, matches, normalised_colour, token_set_ratio
from tests.webshop_cases import LAMP, PLAIN, SHIRT, TEE, Shelf

RATIOS = pathlib.Path(__file__).parent / "golden" / "token_set_ratio.json"


def goal(target=SHIRT, attributes=("long sleeve", "classic fit"), options=None, limit=30.0):
    options = {"color": "light blue", "size": "large"} if options is None else options
    return Goal(0, target, "", attributes, options, limit, 1.0)


def test_ratio_equals_thefuzz():
    rows = json.loads(RATIOS.read_text(encoding="utf-8"))
    assert len(rows) == 600 and len({ratio for *_, ratio in rows}) > 50
    for left, right, ratio in rows:
        assert token_set_ratio(left, right) == ratio, (left, right)


def test_a_match_is_above_85_after_rounding():
    for left, right, ratio in json.loads(RATIOS.read_text(encoding="utf-8")):
        assert matches(left, right) == (ratio >= 86)
    assert token_set_ratio("", "") == 0  # no words, no likeness
    assert token_set_ratio("a", ("color", "a")) == 100  # a tuple counts as its text


@pytest.mark.parametrize(
    ("value", "colour"),
    [
        ("light grey", "grey"), ("standard", "tan"), ("2005black", "black"), ("navy-multi", "navy"), ("xl", "xl"),
        ("blue black", "black"), ("", ""), (("color", "black"), "black"), (("color", "a-black"), ("color", "a-black")),
        ("stonewash", "ash"), ("infrared", "red"),
    ],
)  # fmt: skip
def test_colours_as_the_original_finds_them(value, colour):
    assert normalised_colour(value) == colour


def test_colours_stand_in_alphabetical_order():
    assert list(COLOURS) == sorted(COLOURS) and len(set(COLOURS)) == len(COLOURS)


def test_the_target_with_its_options_is_worth_one():
    reward, parts = purchase_reward(SHIRT, {"size": "large", "color": "light blue"}, 11.07, goal())
    assert reward == 1.0
    assert parts == {
        "r_type": 1.0, "query_match": True, "category_match": True, "title_score": 1.0, "r_att": 1.0, "w_att": 0.4,
        "r_option": 1.0, "w_option": 0.4, "r_price": True, "w_price": 0.2,
    }  # fmt: skip


def test_each_part_costs_its_share():
    chosen = {"size": "large", "color": "light blue"}
    assert purchase_reward(SHIRT, {"size": "large"}, 11.07, goal())[0] == pytest.approx(4 / 5)
    assert purchase_reward(SHIRT, {}, 11.07, goal())[0] == pytest.approx(3 / 5)
    assert purchase_reward(SHIRT, chosen, 30.01, goal())[0] == pytest.approx(4 / 5)
    assert purchase_reward(SHIRT, chosen, 30.0, goal())[0] == 1.0  # the limit itself is allowed
    assert purchase_reward(SHIRT, chosen, 11.07, goal(attributes=("long sleeve", "waterproof")))[0] == pytest.approx(
        0.8
    )
    # Another kind of product: no noun in common, so nothing, although query and path agree.
    reward, parts = purchase_reward(TEE, {"size": "large"}, 5.0, goal())
    assert reward == 0.0 and parts["query_match"] and parts["category_match"] and parts["r_price"] is True
    reward, parts = purchase_reward(SHIRT, {}, 11.07, goal(options=(), limit=NO_LIMIT))
    assert reward == 1.0 and "r_option" not in parts and "w_option" not in parts


@pytest.mark.parametrize(
    ("bought", "target", "r_type", "title_score"),
    [
        # One of three nouns: above a fifth, so of one kind.
        ({"title_nouns": ("shirt",)}, {}, 1.0, 1 / 3),
        # Exactly a fifth is not above it, and nothing else agrees.
        ({"title_nouns": ("a",)}, {"title_nouns": ("a", "b", "c", "d", "e")}, 0.5, 0.2),
        ({"title_nouns": ("a",), "query": "q"}, {"title_nouns": ("a", "b", "c", "d", "e"), "query": "q"}, 1.0, 0.2),
        # Below a tenth the title decides against query and path.
        ({"title_nouns": ("a",), "query": "q"}, {"title_nouns": ("a", *"bcdefghijkl"), "query": "q"}, 0.1, 1 / 12),
        ({"title_nouns": ("a",)}, {"title_nouns": ("a", *"bcdefghij")}, 0.5, 0.1),
        ({"title_nouns": ("z",), "query": "q"}, {"title_nouns": ("a",), "query": "q"}, 0.0, 0.0),
        # Repeats count below, not above.
        ({"title_nouns": ("a", "a")}, {"title_nouns": ("a", "a", "b", "b")}, 1.0, 1 / 4),
        # A target without nouns.
        ({"title_nouns": ("a",)}, {"title_nouns": ()}, 0.5, 0.2),
        ({"title_nouns": (), "query": "q"}, {"title_nouns": ("a",), "query": "q"}, 0.0, 0.0),
        # Two common steps of the path, in whatever order.
        (
            {"title_nouns": ("a",), "product_category": "X › Y"},
            {"title_nouns": ("a", *"bcde"), "product_category": "Y ›  X › Z"},
            1.0, 0.2,
        ),
    ],
)  # fmt: skip
def test_kinds(bought, target, r_type, title_score):
    blank = {"query": "", "product_category": ""}
    bought = dataclasses.replace(SHIRT, **blank | bought)
    target = dataclasses.replace(SHIRT, **{"query": "other", "product_category": "Other"} | target)
    parts = kind_reward(bought, target)
    assert (parts["r_type"], parts["title_score"]) == (r_type, pytest.approx(title_score))


def test_attributes_are_looked_for_in_texts_too():
    assert matched_attributes(SHIRT, ("long sleeves",)) == 1  # alike enough
    assert matched_attributes(SHIRT, ("soft cotton",)) == 1  # in the features
    assert matched_attributes(SHIRT, ("machine wash",)) == 1  # in the description
    assert matched_attributes(SHIRT, ("acme cotton",)) == 1  # in the title
    assert matched_attributes(SHIRT, ("Acme Cotton",)) == 0  # the goal's letters are not made small
    assert matched_attributes(SHIRT, ("waterproof", "long sleeve", "long sleeve")) == 2


def test_options_as_the_original_compares_them():
    # The choice becomes "blue", a subset of "color light blue": dark blue passes.
    assert matched_options({"color": "dark blue"}, {"color": "light blue"}) == 1
    # The choice becomes "black", the goal stays "color 2005black": never.
    assert matched_options({"color": "2005black"}, {"color": "2005black"}) == 0
    # A goal whose value is a colour word is that word.
    assert matched_options({"color": "black"}, {"color": "black"}) == 1
    # Names are ignored, each wanted value counts once.
    assert matched_options({"fit": "small"}, {"size": "small", "fit": "small"}) == 2
    # Human goals are values, normalised like choices.
    assert matched_options({"color": "dark blue"}, ("light blue",)) == 1
    assert matched_options({"color": "2005black"}, ("2005black",)) == 1
    assert matched_options({}, ("x",)) == matched_options({"a": "x"}, ()) == 0


def test_fair_options_let_a_value_match_itself():
    for value in ("2005black", "1877brown", "★"):
        assert matched_options({"color": value}, {"color": value}) == 0
        assert matched_options({"color": value}, {"color": value}, fair=True) == 1
    assert matched_options({"color": "red"}, {"color": "2005black"}, fair=True) == 0


def test_rewards_lie_in_the_unit_interval_whatever_is_bought():
    shelf = Shelf()
    table = GoalTable(shelf)
    best = 0.0
    for row in range(len(table.numbers.rows)):
        for number in range(table.numbers.counts[row]):
            asked = table.goal(row, number)
            for product in (SHIRT, TEE, LAMP, PLAIN):
                for options in ({}, asked.options, {"size": "small", "fit": "slim", "color": "light blue"}):
                    for fair in (False, True):
                        reward, _ = purchase_reward(product, options, 1.0, asked, fair_options=fair)
                        assert 0.0 <= reward <= 1.0
                        best = max(best, reward)
    assert best == 1.0

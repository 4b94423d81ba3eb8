"""Goals and their splits: texts, limits, weights, seeds, any size of catalogue."""

import collections
import dataclasses
import random

import numpy as np
import pytest

from envs.webshop import goal_files
from envs.webshop.builtin import Builtin
from envs.webshop.catalogue import Catalogue
from envs.webshop.goals import NO_LIMIT, GoalNumbers, GoalTable, draw_goals
from envs.webshop.product import Product
from envs.webshop.splits import SPLITS, Split
from tests.webshop_cases import LAMP, SHIRT, TEE, Shelf, many


def all_goals(table):
    return [
        table.goal(row, number) for row in range(len(table.numbers.rows)) for number in range(table.numbers.counts[row])
    ]


def split_of(table, split, eval_fraction=0.2, sampling="product"):
    return Split(table, split, eval_fraction, sampling)


def test_every_combination_of_sorted_options_is_a_goal():
    table = GoalTable(Shelf())
    goals = all_goals(table)
    assert table.numbers.counts.tolist() == [6, 4, 1] and len(table) == len(goals) == 11
    limit = goals[0].price_limit
    assert goals[0].instruction == (
        "Find me long sleeve men's shirts with classic fit with color: light blue, and size: small, and price lower "
        f"than {limit:.2f} dollars"
    )
    assert [tuple(goal.options.values()) for goal in goals[:3]] == [
        ("light blue", "small"),
        ("light blue", "large"),
        ("2005black", "small"),
    ]
    # "fit" sorts before "size", the page shows them the other way round.
    assert [goal.options for goal in goals[6:8]] == [
        {"fit": "small", "size": "small"},
        {"fit": "small", "size": "buy now"},
    ]
    # No limit above $990.
    assert goals[10].price_limit == NO_LIMIT and goals[10].instruction == "Find me energy saving lamps"
    assert goals[10].target == LAMP and goals[10].product == 2 and goals[10].options == {}


def test_human_goals():
    table = GoalTable(Shelf(), "human")
    goals = all_goals(table)
    assert [goal.instruction.partition(", and price")[0] for goal in goals] == ["i want a blue shirt", "something soft"]
    assert goals[0].options == ("blue", "large") and goals[0].attributes == ("long sleeve",) and goals[0].weight == 1


def test_weight_is_the_mean_rarity_of_the_attributes():
    twin = Product(asin="B00000TWIN", title="", instruction="Find me", instruction_attributes=("classic fit",))
    table = GoalTable(Shelf(SHIRT, twin))
    # Six goals name "long sleeve", seven "classic fit".
    np.testing.assert_allclose(table.numbers.weights, [(1 / 6 + 1 / 7) / 2, 1 / 7], rtol=1e-15)


def test_limits_are_the_larger_of_two_of_the_next_four_tens():
    counts = collections.Counter()
    for seed in range(600):
        table = GoalTable(Shelf(SHIRT, TEE), price_seed=seed)
        assert table.numbers.prices[0] == 11.07 and 3.78 <= table.numbers.prices[1] <= 11.38
        counts[table.numbers.limits[0]] += 1
        first = 10 * int(table.numbers.prices[1] // 10 + 1)
        assert table.numbers.limits[1] in (first + 10, first + 20, first + 30)
    assert set(counts) == {30.0, 40.0, 50.0}
    for limit, chance in ((30, 1 / 6), (40, 2 / 6), (50, 3 / 6)):
        assert abs(counts[limit] / 600 - chance) < 4 * (chance * (1 - chance) / 600) ** 0.5
    for price, limits in ((980.0, {NO_LIMIT}), (979.99, {990.0}), (990.0, {NO_LIMIT}), (10.0, {30.0, 40.0, 50.0})):
        product = Product(asin="A", title="", prices=(price,), instruction="x", instruction_attributes=("y",))
        assert {GoalTable(Shelf(product), price_seed=seed).numbers.limits[0] for seed in range(40)} == limits


def test_seeds_decide_and_global_random_state_is_left_alone():
    random.seed(5)
    before = random.getstate()
    first, again, other = (GoalTable(many(50), price_seed=seed) for seed in (3, 3, 4))
    split = split_of(first, "train")
    places = [split.place(seed) for seed in range(100)]
    assert random.getstate() == before
    assert first.numbers.limits.tolist() == again.numbers.limits.tolist() != other.numbers.limits.tolist()
    assert places == [split_of(again, "train").place(seed) for seed in range(100)]
    # The order of goals does not depend on the prices.
    assert [first.place(index) for index in range(99)] == [other.place(index) for index in range(99)]


def test_order_is_a_permutation():
    table = GoalTable(many(30))
    assert len(table) == 60
    assert len({table.place(index) for index in range(60)}) == 60


@pytest.mark.parametrize("number", [2, 3, 41, 200])
@pytest.mark.parametrize("sampling", ["product", "goal", "weight"])
def test_train_and_eval_share_no_product_and_each_has_one(number, sampling):
    table = GoalTable(many(number))
    train, held_out = (split_of(table, split, sampling=sampling) for split in ("train", "eval"))
    assert len(train) + len(held_out) == len(table)
    drawn = {table.numbers.asins[train.place(seed)[0]] for seed in range(2000)}
    asked = [held_out.place(seed) for seed in range(len(held_out))]
    assert drawn and asked and not drawn & {table.numbers.asins[row] for row, _ in asked}
    # Evaluation: every goal once, and before a product comes again all others did.
    assert len(set(asked)) == len(asked) and held_out.place(len(held_out)) == asked[0]
    products = len({row for row, _ in asked})
    assert len({row for row, _ in asked[:products]}) == products
    if number == 200:
        assert 20 < products < 60 and len(drawn) > 120


def test_a_product_stays_on_its_side_when_the_catalogue_grows():
    def held_out(number):
        table = GoalTable(many(number))
        split = split_of(table, "eval")
        return {table.numbers.asins[split.place(seed)[0]] for seed in range(len(split))}

    small = {product.asin for product in many(100).products}
    assert held_out(300) & small == held_out(100)


def test_sampling_of_training_goals():
    table = GoalTable(Shelf(SHIRT, TEE, LAMP, *many(9).products))
    for sampling, mass in (
        ("product", np.ones(len(table.numbers.rows))),
        ("goal", table.numbers.counts),
        ("weight", table.numbers.counts * table.numbers.weights),
    ):
        split = split_of(table, "train", sampling=sampling)
        drawn = np.bincount([split.place(seed)[0] for seed in range(6000)], minlength=len(table.numbers.rows))
        expected = np.where(drawn > 0, mass, 0)  # held-out rows are never drawn
        expected = expected / expected.sum()
        assert np.count_nonzero(drawn) > 5
        # Four standard deviations of a count.
        np.testing.assert_array_less(abs(drawn / 6000 - expected), 4 * np.sqrt(expected / 6000) + 1e-9)


@pytest.mark.parametrize(
    ("goals", "official"),
    [(100, (100, None, None)), (1000, (500, 500, None)), (1500, (500, 1000, None)), (6910, (500, 1000, 5410))],
)
def test_official_ranges_for_any_number_of_goals(goals, official):
    products = [
        Product(asin=f"B{index}", title="", instruction="x", instruction_attributes=("y",)) for index in range(goals)
    ]
    table = GoalTable(Shelf(*products))
    seen = []
    for split, size in zip(("official-test", "official-eval", "official-train"), official, strict=True):
        if size is None:
            with pytest.raises(
                ValueError, match=f"split='{split}' is empty: it begins at goal .* has {goals}; allowed"
            ):
                split_of(table, split)
            continue
        places = [split_of(table, split).place(seed) for seed in range(size)]
        assert split_of(table, split).place(size) == places[0] and split_of(table, split).place(-1) == places[-1]
        seen += places
    # Test, then eval, then train goals, in the original's order.
    assert seen == [split_of(table, "all").place(index) for index in range(len(seen))]
    assert len(seen) == goals


def test_errors_name_the_field():
    with pytest.raises(ValueError, match="unknown goals 'humane'; known: synthetic, human"):
        GoalTable(Shelf(), "humane")
    with pytest.raises(ValueError, match="goals='human': the catalogue of 5 products has none"):
        GoalTable(many(5), "human")
    table = GoalTable(many(5))
    with pytest.raises(ValueError, match=f"unknown split 'test'; known: {', '.join(SPLITS)}"):
        split_of(table, "test")
    for fraction in (0, 1, float("nan"), -0.1):
        with pytest.raises(ValueError, match="eval_fraction must lie between 0 and 1"):
            split_of(table, "train", fraction)
    with pytest.raises(ValueError, match="unknown sampling 'best'; known: product, goal, weight"):
        split_of(table, "train", sampling="best")
    with pytest.raises(ValueError, match="a single product has goals"):
        split_of(GoalTable(many(1)), "train")


def test_an_option_without_values_makes_no_goal():
    empty = Product(asin="A", title="", options={"size": ()}, instruction="x", instruction_attributes=("y",))
    table = GoalTable(Shelf(empty, SHIRT))
    assert table.numbers.rows.tolist() == [1] and table.numbers.asins.tolist() == ["B00000SHRT"]
    # Its limit was drawn nevertheless, as the original does: the next one is the second draw.
    draws = random.Random(0)
    draws.sample([110.0, 120.0, 130.0, 140.0], 2)
    assert table.numbers.limits[0] == max(draws.sample([20.0, 30.0, 40.0, 50.0], 2))


def test_goals_of_a_large_catalogue_are_drawn_once_and_mapped(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    catalogue = Catalogue.open(Builtin(num_products=80), progress=False)
    drawn = []

    def counted(*arguments):
        drawn.append(arguments)
        return draw_goals(*arguments)

    monkeypatch.setattr(goal_files, "draw_goals", counted)
    small = goal_files.goal_table(catalogue, "synthetic", 5)
    assert not drawn
    monkeypatch.setattr(goal_files, "_SMALL", 80)
    first, again, other = (goal_files.goal_table(catalogue, "synthetic", seed) for seed in (5, 5, 6))
    assert len(drawn) == 2  # one for each seed
    for field in dataclasses.fields(GoalNumbers):
        for table in (first, again):
            np.testing.assert_array_equal(getattr(table.numbers, field.name), getattr(small.numbers, field.name))
            assert not getattr(table.numbers, field.name).flags.writeable
    assert all_goals(again) == all_goals(small) != all_goals(other)
    assert [split_of(again, "train").place(seed) for seed in range(20)] == [
        split_of(small, "train").place(seed) for seed in range(20)
    ]
    assert goal_files.goal_table(catalogue, "human", 5).numbers.sentences.size < len(small.numbers.rows)

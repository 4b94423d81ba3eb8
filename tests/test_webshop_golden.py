"""The 1,000-product catalogue: prices, goals and whole episodes, text for text as the original's."""

import itertools

import numpy as np
import pytest

from envs.webshop.actions import parse
from envs.webshop.catalogue import Catalogue
from envs.webshop.env import WebShopEnv
from envs.webshop.goals import GoalTable
from envs.webshop.product import Product
from envs.webshop.reward import purchase_reward
from envs.webshop.session import Session
from tests.webshop_cases import Shelf
from tests.webshop_official import official_files, records


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory):
    return Catalogue.open(official_files(), cache=tmp_path_factory.mktemp("catalogue"), progress=False)


@pytest.fixture(scope="module")
def table(catalogue):
    return GoalTable(catalogue)


def test_prices_of_all_products(catalogue, table):
    asins = [catalogue.product(number).asin for number in range(len(catalogue))]
    assert dict(zip(asins, table.numbers.prices.tolist(), strict=True)) == records("sampled_prices_seed0.json.gz")[0]


def test_two_thousand_goals(table):
    expected = records("synthetic_goals_seed0.jsonl.gz")
    assert len(expected) == 2000 and len(table) == 6910
    for record in expected:
        goal = table.goal(*table.place(record["idx"]))
        assert record == {
            "asin": goal.target.asin,
            "instruction_text": goal.instruction,
            "attributes": list(goal.attributes),
            "price_upper": goal.price_limit,
            "goal_options": goal.options,
            "weight": goal.weight,
            "idx": record["idx"],
        }
        assert list(record["goal_options"]) == list(goal.options)


def test_what_the_exact_purchase_of_every_goal_earns(table):
    # The original's own numbers: the mean, and how many goals its comparison of options puts out of reach.
    places = [(row, number) for row in range(len(table.numbers.rows)) for number in range(table.numbers.counts[row])]
    scores = {fair: [] for fair in (False, True)}
    for place in places:
        goal = table.goal(*place)
        for fair, found in scores.items():
            price = table.numbers.prices[goal.product]
            found.append(purchase_reward(goal.target, goal.options, price, goal, fair_options=fair)[0])
    assert np.mean(scores[False]) == pytest.approx(0.9896, abs=5e-5)
    assert sum(score < 1 for score in scores[False]) == 458
    assert set(scores[True]) == {1.0}


def test_episodes_of_the_original(catalogue, table):
    episodes = records("golden_episodes_40.jsonl.gz")
    assert len(episodes) == 40 and {episode["mode"] for episode in episodes} == {"text", "text_rich"}
    bought = 0
    for episode in episodes:
        goal = table.goal(*table.place(episode["goal_idx"]))
        assert goal.target.asin == episode["goal_asin"]
        session = Session(catalogue, goal.instruction)
        show = session.as_text if episode["mode"] == "text" else session.as_rich_text
        assert show() == episode["init_obs"]
        assert list(session.clickables) == episode["init_avail"]["clickables"]
        for step in episode["steps"]:
            session.apply(parse(step["action"]))
            reward = 0.0
            if session.bought:
                price = table.numbers.prices[session.product]
                reward, parts = purchase_reward(session.shown_product(), session.options, price, goal)
                session.show_purchase(reward)
                assert parts == step["info"]
                assert list(session.options.items()) == list(step["options"].items())
                assert session.shown_product().asin == step["asin"]
                bought += 1
            assert show() == step["obs"], step["action"]
            assert list(session.clickables) == step["avail"]["clickables"]
            assert (session.place == "search") == step["avail"]["has_search_bar"]
            assert (reward, session.bought) == (step["reward"], step["done"])
    assert bought == 14


@pytest.mark.parametrize("observation", ["text", "text_rich"])
def test_episodes_through_the_environment(catalogue, observation):
    env = WebShopEnv(catalogue=catalogue, split="all", observation=observation, max_turns=100, thinking=False)
    for episode in records("golden_episodes_40.jsonl.gz"):
        if episode["mode"] != observation:
            continue
        shown, info = env.reset(episode["goal_idx"])
        assert episode["init_obs"].strip() in shown and info["goal"]["asin"] == episode["goal_asin"]
        for step in episode["steps"]:
            shown, reward, terminated, truncated, info = env.step(f"<answer>{step['action']}</answer>")
            # What the original passes over, like search[], is answered with the same page and the penalty.
            assert step["obs"].rstrip("\n") in shown
            assert reward == (-0.1 if info["invalid_action"] else step["reward"])
            assert (terminated, truncated) == (step["done"], False)
            if terminated:
                assert info.items() >= step["info"].items() and info["success"] == (step["reward"] == 1.0)
                assert (info["asin"], info["options"]) == (step["asin"], step["options"])


def test_a_folder_of_official_files_makes_an_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = str(official_files().items.parent)
    env = WebShopEnv(catalogue=folder, goals="human", split="all")
    assert env.num_goals == 13
    assert "gluten free, 100% vegan plant based protein shake" in "".join(env.reset(seed)[0] for seed in range(13))
    assert len({WebShopEnv(catalogue=folder, split=split).num_goals for split in ("train", "eval")}) == 2


def test_human_goals_of_the_full_catalogue_stand_in_the_official_order():
    # The official list is shuffled. Put back, sentences of one product are neighbours, and share more words.
    official = records("human_goals.json.gz")[0]
    product = Product(asin="A", title="", instruction="x", instruction_attributes=("y",))
    table = GoalTable(Shelf(*[product] * len(official)))
    restored = {table.place(index)[0]: text for index, text in enumerate(official)}

    def likeness(texts):
        words = [set(text.split()) for text in texts]
        return np.mean([len(one & two) / len(one | two) for one, two in itertools.pairwise(words)])

    assert len(restored) == 12087
    assert likeness(official) < 0.1  # what any two goals share
    assert likeness([restored[row] for row in range(len(restored))]) > 0.13

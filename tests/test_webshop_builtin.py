"""The built-in catalogue is the same everywhere, in the official schema, and searching it is a task."""

import collections
import hashlib
import json
import random
import re
import subprocess
import sys

import pytest

from envs.webshop.builtin import Builtin
from envs.webshop.catalogue import Catalogue
from envs.webshop.goals import GoalTable
from envs.webshop.official import find_official_files, read_products
from envs.webshop.product import searched_text
from envs.webshop.reward import purchase_reward

DIGEST = "from json import dumps; from hashlib import sha256; from envs.webshop.builtin import Builtin; "
DIGEST += "print(sha256(dumps(list(Builtin().records())).encode()).hexdigest())"


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    return Catalogue.open(Builtin(), cache=tmp_path_factory.mktemp("cache"))


def test_it_is_the_same_in_every_process_and_version():
    digest = hashlib.sha256(json.dumps(list(Builtin().records())).encode()).hexdigest()
    # Change it together with builtin.VERSION: caches are keyed by that.
    assert digest == "785f30966b8f5cf28025469636ce7111b2a1e1aa3d8d70250d72a27fd02c7fce"
    environment = {"PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", DIGEST]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    assert done.stdout.strip() == digest


def test_seeds_and_sizes():
    products = list(Builtin().products())
    assert len(products) == 400
    assert list(Builtin(num_products=30).products()) == products[:30]
    assert list(Builtin(num_products=30, seed=1).products()) != products[:30]
    for wrong in ({"num_products": 0}, {"seed": -1}):
        with pytest.raises(ValueError, match="must be at least"):
            Builtin(**wrong)
    assert len({Builtin(*args).key()["seed"] for args in ((5, 0), (5, 1))}) == 2


def test_the_official_files_of_it_read_back(tmp_path):
    Builtin(40).write_official_files(tmp_path)
    assert list(read_products(find_official_files(tmp_path))) == list(Builtin(40).products())


def test_texts_are_short_and_of_few_words(shop):
    words = collections.Counter()
    for number in range(len(shop)):
        product = shop.product(number)
        assert len(product.title.split()) <= 8
        assert 2 <= len(product.bullets) <= 3
        assert product.description.count(".") == 1
        assert 1 <= len(product.options) <= 2
        assert all(len(values) >= 2 for values in product.options.values())
        texts = [searched_text(product), *product.bullets, product.instruction or "", product.product_category]
        texts += [human.instruction for human in product.human_instructions]
        words.update(re.findall("[a-z]+", " ".join(texts).lower()))
    assert len(words) < 200


def test_every_goal_can_be_met_and_few_products_meet_it(shop):
    for kind in ("synthetic", "human"):
        goals = GoalTable(shop, kind)
        assert len(goals) > 100
        draws = random.Random(0)
        meeting = []
        for _ in range(40):
            goal = goals.goal(*goals.place(draws.randrange(len(goals))))
            assert goal.attributes
            assert goal.options
            scores = [_score(shop.product(number), goal, goals.numbers.prices[number]) for number in range(len(shop))]
            assert scores[goal.product] == 1
            meeting.append(scores.count(1))
        # Of 20 products of the kind; a goal that half of them meet would ask for nothing.
        assert sum(meeting) / len(meeting) < 10


def _score(product, goal, price):
    """What buying a product is worth where the wanted options are chosen as far as it has them."""
    wanted = set(goal.options.values()) if isinstance(goal.options, dict) else set(goal.options)
    chosen = {name: value for name, values in product.options.items() for value in values if value in wanted}
    return purchase_reward(product, chosen, price, goal)[0]


def test_search_finds_the_target_but_not_always_first(shop):
    goals = GoalTable(shop)
    draws = random.Random(0)
    ranks, by_shelf = [], []
    for _ in range(200):
        goal = goals.goal(*goals.place(draws.randrange(len(goals))))
        ranks.append(shop.search(goal.instruction).index(goal.product))
        by_shelf.append(shop.search(goal.target.query))
        assert goal.product in by_shelf[-1]
    share = {limit: sum(rank < limit for rank in ranks) / len(ranks) for limit in (1, 10)}
    assert 0.3 < share[1] < 0.9
    assert share[10] > 0.9
    # The name of the kind alone finds more than a page of competitors.
    assert sum(len(found) > 10 for found in by_shelf) / len(by_shelf) > 0.9


def test_opening_it_is_quick_and_needs_no_download(shop):
    assert len(shop) == 400
    assert (shop.folder / "manifest.json").stat().st_size < 4096
    assert sum(path.stat().st_size for path in shop.folder.iterdir()) < 1_000_000

"""The WebShop environment: episodes, rewards, limits, prompts, arguments."""

import json
import random
import re

import pytest

from envs.registry import make
from envs.webshop import official
from envs.webshop.build import main as build_ahead
from envs.webshop.builtin import Builtin
from envs.webshop.catalogue import Catalogue
from envs.webshop.env import WebShopEnv
from envs.webshop.shoppers import first_item, knowing
from envs.webshop.shoppers import play as play_with
from tests.webshop_cases import LAMP, PLAIN, SHIRT, TEE, Shelf, many

SHELF = Shelf()


def build(**kwargs) -> WebShopEnv:
    """An environment on the small shelf, goals by index."""
    return make("webshop", **{"catalogue": SHELF, "split": "all", "thinking": False} | kwargs)


def seed_of(env: WebShopEnv, asin: str, **options: str) -> int:
    """A seed whose goal asks for this."""
    for seed in range(env.num_goals):
        goal = env.reset(seed)[1]["goal"]
        if goal["asin"] == asin and goal["options"] == options:
            return seed
    raise AssertionError("no such goal")


def reply(action: str) -> str:
    return f"<answer>{action}</answer>"


def play(env, seed, *actions):
    env.reset(seed)
    for action in actions:
        result = env.step(reply(action))
    return result


def test_golden_episode():
    env = build(max_turns=6)
    seed = seed_of(env, SHIRT.asin, color="light blue", size="large")
    observation, info = env.reset(seed)
    limit = env.goal.price_limit
    instruction = (
        "Find me long sleeve men's shirts with classic fit with color: light blue, and size: large, and price lower "
        f"than {limit:.2f} dollars"
    )
    assert observation == (
        f"Turn 1 of 6\nWebShop [SEP] Instruction: [SEP] {instruction} [SEP] Search\n"
        "Available actions: search[<keywords>]\nReply as <answer>...</answer>."
    )
    assert info == {
        "success": False,
        "score": 0.0,
        "num_turns": 0,
        "invalid_action": False,
        "page": "search",
        "goal": {
            "asin": "B00000SHRT",
            "attributes": ["long sleeve", "classic fit"],
            "options": {"color": "light blue", "size": "large"},
            "price_limit": limit,
            "weight": pytest.approx(1 / 6),
        },
    }
    observation, reward, terminated, truncated, info = env.step(reply("search[acme]"))
    assert observation == (
        f"Turn 2 of 6\nInstruction: [SEP] {instruction} [SEP] Back to Search [SEP] Page 1 (Total results: 1) [SEP] "
        "Next > [SEP] B00000SHRT [SEP] Acme Cotton Shirt [SEP] $11.07\nAvailable actions: search[<keywords>], "
        "click[back to search], click[next >], click[b00000shrt]\nReply as <answer>...</answer>."
    )
    assert (reward, terminated, truncated, info["page"]) == (0.0, False, False, "results")
    # Not on the page: the penalty, and the page stays.
    observation, reward, terminated, truncated, info = env.step(reply("click[buy now]"))
    assert observation.startswith(
        "Your last answer was not valid: use the response form and one listed action.\nTurn 3 of 6\nInstruction:"
    )
    assert (reward, info["invalid_action"], info["page"]) == (-0.1, True, "results")
    env.step(reply("click[B00000SHRT]"))
    env.step(reply("click[large]"))
    observation, reward, terminated, truncated, info = env.step(reply("click[buy now]"))
    # Two attributes, one of two options, the price: 4 of 5.
    assert reward == info["score"] == pytest.approx(0.8)
    assert (terminated, truncated, info["success"]) == (True, False, False)
    assert "Your score (min 0.0, max 1.0) [SEP] 0.8" in observation and "Available" not in observation
    assert info == {
        "success": False, "score": reward, "num_turns": 5, "invalid_action": False, "page": "done",
        "asin": "B00000SHRT", "options": {"size": "large"}, "r_type": 1.0, "query_match": True,
        "category_match": True, "title_score": 1.0, "r_att": 1.0, "w_att": 0.4, "r_option": 0.5, "w_option": 0.4,
        "r_price": True, "w_price": 0.2,
    }  # fmt: skip


def test_success_is_a_score_of_one():
    env = build()
    seed = seed_of(env, SHIRT.asin, color="2005black", size="small")
    path = ("search[acme]", "click[b00000shrt]", "click[small]", "click[2005black]", "click[buy now]")
    _, reward, terminated, _, info = play(env, seed, *path)
    # The original cannot match this value with itself.
    assert (reward, terminated, info["success"]) == (pytest.approx(0.8), True, False)
    _, reward, terminated, _, info = play(build(fair_options=True), seed, *path)
    assert (reward, terminated, info["success"]) == (1.0, True, True)


def test_limit_of_turns_truncates_unless_the_last_turn_buys():
    env = build(max_turns=3)
    observation, reward, terminated, truncated, info = play(env, 0, "search[acme]", "nonsense", "search[tee]")
    assert (reward, terminated, truncated, info["success"], info["score"]) == (0.0, False, True, False, 0.0)
    assert observation == env.session.as_text()  # asks for no further turn
    _, _, terminated, truncated, _ = play(env, 0, "search[acme]", "click[b00000shrt]", "click[buy now]")
    assert (terminated, truncated) == (True, False)
    assert make("webshop-ragen", catalogue=SHELF, split="all").instructions.count("You have 9 turns.") == 1


def test_range_prices_are_those_of_the_price_seed():
    for price_seed in (0, 1):
        env = build(price_seed=price_seed)
        seed = seed_of(env, TEE.asin, size="small", fit="slim")
        *_, info = play(env, seed, "search[tee]", "click[b00000tee1]", "click[buy now]")
        assert info["r_price"]  # a product is always within the limit of its own goal
        seed = seed_of(env, LAMP.asin)
        *_, info = play(env, seed, "search[tee]", "click[b00000tee1]", "click[buy now]")
        assert info["r_price"] and "r_option" not in info


def test_response_format():
    env = build(thinking=True)
    assert env.instructions.endswith("<think>your reasoning</think><answer>search[blue cotton shirt]</answer>")
    for text in (
        "<answer>search[x]</answer>",
        "search[x]",
        "<think>search[x]</think>",
        "<think></think><answer>x</answer>",
    ):
        env.reset(0)
        observation, reward, *_, info = env.step(text)
        assert (reward, info["invalid_action"], info["page"]) == (-0.1, True, "search")
        assert observation.endswith("Reply as <think>...</think><answer>...</answer>.")
    env.reset(0)
    text = "<think><answer>click[x]</answer></think> <answer>\nSearch[Acme]\n</answer>"
    assert env.step(text)[-1]["page"] == "results"
    assert env.session.keywords == "acme"


def test_the_worked_action_of_the_instructions_is_valid():
    for thinking in (False, True):
        env = build(thinking=thinking)
        example = env.instructions.rpartition("exactly this form: ")[2]
        env.reset(0)
        assert not env.step(example)[-1]["invalid_action"]


def test_every_listed_action_is_valid_and_does_something():
    rng = random.Random(0)
    env = build(max_turns=40)
    pages = set()
    for seed in range(8):
        observation, _ = env.reset(seed)
        ended = False
        while not ended:
            listed = re.search(r"^Available actions: (.*)$", observation, re.M)[1].split(", ")
            action = rng.choice(listed).replace("<keywords>", rng.choice(["shirt", "tee lamp", "nothing"]))
            observation, reward, terminated, truncated, info = env.step(reply(action))
            assert not info["invalid_action"], action
            assert 0 <= reward <= 1
            pages.add(info["page"])
            ended = terminated or truncated
    assert pages == {"search", "results", "item", "description", "features", "reviews", "done"}


def test_compact_pages():
    env = build(prompt="compact", max_turns=9)
    assert env.instructions == ""
    seed = seed_of(env, SHIRT.asin, color="light blue", size="large")
    observation, _ = env.reset(seed)
    assert observation == f"{env.goal.instruction.lower()}\n[search]\n9"
    assert env.step(reply("search[shirt]"))[0] == (
        "1 acme cotton shirt $11.07\n2 desk lamp shirt $999.5\n[back to search] [next >]\n8"
    )
    assert env.step(reply("click[3]"))[-1]["invalid_action"]
    # By number or by asin.
    assert env.step(reply("click[2]"))[0] == (
        "desk lamp shirt $999.5\n[back to search] [< prev] [description] [features] [reviews] [buy now]\n6"
    )
    assert env.step(reply("click[features]"))[0] == "bright\nusb [5 v]\n[back to search] [< prev]\n5"
    assert env.step(reply("click[1]"))[-1]["invalid_action"]  # numbers are those of results alone
    env.step(reply("search[shirt]"))
    env.step(reply("click[b00000shrt]"))
    assert env.step(reply("click[light blue]"))[0] == (
        'acme cotton shirt $11.07\ncolor [light blue]* [2005black] [navy "x"]\nsize [small] [large]\n'
        "[back to search] [< prev] [description] [features] [reviews] [buy now]\n1"
    )
    assert build().reset(0)[0].count("[search]") == 0


def test_rich_text_and_page_size():
    env = build(observation="text_rich", products_per_page=1)
    env.reset(0)
    observation = env.step(reply("search[shirt]"))[0]
    assert (
        "\n[button] Next > [button_]\n\n[button] B00000SHRT [button_]\nAcme Cotton Shirt\n$11.07\nAvailable"
        in observation
    )
    assert "B00000LAMP" not in observation
    assert "[button]" in env.instructions and "[SEP]" not in env.instructions


def test_reset_is_a_function_of_arguments_and_seed():
    env, twin = (make("webshop", catalogue=many(60)) for _ in range(2))
    for seed in (0, 7, 10_000, 2**40, -3):
        expected = env.reset(seed)
        env.step("<think></think><answer>search[thing]</answer>")
        assert env.reset(seed) == expected == twin.reset(seed)
    assert len({env.reset(seed)[1]["goal"]["asin"] for seed in range(50)}) > 20


def test_training_never_asks_for_a_held_out_product():
    train, held_out = (make("webshop", catalogue=many(200), split=split) for split in ("train", "eval"))
    asked = {held_out.reset(seed)[1]["goal"]["asin"] for seed in range(held_out.num_goals)}
    assert asked and not asked & {train.reset(seed)[1]["goal"]["asin"] for seed in range(3000)}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"goals": "all"}, "unknown goals 'all'; known: synthetic, human"),
        ({"split": "test"}, "unknown split 'test'; known: train, eval"),
        ({"sampling": "uniform"}, "unknown sampling 'uniform'; known: product"),
        ({"observation": "html"}, "unknown observation 'html'; known: text, text_rich"),
        ({"prompt": "short"}, "unknown prompt 'short'; known: full, compact"),
        ({"max_turns": 0}, "max_turns must be a whole number of at least 1, got 0"),
        ({"max_turns": True}, "max_turns must be"),
        ({"products_per_page": 2.5}, "products_per_page must be a whole number of at least 1, got 2.5"),
        ({"format_penalty": 0.1}, "format_penalty must be finite and at most 0, got 0.1"),
        ({"format_penalty": float("-inf")}, "format_penalty must be finite"),
        ({"eval_fraction": 0.0}, "eval_fraction must lie between 0 and 1"),
        ({"split": "official-train"}, "split='official-train' is empty"),
        ({"max_step": 3}, "has no argument 'max_step'"),
    ],
)
def test_errors_name_the_argument(kwargs, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        build(**kwargs)
    assert "\n" not in str(caught.value)


def test_step_before_reset():
    with pytest.raises(RuntimeError, match="reset the environment first"):
        build().step("x")


def test_a_product_without_a_goal_can_be_bought():
    env = build()
    seed = seed_of(env, LAMP.asin)
    _, reward, terminated, _, info = play(env, seed, "search[nothing]", "click[b00000none]", "click[buy now]")
    assert (reward, terminated, info["asin"]) == (0.0, True, PLAIN.asin)


def test_the_builtin_catalogue_with_its_shoppers(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sizes = {}
    for split in ("train", "eval"):
        env = make("webshop", split=split, num_products=60, prompt="compact", thinking=False)
        sizes[split] = env.num_goals
        scores = {
            name: [row["score"] for row in play_with(env, shopper, range(40))]
            for name, shopper in (("first", first_item), ("knowing", knowing("request")))
        }
        assert set(scores["knowing"]) == {1.0}
        # Something is left to learn: the first product that is found is rarely the one that is asked for.
        assert 0.2 < sum(scores["first"]) / 40 < 0.8
    assert sizes["train"] > sizes["eval"] > 0
    with pytest.raises(ValueError, match="num_products must be a whole number of at least 1, got 0"):
        make("webshop", num_products=0)


def test_a_large_catalogue_is_built_ahead_not_in_the_time_of_a_first_reset(tmp_path, monkeypatch, capsys):
    """A worker that builds for minutes is taken for hung and killed, and so is the next one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asins = [f"B00000000{number}" for number in range(4)]
    record = dict.fromkeys(("full_description", "small_description", "category", "product_category", "query"), "")
    items = [record | {"asin": asin, "name": f"Mug {asin}"} for asin in asins]
    entry = {"attributes": ["red"], "instruction": "Find me mugs", "instruction_attributes": ["red"]}
    (tmp_path / "items_shuffle.json").write_text(json.dumps(items))
    (tmp_path / "items_ins_v2.json").write_text(json.dumps(dict.fromkeys(asins, entry)))
    monkeypatch.setattr(official, "_LARGE_BYTES", (tmp_path / "items_shuffle.json").stat().st_size)
    with pytest.raises(ValueError, match=f"python -m envs.webshop.build {tmp_path}$") as caught:
        build(catalogue=str(tmp_path))
    assert "is not built" in str(caught.value) and "\n" not in str(caught.value)
    # A few of its records are read in a moment.
    assert build(catalogue=str(tmp_path), num_products=2).num_goals == 2
    build_ahead([str(tmp_path)])
    assert capsys.readouterr().out.startswith("4 products, ")
    assert build(catalogue=str(tmp_path)).num_goals == 4


def test_a_built_catalogue_is_taken_whole(tmp_path):
    folder = str(Catalogue.open(Builtin(20), cache=tmp_path, progress=False).folder)
    assert build(catalogue=folder).num_goals > 0
    with pytest.raises(ValueError, match=r"num_products=5 with catalogue='.*', which is built; allowed: None"):
        build(catalogue=folder, num_products=5)

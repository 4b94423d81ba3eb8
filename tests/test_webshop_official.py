"""The official files become products as the original makes them."""

import gzip
import itertools
import json
import tracemalloc

import pytest

from envs.webshop import json_stream
from envs.webshop.nouns import title_nouns
from envs.webshop.official import OfficialFiles, read_products
from envs.webshop.product import HumanInstruction, Product, searched_text
from tests.shared_data import shared_path


def read(name):
    text = gzip.decompress(shared_path("data", "webshop", name).read_bytes()).decode()
    return [json.loads(line) for line in text.strip().split("\n")] if ".jsonl" in name else json.loads(text)


@pytest.fixture(scope="module")
def shop():
    folder = shared_path("data", "webshop")
    files = OfficialFiles(
        folder / "items_shuffle_1000.json.gz",
        folder / "items_ins_v2_1000.json.gz",
        folder / "items_human_ins_13.json.gz",
        folder / "title_nouns_spacy380.json.gz",
    )
    return {product.asin: product for product in read_products(files)}


def test_products_stand_in_the_order_of_the_file(shop):
    assert list(shop) == [record["asin"] for record in read("items_shuffle_1000.json.gz")]


def test_sampled_prices_lie_in_the_ranges_and_equal_single_prices(shop):
    for asin, sampled in read("sampled_prices_seed0.json.gz").items():
        prices = shop[asin].prices
        if len(prices) == 1:
            assert sampled == prices[0]
        else:
            low, high = sorted(prices)
            assert low <= sampled <= high


def test_goals_name_attributes_and_options_of_their_products(shop):
    goals = read("synthetic_goals_seed0.jsonl.gz")
    assert len(goals) == 2000
    for goal in goals:
        product = shop[goal["asin"]]
        assert goal["instruction_text"].startswith(product.instruction)
        assert tuple(goal["attributes"]) == product.instruction_attributes
        assert set(goal["goal_options"]) == set(product.options)
        assert all(value in product.options[name] for name, value in goal["goal_options"].items())
    # One goal for each choice of options of each product with an instruction: the 6,910 of the original.
    choices = [len(list(itertools.product(*p.options.values()))) for p in shop.values() if p.instruction]
    assert (len(choices), sum(choices)) == (415, 6910)


def test_item_pages_of_the_original_show_these_texts(shop):
    shown = 0
    for episode in read("golden_episodes_40.jsonl.gz"):
        if episode["mode"] != "text":
            continue
        for step in episode["steps"]:
            parts = step["obs"].split(" [SEP] ")
            if "Buy Now" not in parts or "Price: " not in step["obs"]:
                continue
            price = next(part for part in parts if part.startswith("Price: "))
            title = parts[parts.index(price) - 1]
            matches = [product for product in shop.values() if product.title.strip() == title]
            options = [text for name, values in matches[0].options.items() for text in (name, *values)]
            assert [product.price_label for product in matches] == [price.removeprefix("Price: ")]
            assert parts[parts.index("< Prev") + 1 : parts.index(price) - 1] == [text.strip() for text in options]
            shown += 1
    assert shown > 20


def test_human_instructions_lose_the_writers_name(shop):
    humans = [product for product in shop.values() if product.human_instructions]
    assert len(humans) == 13
    assert shop["B09R4RJSFP"].human_instructions == (
        HumanInstruction("i need a 120 ml hair mask treatment", ("hair treatment",), ("120ml",)),
    )


def test_guessed_nouns_decide_the_kind_of_a_product_as_tagged_ones_do(shop):
    def score(bought, goal):  # the share of the goal's nouns that the bought title has
        return len(set(bought) & set(goal)) / len(goal) if goal else 0.2

    def kind(value):  # the three levels that the reward knows
        return 0 if value == 0 else 1 if value < 0.1 else 2 if value <= 0.2 else 3

    products = list(shop.values())
    pairs = [(products[i], products[(i * 7 + shift) % 1000]) for i in range(1000) for shift in range(1, 40)]
    same = [
        kind(score(bought.title_nouns, goal.title_nouns))
        == kind(score(title_nouns(bought.title), title_nouns(goal.title)))
        for bought, goal in pairs
    ]
    assert sum(same) / len(same) > 0.94  # random guessing of the levels would agree on about half


RECORD = {
    "asin": "B000000001",
    "name": "Red Mug",
    "full_description": "A mug.",
    "small_description": "Holds tea",
    "customization_options": {"Color": [{"value": " Red/Blue "}, {"value": "NAVY"}], "Size": None},
    "pricing": "$3.78 - $11.38",
    "query": " Mugs ",
    "category": "garden",
    "product_category": "Home › Kitchen",
}


def write(tmp_path, items, attributes="{}", human=None):
    paths = [tmp_path / "items.json", tmp_path / "attributes.json"]
    for path, content in zip(paths, (items, attributes)):
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    if human is not None:
        paths.append(tmp_path / "human.json")
        paths[-1].write_text(json.dumps(human), encoding="utf-8")
    return OfficialFiles(*paths)


def test_a_record_by_hand(tmp_path):
    entry = {"attributes": ["dish washer safe"], "instruction": "Find me mugs", "instruction_attributes": ["red"]}
    (product,) = read_products(write(tmp_path, [RECORD], {"B000000001": entry}))
    assert product == Product(
        "B000000001",
        "Red Mug",
        "A mug.",
        ("Holds tea",),
        "$3.78 to $11.38",
        (3.78, 11.38),
        {"color": ("red | blue", "navy")},
        ("dish washer safe",),
        "mugs",
        "garden",
        "Home › Kitchen",
        "Find me mugs",
        ("red",),
        (),
        ("red", "mug"),
    )
    assert searched_text(product) == "red mug a mug. holds tea color: red | blue, navy"


@pytest.mark.parametrize(
    ("pricing", "label", "prices"),
    [
        ("", "$100.0", (100.0,)),
        (None, "$100.0", (100.0,)),
        ("$55", "$55.0", (55.0,)),
        ("$1,234.50", "$1234.5", (1234.5,)),
        ("$9.99 - $5.00 - $7", "$9.99 to $5.0", (9.99, 5.0)),
    ],
)
def test_prices(tmp_path, pricing, label, prices):
    (product,) = read_products(write(tmp_path, [RECORD | {"pricing": pricing}]))
    assert (product.price_label, product.prices) == (label, prices)


def test_skips_and_duplicates_are_the_originals(tmp_path):
    asins = ["nan", "B000000001", "B0000000012", "B000000001", "B000000002"]
    items = [RECORD | {"asin": asin, "name": str(number)} for number, asin in enumerate(asins)]
    files = write(tmp_path, items)
    assert [(product.asin, product.title) for product in read_products(files)] == [
        ("B000000001", "1"),
        ("B000000002", "4"),
    ]
    # The count is of records, before any is dropped.
    few = OfficialFiles(files.items, files.attributes, num_products=4)
    assert [product.asin for product in read_products(few)] == ["B000000001"]
    assert next(iter(read_products(files))).attributes == ("DUMMY_ATTR",)


WITHOUT_ASIN = {name: value for name, value in RECORD.items() if name != "asin"}


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([RECORD, WITHOUT_ASIN], "items.json: record 1 has no field 'asin'"),
        (["mug"], "items.json: record 0 is 'mug', expected an object with the field 'asin'"),
        ([RECORD | {"name": 3}], r"items.json: record 0 \(B000000001\): name is 3, expected str"),
        ([RECORD | {"pricing": "cheap"}], "pricing 'cheap' is not like"),
        ([RECORD | {"pricing": "$."}], "pricing '\\$.' is not like"),
        ([RECORD | {"small_description": [None]}], "an entry of small_description is None, expected str"),
        ([RECORD | {"customization_options": {"Color": [{}]}}], "option 'Color' has no field 'value'"),
        ("[1, 2", "items.json"),
        ('[{"asin": "B1"', "items.json is not a JSON array"),
        ("[] []", r"items.json is not a JSON array: text after the closing '\]' at character 3"),
        (f"[{json.dumps(RECORD)} 2]", "expected ',', found '2'"),
        ("", r"items.json is not a JSON array: it ends where '\[' was expected at character 0"),
        ("<html>", r"items.json is not a JSON array: expected '\[', found '<' at character 0"),
        ("{}", "items.json is not a JSON array"),
    ],
)
def test_faults_are_named_in_one_line(tmp_path, items, message):
    with pytest.raises(ValueError, match=message) as caught:
        list(read_products(write(tmp_path, items)))
    assert "\n" not in str(caught.value)


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*nowhere\.json: No such file"):
        list(json_stream.read_array(tmp_path / "nowhere.json"))
    whole = gzip.compress(json.dumps([RECORD] * 50).encode())
    (tmp_path / "cut.json.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut\.json\.gz is not a JSON array: cannot be decoded"):
        list(json_stream.read_array(tmp_path / "cut.json.gz"))
    (tmp_path / "bad.json.gz").write_bytes(whole[:20] + bytes(len(whole) - 20))
    with pytest.raises(ValueError, match=r"bad\.json\.gz is not a JSON array: cannot be decoded"):
        list(json_stream.read_array(tmp_path / "bad.json.gz"))
    (tmp_path / "latin.json").write_bytes(b'["\xe9"]')
    with pytest.raises(ValueError, match=r"latin\.json is not a JSON array: cannot be decoded"):
        list(json_stream.read_array(tmp_path / "latin.json"))


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1000])
def test_reading_by_chunks_equals_reading_whole(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(json_stream, "_CHUNK", chunk)
    values = [12345, -0.5e-3, 'a"b\\ é \ud83d', {"x": [1, {"y": None}]}, [], True, 7]
    path = tmp_path / "values.json"
    for indent in (None, 2):
        path.write_text(json.dumps(values, indent=indent))
        assert list(json_stream.read_array(path)) == values
        path.write_text(json.dumps({str(number): value for number, value in enumerate(values)}, indent=indent))
        pairs = list(json_stream.read_object(path))
        assert [(name, json.loads(text)) for name, text in pairs] == [(str(n), v) for n, v in enumerate(values)]
    path.write_text(" [ ] \n")
    assert list(json_stream.read_array(path)) == []


def test_a_large_file_is_never_whole_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(json_stream, "_CHUNK", 1 << 14)
    path = tmp_path / "items.json"
    path.write_text(json.dumps([{"name": "x" * 1000, "number": number} for number in range(4000)]))
    shares = []
    tracemalloc.start()
    total = sum(record["number"] for record in json_stream.read_array(path, shares.append))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total == sum(range(4000))
    assert path.stat().st_size > 4e6
    assert peak < 5e5
    assert shares == sorted(shares) and shares[0] < 0.1 and shares[-1] == 1


def test_a_file_that_goes_wrong_is_given_up_on(tmp_path, monkeypatch):
    # An unfinished text is no reason to read gigabytes.
    monkeypatch.setattr(json_stream, "_CHUNK", 100)
    monkeypatch.setattr(json_stream, "_LONGEST_ENTRY", 1000)
    path = tmp_path / "items.json"
    path.write_text('["' + "x" * 100_000)
    shares = []
    with pytest.raises(ValueError, match="Unterminated string"):
        list(json_stream.read_array(path, shares.append))
    # The decoder reads a buffer ahead.
    assert shares[-1] < 0.2

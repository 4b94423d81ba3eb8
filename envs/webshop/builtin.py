"""The built-in catalogue: a few hundred made-up products in the official schema, for a shop without any download.

A product is one of twenty kinds. Products of a kind share words, price range and search phrase, and differ in material,
attributes, colours, sizes and price, so that an instruction fits few of them and a search finds several that compete.
Of its three or four attributes the title tells one and the features the others, of which search knows the first: the
rest must be read on the product's pages. Texts are short and made of less than two hundred words, for models that learn
to read from nothing. Names are invented.
"""

import dataclasses
import json
import pathlib
import random
from collections.abc import Callable, Iterator
from typing import Any

from envs.webshop.product import Product
from envs.webshop.records import make_product

# Of what is generated: another number, other products.
VERSION = 1

_BRANDS = ("Nordal", "Vesti", "Luma", "Orba", "Tarn", "Kivo", "Selma", "Brisk")
_COLOURS = ("black", "white", "red", "blue", "green", "grey", "pink", "brown")


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What products of a kind have in common.

    Attributes:
      name: a word for the title; for a shop's shelf in the plural.
      shelf: the search phrase.
      use: a word for the title.
      category: the broad one.
      path: its category path.
      materials: of one of which each product is made.
      attributes: of which each product has some.
      sizes: name of the option and its values.
      prices: the lowest and the highest, in whole dollars.
      coloured: whether there is a choice of colours.
    """

    name: str
    shelf: str
    use: str
    category: str
    path: str
    materials: tuple[str, ...]
    attributes: tuple[str, ...]
    sizes: tuple[str, tuple[str, ...]]
    prices: tuple[int, int]
    coloured: bool = True


_WEAR = ("machine washable", "long sleeve", "slim fit", "quick dry", "hand wash", "soft")
_SHOE = ("non slip", "arch support", "rubber sole", "memory foam", "quick dry", "light weight")
_HOME = ("machine washable", "easy clean", "eco friendly", "super soft", "double sided", "non slip")
_WOOD = ("easy assemble", "space saving", "heavy duty", "easy clean", "eco friendly", "fully assembled")
_FOOD = ("gluten free", "sugar free", "non gmo", "dairy free", "low calorie", "plant based")
_CARE = ("cruelty free", "paraben free", "long lasting", "tea tree", "dry skin", "sulfate free")
_TECH = ("fast charging", "water proof", "easy carry", "noise free", "long lasting", "heavy duty")

_CLOTHES = ("size", ("small", "medium", "large", "x-large"))
_FEET = ("size", ("6", "7", "8", "9", "10"))
_BEDS = ("size", ("twin", "queen", "king"))
_PACKS = ("pack", ("1 pack", "2 pack", "4 pack"))
_VOLUMES = ("volume", ("2 oz", "4 oz", "8 oz"))
_LENGTHS = ("length", ("3 feet", "6 feet", "10 feet"))
_WIDTHS = ("width", ("20 inch", "30 inch", "40 inch"))

_CLOTH = ("cotton", "linen", "wool")
_SOLES = ("leather", "canvas", "mesh")
_TIMBER = ("oak", "pine", "bamboo")
_SHELL = ("metal", "plastic", "nylon")

_KINDS = (
    _Kind("Shirt", "shirts", "Men", "fashion", "Clothing › Men › Shirts", _CLOTH, _WEAR, _CLOTHES, (12, 45)),
    _Kind("Dress", "dresses", "Women", "fashion", "Clothing › Women › Dresses", _CLOTH, _WEAR, _CLOTHES, (18, 70)),
    _Kind("Jacket", "jackets", "Men", "fashion", "Clothing › Men › Coats", _CLOTH, _WEAR, _CLOTHES, (30, 95)),
    _Kind("Pants", "pants", "Women", "fashion", "Clothing › Women › Pants", _CLOTH, _WEAR, _CLOTHES, (15, 55)),
    _Kind("Sneaker", "sneakers", "Women", "fashion", "Clothing › Women › Shoes", _SOLES, _SHOE, _FEET, (25, 90)),
    _Kind("Boot", "boots", "Men", "fashion", "Clothing › Men › Shoes", _SOLES, _SHOE, _FEET, (35, 120)),
    _Kind("Sandal", "sandals", "Women", "fashion", "Clothing › Women › Shoes", _SOLES, _SHOE, _FEET, (14, 48)),
    _Kind("Blanket", "blankets", "Bed", "garden", "Home › Bedding › Blankets", _CLOTH, _HOME, _BEDS, (18, 60)),
    _Kind("Pillow", "pillows", "Bed", "garden", "Home › Bedding › Pillows", _CLOTH, _HOME, _BEDS, (10, 38)),
    _Kind("Curtain", "curtains", "Window", "garden", "Home › Window › Curtains", _CLOTH, _HOME, _WIDTHS, (14, 52)),
    _Kind("Table", "tables", "Kitchen", "garden", "Home › Furniture › Tables", _TIMBER, _WOOD, _WIDTHS, (60, 240)),
    _Kind("Rack", "racks", "Office", "garden", "Home › Furniture › Racks", _TIMBER, _WOOD, _WIDTHS, (25, 110)),
    _Kind("Chair", "chairs", "Office", "garden", "Home › Furniture › Chairs", _TIMBER, _WOOD, _PACKS, (40, 180)),
    _Kind("Tea", "tea", "Drink", "grocery", "Food › Drinks › Tea", ("mint", "ginger", "lemon"), _FOOD, _PACKS,
          (6, 28), coloured=False),
    _Kind("Cookie", "cookies", "Snack", "grocery", "Food › Snacks › Cookies", ("oat", "cocoa", "almond"), _FOOD,
          _PACKS, (5, 25), coloured=False),
    _Kind("Shampoo", "shampoo", "Hair", "beauty", "Beauty › Hair › Shampoo", ("mint", "honey", "coconut"), _CARE,
          _VOLUMES, (7, 32), coloured=False),
    _Kind("Cream", "creams", "Skin", "beauty", "Beauty › Skin › Creams", ("honey", "rose", "coconut"), _CARE,
          _VOLUMES, (8, 40), coloured=False),
    _Kind("Cable", "cables", "Phone", "electronics", "Electronics › Phone › Cables", _SHELL, _TECH, _LENGTHS, (5, 30)),
    _Kind("Speaker", "speakers", "Music", "electronics", "Electronics › Music › Speakers", _SHELL, _TECH, _PACKS,
          (20, 130)),
    _Kind("Lamp", "lamps", "Desk", "electronics", "Electronics › Light › Lamps", _SHELL, _TECH, _PACKS, (12, 75)),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Builtin:
    """The source of the built-in catalogue, for `Catalogue.open`.

    Attributes:
      num_products: how many; the first n of a larger catalogue are those of a smaller one.
      seed: of what they are.

    Raises:
      ValueError: `num_products` is below 1, or `seed` below 0.
    """

    num_products: int = 400
    seed: int = 0
    name = "builtin"

    def __post_init__(self):
        if self.num_products < 1:
            raise ValueError(f"num_products must be at least 1, got {self.num_products!r}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed!r}")

    def key(self) -> dict[str, object]:
        """Version of the generator, seed and size."""
        return {"version": VERSION, "seed": self.seed, "num_products": self.num_products}

    def products(self, progress: Callable[[float], None] = lambda _: None) -> Iterator[Product]:
        """The products in their order."""
        for number, records in enumerate(self.records()):
            progress(number / self.num_products)
            yield make_product(*records)

    def records(self) -> Iterator[tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]] | None, list[str]]]:
        """For each product its records in the official schema: item, attributes, human instructions, title's nouns."""
        for number in range(self.num_products):
            # Only random() of this class is the same in every version of Python, so that all draws come from it.
            yield _records(number, random.Random(self.seed * 1_000_003 + number).random)

    def write_official_files(self, folder: pathlib.Path) -> None:
        """Writes the four files that `find_official_files` reads."""
        items, attributes, humans, nouns = [], {}, {}, {}
        for item, entry, human, title_nouns in self.records():
            items.append(item)
            attributes[item["asin"]] = entry
            nouns[item["asin"]] = title_nouns
            if human:
                humans[item["asin"]] = human
        contents = {"items_shuffle": items, "items_ins_v2": attributes, "items_human_ins": humans, "title_nouns": nouns}
        for name, content in contents.items():
            (folder / f"{name}.json").write_text(json.dumps(content, indent=1), encoding="utf-8")


def _records(number: int, draw: Callable[[], float]):
    kind = _one_of(_KINDS, draw)
    brand, material = _one_of(_BRANDS, draw), _one_of(kind.materials, draw)
    attributes = _some_of(kind.attributes, 3 + int(draw() * 2), draw)
    options = {}
    if kind.coloured:
        options["Color"] = _in_order(_COLOURS, _some_of(_COLOURS, 2 + int(draw() * 3), draw))
    name, sizes = kind.sizes
    options[name.capitalize()] = _in_order(sizes, _some_of(sizes, 2 + int(draw() * (len(sizes) - 1)), draw))
    asin = f"B{number:04d}"
    item = {
        "asin": asin,
        "name": f"{brand} {attributes[0].title()} {material.title()} {kind.name} for {kind.use}",
        "full_description": f"A {material} {kind.name.lower()} by {brand}.",
        "small_description": [f"{attribute.capitalize()}." for attribute in attributes[1:]],
        "customization_options": {name: [{"value": value} for value in values] for name, values in options.items()},
        "pricing": _pricing(kind.prices, draw),
        "query": kind.shelf,
        "category": kind.category,
        "product_category": kind.path,
        "images": [],
        "average_rating": "",
        "page": 1,
    }
    asked = attributes[: 1 + int(draw() * min(3, len(attributes)))]
    entry: dict[str, Any] = {"attributes": [*attributes, material]}
    # Some products are only there to compete.
    if draw() < 0.85:
        wanted = [*asked, material] if draw() < 0.5 else asked
        entry |= {"instruction": f"Find me {', '.join(wanted)} {kind.shelf}", "instruction_attributes": wanted}
    human = [_human(kind, asked, options, draw)] if draw() < 0.4 else None
    nouns = [brand, material, kind.name, kind.use]
    return item, entry, human, [noun.lower() for noun in nouns]


def _human(kind: _Kind, asked: list[str], options: dict[str, list[str]], draw: Callable[[], float]) -> dict[str, Any]:
    """A goal in a person's words, with one value of each option."""
    chosen = [_one_of(values, draw) for values in options.values()]
    beginning = _one_of(("i want", "i need", "i am looking for", "can you find"), draw)
    text = f"{beginning} {kind.shelf} that are {' and '.join(asked)}, in {' and '.join(chosen)}."
    return {"instruction": text, "instruction_attributes": asked, "instruction_options": chosen}


def _pricing(prices: tuple[int, int], draw: Callable[[], float]) -> str:
    low, high = prices
    # Squared, so that cheap ones are more frequent, as in shops.
    dollars = low + int((high - low) * draw() ** 2)
    if draw() < 0.8:
        return f"${dollars}.99"
    return f"${dollars}.99 - ${dollars + 1 + int(dollars * draw() / 2)}.99"


def _one_of(values, draw: Callable[[], float]):
    return values[int(draw() * len(values))]


def _some_of(values: tuple[str, ...], count: int, draw: Callable[[], float]) -> list[str]:
    """`count` different ones, in the order drawn."""
    left = list(values)
    return [left.pop(int(draw() * len(left))) for _ in range(count)]


def _in_order(values: tuple[str, ...], chosen: list[str]) -> list[str]:
    return [value for value in values if value in chosen]

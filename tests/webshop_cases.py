"""A shop of a few products that a person can overlook, for tests of the environment's parts."""

from envs.webshop.product import HumanInstruction, Product

SHIRT = Product(
    asin="B00000SHRT",
    title="Acme Cotton Shirt",
    description="A shirt.\xa0Machine wash.",
    bullets=("Soft cotton ", ""),
    price_label="$11.07",
    prices=(11.07,),
    options={"color": ("light blue", "2005black", 'navy "x"'), "size": ("small", "large")},
    attributes=("long sleeve", "classic fit"),
    query="men's shirts",
    category="fashion",
    product_category="Clothing › Men › Shirts",
    instruction="Find me long sleeve men's shirts with classic fit",
    instruction_attributes=("long sleeve", "classic fit"),
    human_instructions=(
        HumanInstruction("i want a blue shirt.", ("long sleeve",), ("blue", "large")),
        HumanInstruction("no attributes named", (), ()),
        HumanInstruction("something soft..", ("soft",), ()),
    ),
    title_nouns=("acme", "cotton", "shirt"),
)
TEE = Product(
    asin="B00000TEE1",
    title="Summer tee",
    price_label="$3.78 to $11.38",
    prices=(3.78, 11.38),
    options={"size": ("small", "buy now"), "fit": ("small", "slim")},
    attributes=("short sleeve",),
    query="men's shirts",
    category="fashion",
    product_category="Clothing › Men › Tees",
    instruction="Find me short sleeve men's shirts",
    instruction_attributes=("short sleeve",),
    title_nouns=("summer", "tee"),
)
LAMP = Product(
    asin="B00000LAMP",
    title="Desk lamp shirt",
    bullets=("Bright", "USB [5 V]"),
    price_label="$999.5",
    prices=(999.5,),
    attributes=("energy saving",),
    query="lamps",
    category="garden",
    product_category="Home › Lighting",
    instruction="Find me energy saving lamps",
    instruction_attributes=("energy saving",),
    title_nouns=("desk", "lamp", "shirt"),
)
PLAIN = Product(asin="B00000NONE", title="Nothing in particular", title_nouns=("nothing",))


class Shelf:
    """A catalogue of given products; a search finds those whose titles hold its words, the most words first.

    Words count without an s at their end.
    """

    def __init__(self, *products: Product):
        self.products = products or (SHIRT, TEE, LAMP, PLAIN)

    def __len__(self) -> int:
        return len(self.products)

    def product(self, index: int) -> Product:
        return self.products[index]

    def index(self, asin: str) -> int:
        return [product.asin for product in self.products].index(asin.upper())

    def search(self, text: str) -> list[int]:
        words = _words(text)
        hits = [len(words & _words(product.title)) for product in self.products]
        return sorted((index for index, hit in enumerate(hits) if hit), key=lambda index: -hits[index])[:50]


def _words(text: str) -> set[str]:
    return {word.rstrip("s") for word in text.lower().split()}


def many(number: int) -> Shelf:
    """A shop of `number` products called "thing", each with one attribute, two options and a goal."""
    return Shelf(
        *(
            Product(
                asin=f"B{index:09d}",
                title=f"thing {index}",
                prices=(5.0,),
                options={"size": tuple(f"s{value}" for value in range(1 + index % 3))},
                attributes=("good",),
                instruction="Find me good things",
                instruction_attributes=("good",),
                title_nouns=("thing",),
            )
            for index in range(number)
        )
    )

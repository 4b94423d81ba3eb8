"""The pages of the shop as the original shows them in text, and what can be clicked on each.

A page is a tuple of parts in reading order. The original makes web pages and strips their tags; two marks of that stay
visible and are kept: a text of nothing but white space is a blank, or is left out if it holds a line feed, and the page
of features puts a blank before each.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from envs.webshop.product import Product

TEXT, BUTTON, LINK, OPTION = "text", "button", "link", "option"

SEARCH, BACK, PREVIOUS, NEXT, BUY = "Search", "Back to Search", "< Prev", "Next >", "Buy Now"
SUB_PAGES = ("Description", "Features", "Reviews", "Attributes")

# What the parser of the web pages takes for white space; a no-break space is not.
_HTML_SPACE = " \n\t\f\r"


class Part(NamedTuple):
    """A piece of a page: its kind (text, button, link to a product, option) and what it says."""

    kind: str
    text: str


def search_page(instruction: str) -> tuple[Part, ...]:
    """Where every episode begins."""
    return _page([(TEXT, "WebShop"), (TEXT, "Instruction: "), (TEXT, instruction), (BUTTON, SEARCH)])


def results_page(instruction: str, products: Iterable[Product], *, page: int, total: int) -> tuple[Part, ...]:
    """One page of what a search found.

    Args:
      instruction: the goal's text.
      products: on this page.
      page: its number, from 1; the last page has a button to the next as well.
      total: how many products were found.
    """
    parts = [*_head(instruction), (TEXT, f"Page {page} (Total results: {total})")]
    parts += [(BUTTON, PREVIOUS)] if page > 1 else []
    parts.append((BUTTON, NEXT))
    for product in products:
        parts += [(LINK, product.asin), (TEXT, product.title), (TEXT, product.price_label)]
    return _page(parts)


def item_page(instruction: str, product: Product, *, show_attributes: bool = False) -> tuple[Part, ...]:
    """A product with its options."""
    parts = [*_head(instruction), (BUTTON, PREVIOUS)]
    for name, values in product.options.items():
        parts += [(TEXT, name), *((OPTION, value) for value in values)]
    parts += [(TEXT, product.title), (TEXT, f"Price: {product.price_label}"), (TEXT, "Rating: N.A.")]
    parts += [(BUTTON, name) for name in SUB_PAGES[: 4 if show_attributes else 3]]
    return _page([*parts, (BUTTON, BUY)])


def sub_page(instruction: str, product: Product, name: str) -> tuple[Part, ...]:
    """More about a product.

    Args:
      instruction: the goal's text.
      product: shown.
      name: one of `SUB_PAGES`. No product has reviews.
    """
    parts = [*_head(instruction), (BUTTON, PREVIOUS)]
    if name == "Description":
        parts.append((TEXT, product.description))
    elif name == "Features":
        parts += [(TEXT, f" {bullet}") for bullet in product.bullets]
    elif name == "Attributes":
        parts += [(TEXT, f" {attribute}") for attribute in product.attributes]
        parts += [(TEXT, text) for text in (product.category, product.query, product.product_category)]
    return _page(parts)


def done_page(asin: str, options: Mapping[str, str], reward: float) -> tuple[Part, ...]:
    """After buying; its blank fields belong to the original's survey."""
    chosen = json.dumps(dict(options), sort_keys=True)
    for character in "<>&'":
        chosen = chosen.replace(character, f"\\u{ord(character):04x}")
    texts = ["Thank you for shopping with us!", "Your code: ", "None", " (Paste it in your MTurk interface.)"]
    texts += ["Purchased", "asin", asin, "options", chosen, "attrs", "None", "category", "None", "query", "None"]
    texts += ["product category", "None", "Target", "asin", "options", "attrs", "price upper", "instuction text"]
    texts += ["category", "product category", "query", "Goal ", "None", "Reward", "Your score (min 0.0, max 1.0)"]
    return _page([(TEXT, text) for text in [*texts, str(reward), "Reward Details ", "None"]])


def as_text(page: Sequence[Part]) -> str:
    """The observation `text`: all texts, stripped, with separators between them."""
    return " [SEP] ".join(part.text.strip() for part in page)


def as_rich_text(page: Sequence[Part], *, address: str = "", visited: Collection[str] = ()) -> str:
    """The observation `text_rich`: one text a line, with what can be clicked marked.

    Args:
      page: to be shown.
      address: the end of the page's address, see `item_address`; an option that stands in it in quotes counts as
        clicked.
      visited: asins of products that were looked at.
    """
    lines, clicked = [], []
    for kind, text in page:
        if kind == BUTTON:
            lines.append(f"[button] {text} [button_]")
        elif kind == LINK:
            mark = "clicked button" if text in visited else "button"
            lines.append(f"\n[{mark}] {text} [{mark}_]")
        elif kind == OPTION:
            mark = "clicked button" if f'"{text}"' in address else "button"
            lines.append(f"  [{mark}] {text} [{mark}_]")
            if mark != "button":
                clicked.append(f"You have clicked {text}.")
        else:
            lines.append(text)
    return "".join(f"{line}\n" for line in [*reversed(clicked), *lines])


def item_address(keywords: str, page: int, options: Mapping[str, str]) -> str:
    """The end of the address of an item's page.

    The original tells by it which options are chosen. Hence one whose JSON is not its own text (quotes, letters
    outside ASCII) never looks chosen, and a name in the search's quotes always does.
    """
    return f"{keywords.replace(' ', '+')}/{page}/{json.dumps(dict(options))}"


def clickables(page: Sequence[Part]) -> tuple[str, ...]:
    """What can be named in a click, lower case, each once: buttons and products in order, then options.

    The button of the search page is among them, although only `search[...]` searches.
    """
    names = dict.fromkeys(part.text.lower() for part in page if part.kind in (BUTTON, LINK))
    return tuple(names | dict.fromkeys(part.text for part in page if part.kind == OPTION))


def _head(instruction: str) -> list[tuple[str, str]]:
    return [(TEXT, "Instruction:"), (TEXT, instruction), (BUTTON, BACK)]


def _page(parts: Iterable[tuple[str, str]]) -> tuple[Part, ...]:
    page = []
    for kind, text in parts:
        if text.strip(_HTML_SPACE):
            page.append(Part(kind, text))
        elif text and "\n" not in text:
            page.append(Part(kind, " "))
    return tuple(page)

"""Turns the records that the official files hold about one product into a `Product`, as the original does."""

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from envs.webshop.nouns import title_nouns
from envs.webshop.product import HumanInstruction, Product

# The original shows and compares these where a source says nothing.
_NO_PRICE = 100.0
_NO_ATTRIBUTES = ("DUMMY_ATTR",)


def make_product(
    record: Any,
    attributes: Any = None,
    human: Any = None,
    nouns: Any = None,
    *,
    where: str = "record",
    places: Mapping[str, str] | None = None,
) -> Product:
    """A product from what JSON files say of it.

    Args:
      record: of the items.
      attributes: its entry in the file of attributes and instructions; None where it has none.
      human: its entry in the file of human instructions; None where it has none.
      nouns: the nouns of its title; None has them guessed.
      where: names the record in messages.
      places: name the entries in messages: "attributes", "human", "nouns".

    Raises:
      ValueError: a field is absent or of another kind; one line that names it.
    """
    places = places or {role: f"{where}: {role}" for role in ("attributes", "human", "nouns")}
    fields = _product(where, record) | _attributes(places["attributes"], attributes)
    fields["human_instructions"] = _human(places["human"], human)
    title = fields["title"]
    fields["title_nouns"] = title_nouns(title) if nouns is None else _texts(places["nouns"], nouns, "the entry")
    return Product(**fields)


def _product(where: str, record: Any) -> dict[str, Any]:
    """The fields that stand in the record of items."""
    bullets = field(where, record, "small_description", (list, str))
    if isinstance(bullets, str):
        bullets = [bullets]
    label, prices = _prices(where, record.get("pricing"))
    return {
        "asin": record["asin"],
        "title": field(where, record, "name", str),
        "description": field(where, record, "full_description", str),
        "bullets": _texts(where, bullets or [""], "small_description"),
        "price_label": label,
        "prices": prices,
        "options": _options(where, record.get("customization_options")),
        "query": field(where, record, "query", str).lower().strip(),
        "category": field(where, record, "category", str),
        "product_category": field(where, record, "product_category", str),
    }


def _prices(where: str, pricing: Any) -> tuple[str, tuple[float, ...]]:
    """The label of pages and the numbers of "$11.07" or "$3.78 - $11.38"."""
    if not pricing:
        return f"${_NO_PRICE}", (_NO_PRICE,)
    try:
        prices = tuple(float(Decimal(re.sub(r"[^\d.]", "", price))) for price in pricing.split("$")[1:])
    except (AttributeError, InvalidOperation):
        prices = ()
    if not prices:
        raise ValueError(f"{where}: pricing {pricing!r} is not like '$11.07' or '$3.78 - $11.38'")
    if len(prices) == 1:
        return f"${prices[0]}", prices
    return f"${prices[0]} to ${prices[1]}", prices[:2]


def _options(where: str, groups: Any) -> dict[str, tuple[str, ...]]:
    """Names and values in lower case; an option without a list is left out, one named twice keeps its last values."""
    options = {}
    for name, values in _checked(where, groups or {}, "customization_options", dict).items():
        if values is None:
            continue
        texts = []
        for entry in _checked(where, values, f"option {name!r}", list):
            texts.append(field(f"{where}: option {name!r}", entry, "value", str))
        # The slash would be read as a path by the original's web pages.
        options[name.lower()] = tuple(text.strip().replace("/", " | ").lower() for text in texts)
    return options


def _attributes(where: str, entry: Any) -> dict[str, Any]:
    """The fields that stand in the entry of attributes."""
    entry = {} if entry is None else _checked(where, entry, "the entry", dict)
    instruction = entry.get("instruction")
    if instruction is not None:
        _checked(where, instruction, "instruction", str)
    known = entry.get("attributes")
    return {
        "attributes": _NO_ATTRIBUTES if known is None else _texts(where, known, "attributes"),
        "instruction": instruction,
        "instruction_attributes": _texts(where, entry.get("instruction_attributes") or [], "instruction_attributes"),
    }


def _human(where: str, entries: Any) -> tuple[HumanInstruction, ...]:
    entries = [] if entries is None else _checked(where, entries, "the entry", list)
    return tuple(
        HumanInstruction(
            field(where, entry, "instruction", str),
            _texts(where, field(where, entry, "instruction_attributes", list), "instruction_attributes"),
            _texts(where, field(where, entry, "instruction_options", list), "instruction_options"),
        )
        for entry in entries
    )


def field(where: str, record: Any, name: str, kind: type | tuple[type, ...]) -> Any:
    """A field of a record.

    Raises:
      ValueError: it is absent or of another kind, or the record is no object; one line that begins with `where`.
    """
    if not isinstance(record, dict):
        raise ValueError(f"{where} is {_short(record)}, expected an object with the field {name!r}")
    if name not in record:
        raise ValueError(f"{where} has no field {name!r}")
    return _checked(where, record[name], name, kind)


def _checked(where: str, value: Any, name: str, kind: type | tuple[type, ...]) -> Any:
    if not isinstance(value, kind):
        kinds = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
        raise ValueError(f"{where}: {name} is {_short(value)}, expected {kinds}")
    return value


def _texts(where: str, values: Any, name: str) -> tuple[str, ...]:
    return tuple(_checked(where, value, f"an entry of {name}", str) for value in _checked(where, values, name, list))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

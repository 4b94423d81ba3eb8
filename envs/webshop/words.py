"""Words and phrases of the built-in catalogue's shop: what a tiny model's tokenizer should hold as whole tokens."""

import re

from envs.webshop import pages
from envs.webshop.builtin import Builtin

_WORD = re.compile(r"[a-z]+(?:-[a-z]+)*|\d+|\.\d\d\b")
# Every word occurs many times in a catalogue of this size.
_PRODUCTS = 1000
# Of actions and pages, and what instructions add to a product's own words.
_FRAME = ("search", "click", "with", "find me", "price lower than", ", and", ".00", "dollars", "$", "[")


def words() -> tuple[str, ...]:
    """Everything that compact prompts and their answers hold, in lower case and alphabetical order.

    Buttons, attributes and values of options are a phrase each, so that comparing two of them is comparing two tokens.
    """
    buttons = (pages.SEARCH, pages.BACK, pages.NEXT, pages.PREVIOUS, pages.BUY, *pages.SUB_PAGES)
    found = {*_FRAME, *(button.lower() for button in buttons)}
    for item, entry, humans, _ in Builtin(_PRODUCTS).records():
        found.update(entry["attributes"])
        texts = [item["name"], item["full_description"], item["pricing"], entry.get("instruction", "")]
        texts += (human["instruction"] for human in humans or ())
        for name, values in item["customization_options"].items():
            texts.append(name)
            found.update(value["value"] for value in values)
        for text in texts:
            found.update(_WORD.findall(text.lower()))
    return tuple(sorted(found))

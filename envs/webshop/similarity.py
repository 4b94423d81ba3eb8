"""How alike two texts are to the shop's reward: thefuzz's token_set_ratio, and its normalisation of colours."""

from typing import Any

from rapidfuzz import fuzz, utils

# thefuzz drops these characters, although it calls what is left ASCII.
_LATIN_1 = dict.fromkeys(range(0x80, 0x100))

# The words that the original (Princeton's WebShop, MIT licence) knows as colours, in its order. The first that stands
# anywhere in a text replaces it: a "standard" size becomes "tan".
_COLOUR_TEXT = """
alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel
camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry
cream crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey
heather indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight
mint mocha multicolor mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow
red rose royal rust sand sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal
tiger turquoise violet walnut wheat white wine yellow
"""
COLOURS = tuple(_COLOUR_TEXT.split())

_MATCH_ABOVE = 85


def token_set_ratio(left: Any, right: Any) -> int:
    """`thefuzz.fuzz.token_set_ratio`: 0 to 100, by the words that two texts share and the letters of the rest.

    Anything but text counts as its `str`.
    """
    return round(fuzz.token_set_ratio(_words(left), _words(right)))


def matches(left: Any, right: Any) -> bool:
    """Whether the reward takes two texts for the same thing."""
    return token_set_ratio(left, right) > _MATCH_ABOVE


def normalised_colour(value: Any) -> Any:
    """The first colour word in a text, or the text; of a tuple, the first that equals an entry, or the tuple."""
    return next((colour for colour in COLOURS if colour in value), value)


def _words(text: Any) -> str:
    return utils.default_process(str(text).translate(_LATIN_1))

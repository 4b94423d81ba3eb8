"""Guesses the nouns of a product's title, for catalogues that come without a list of them.

The original has a tagger (spaCy) find them. Titles are chains of names and nouns, so that what is no noun is nearly
always a function word, a number or one of a few adjectives. Lists from the tagger go into the file `nouns` of
`official.OfficialFiles` and are taken before this.
"""

import re

_WORD = re.compile(r"[^\W\d_][^\W_]*")
_POSSESSIVE = re.compile(r"['’]s\b")
# Function words, and what titles hold of adjectives, verbs and adverbs that the tagger calls so more often than not.
_NO_NOUN_TEXT = """
a about across after all also an and any are around as at be because been before below between both but by can
compatible designed each etc every for from fully go has have he her his how i if imported in included includes
including inside into is it its listed made make makes me more most my no nor not of off on one only onto or our
out over own per plus pressed removes running she so some such suitable than that the their them then these they
this those three through to too two under up upon us very via was we were what when which while who will with
within without you your four five six seven eight nine ten
comfortable damaged discontinued elegant empty fit friendly large long original regular shaped various
"""
_NO_NOUNS = frozenset(_NO_NOUN_TEXT.split())


def title_nouns(title: str) -> tuple[str, ...]:
    """The words of a title that are likely nouns, lower case, in order, with repeats."""
    words = _WORD.findall(_POSSESSIVE.sub("", title.lower()))
    return tuple(word for word in words if len(word) > 1 and word not in _NO_NOUNS)

"""Text to search terms, as the English analyzer of Anserini (Lucene 9) makes them.

Words by the rules of Unicode Standard Annex 29 with emoji as words of their own; a possessive 's goes; lower case; stop
words go; Porter's stems. Lucene's tables are those of Unicode 12.1; where later versions say otherwise of a character
that 12.1 has, 12.1 is spelled out here, so that terms do not change with the version of Python or of a package.

Two differences from Lucene are known. Characters newer than 12.1 are no letters to it; here they are what `regex` takes
them for. A skin colour, or a mark of a script such as Thai, that stands right after underscores is a word to it; here
it is none.
"""

import functools
import re
from collections.abc import Callable

import regex

from envs.webshop.porter import stem

# Lucene's list for English.
STOP_WORDS = frozenset(
    [
        *("a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "no", "not"),
        *("of", "on", "or", "such", "that", "the", "their", "then", "there", "these", "they", "this", "to", "was"),
        *("will", "with"),
    ]
)
_LONGEST_TOKEN = 255  # longer ones are cut into pieces
_LONGEST_CACHED = 64  # keeps the memory of a cache bounded
_BETWEEN_PIECES = re.compile(r"[^\S\u202f]+")  # white space, without the narrow no-break space
_POSSESSIVES = ("'s", "’s", "＇s")

# Between letters, between digits, and joining anything.
_MID_LETTER = r":\xb7\u0387\u05f4\u2027\ufe13\ufe55\uff1a"
_MID_LETTER_OR_NUMBER = r".\u2018\u2019\u2024\ufe52\uff07\uff0e'"
_MID_NUMBER = r",;\u037e\u0589\u060c\u060d\u066c\u07f8\u2044\ufe10\ufe14\ufe50\ufe54\uff0c\uff1b"
_JOINER = r"_\u202f\u203f\u2040\u2054\ufe33\ufe34\ufe4d-\ufe4f\uff3f"

# Signs that are letters, marks over several letters or digits that are neither, a digit of a script without blanks.
_LETTER_SIGNS = (
    r"\u02c2-\u02c5\u02d2-\u02d7\u02de\u02df\u02ed\u02ef-\u02ff\u055b\u055c\u055e\u05f3\ua720\ua721\ua789\ua78a\uab5b"
)
_FORMAT_MARKS = r"\u0600-\u0605\u06dd\u070f\u08e2\U000110bd\U000110cd"
_COMPLEX_DIGIT = r"\u19da"
_HAN_MARK = r"\U00016fe2"  # punctuation

# Extended_Pictographic; later versions left out the symbols that are no emoji, such as stars.
_PICTOGRAPHS = (
    r"\xa9\xae\u203c\u2049\u2122\u2139\u2194-\u2199\u21a9\u21aa\u231a\u231b\u2328\u2388\u23cf\u23e9-\u23f3\u23f8-\u23fa"
    r"\u24c2\u25aa\u25ab\u25b6\u25c0\u25fb-\u25fe\u2600-\u2605\u2607-\u2612\u2614-\u2685\u2690-\u2705\u2708-\u2712\u2714"
    r"\u2716\u271d\u2721\u2728\u2733\u2734\u2744\u2747\u274c\u274e\u2753-\u2755\u2757\u2763-\u2767\u2795-\u2797\u27a1"
    r"\u27b0\u27bf\u2934\u2935\u2b05-\u2b07\u2b1b\u2b1c\u2b50\u2b55\u3030\u303d\u3297\u3299\U0001f000-\U0001f0ff"
    r"\U0001f10d-\U0001f10f\U0001f12f\U0001f16c-\U0001f171\U0001f17e\U0001f17f\U0001f18e\U0001f191-\U0001f19a"
    r"\U0001f1ad-\U0001f1e5\U0001f201-\U0001f20f\U0001f21a\U0001f22f\U0001f232-\U0001f23a\U0001f23c-\U0001f23f"
    r"\U0001f249-\U0001f3fa\U0001f400-\U0001f53d\U0001f546-\U0001f64f\U0001f680-\U0001f6ff\U0001f774-\U0001f77f"
    r"\U0001f7d5-\U0001f7ff\U0001f80c-\U0001f80f\U0001f848-\U0001f84f\U0001f85a-\U0001f85f\U0001f888-\U0001f88f"
    r"\U0001f8ae-\U0001f8ff\U0001f90c-\U0001f93a\U0001f93c-\U0001f945\U0001f947-\U0001fffd"
)

# Words of the characters of ASCII alone, in group 1; joiners without a word outside it. Quantifiers are possessive
# where what follows cannot begin with what they take, so that no text costs more than its length.
_ASCII_RUN = r"(?:[0-9]++(?:(?:_*+|[,;.'])[0-9])*+|[A-Za-z]++(?:(?:_*+|[:.'])[A-Za-z])*+)++"
_ASCII_WORDS = re.compile(rf"(_*+{_ASCII_RUN}(?:_++{_ASCII_RUN})*+_*+)|_++")


@functools.cache
def _any_words() -> regex.Pattern:
    """Words of any characters, as above; made on first use, for most texts never need it."""
    extending = rf"[\p{{WB=Format}}\p{{WB=Extend}}\p{{WB=ZWJ}}{_FORMAT_MARKS}]"
    extend = rf"{extending}*+"
    complex_context = rf"[\p{{LB=SA}}{_COMPLEX_DIGIT}]"
    hebrew = rf"(?:\p{{WB=Hebrew_Letter}}{extend})"
    quoted = rf"{hebrew}(?:'{extend}|\"{extend}{hebrew})"
    others = rf"[\p{{Ideographic}}\p{{WB=Katakana}}{complex_context}\p{{Script=Hiragana}}{extending}]"
    letters = rf"[[\p{{Alphabetic}}{_LETTER_SIGNS}]--{others}]"
    letter = rf"(?:{letters}{extend})"
    digits = rf"[[\p{{WB=Numeric}}\uff10-\uff19]--[{_FORMAT_MARKS}{_COMPLEX_DIGIT}]]"
    digit = rf"(?:{digits}{extend})"
    katakana = rf"(?:\p{{WB=Katakana}}{extend})"
    joiner = rf"(?:[{_JOINER}]{extend})"
    mid_letter = rf"(?:[{_MID_LETTER}{_MID_LETTER_OR_NUMBER}]{extend})"
    mid_digit = rf"(?:[{_MID_NUMBER}{_MID_LETTER_OR_NUMBER}]{extend})"
    run = (
        rf"(?:{katakana}(?:{joiner}*+{katakana})*+"
        rf"|(?:{quoted}"
        rf"|{digit}(?:(?:{joiner}*+|{mid_digit}){digit})*+"
        rf"|{letter}(?:(?:{joiner}*+(?!{quoted})|{mid_letter}){letter})*+)++)"
    )
    # Presentation selectors end an emoji's own extension.
    in_emoji = rf"[{extending}--[\ufe0e\ufe0f]]*+"
    modifier = r"[\U0001f3fb-\U0001f3ff]"
    pictograph = rf"(?:(?<!\u200d)\u200d++)?[{_PICTOGRAPHS}]"
    emoji = rf"(?:{pictograph}{in_emoji}(?:{modifier}{in_emoji}|\ufe0f?)|{modifier}{in_emoji})"
    words = [
        rf"{joiner}*+{run}(?:{joiner}++{run})*+{joiner}*+",
        rf"{emoji}(?:[\U000e0020-\U000e007e]++\U000e007f|(?:(?:(?<=\u200d)|\u200d){emoji})*+)",
        rf"[#*][{extending}--[\ufe0e\ufe0f\u20e3]]*+\ufe0f?\u20e3{in_emoji}",
        rf"(?:\p{{WB=Regional_Indicator}}{extend}){{2}}",
        rf"(?:{complex_context}{extend})++",
        rf"[[\p{{Script=Han}}\p{{Script=Hiragana}}]--{_HAN_MARK}]{extend}",
    ]
    return regex.compile(rf"(?V1)({'|'.join(words)})|{joiner}++")


def words(text: str) -> list[str]:
    """The words of a text, unchanged, in order; the longest of them cut into pieces."""
    found = (_ASCII_WORDS if text.isascii() else _any_words()).findall(text)
    return [
        word[start : start + _LONGEST_TOKEN] for word in found if word for start in range(0, len(word), _LONGEST_TOKEN)
    ]


def _terms(text: str) -> tuple[str, ...]:
    terms = []
    for word in words(text):
        if word.endswith(_POSSESSIVES):
            word = word[:-2]
        if word and word not in STOP_WORDS:
            terms.append(stem(word))
    return tuple(terms)


def _pieces(text: str) -> list[str]:
    return text.split() if text.isascii() else _BETWEEN_PIECES.split(text)


def make_analyzer(cache_size: int = 1 << 14) -> Callable[[str], list[str]]:
    """A function from a text to its search terms, in order, with repeats.

    But for the narrow no-break space no word reaches across white space, and texts repeat their words: the terms of the
    last `cache_size` pieces between white space are kept.
    """
    cached = functools.lru_cache(cache_size)(_terms)

    def analyze(text: str) -> list[str]:
        terms: list[str] = []
        for piece in _pieces(text.lower()):
            terms += cached(piece) if len(piece) <= _LONGEST_CACHED else _terms(piece)
        return terms

    return analyze

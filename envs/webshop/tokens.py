"""Text to search terms, as the English analyzer of Anserini (Lucene 9) makes them.

Words by the rules of Unicode Standard Annex 29 with emoji as words of their own; a possessive 's goes; lower case; stop
words go; Porter's stems. What Lucene fixes to Unicode 9 (letters) and 14 (emoji) is spelled out here where later
versions differ, so that terms do not change with the version of Python or of a package.
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
_POSSESSIVES = ("'s", "’s", "＇s")

# Between letters, between digits, and joining anything. Unicode 9.
_MID_LETTER = r":\xb7\u0387\u05f4\u2027\ufe13\ufe55\uff1a"
_MID_LETTER_OR_NUMBER = r".\u2018\u2019\u2024\ufe52\uff07\uff0e'"
_MID_NUMBER = r",;\u037e\u0589\u060c\u060d\u066c\u07f8\u2044\ufe10\ufe14\ufe50\ufe54\uff0c\uff1b"
_JOINER = r"_\u203f\u2040\u2054\ufe33\ufe34\ufe4d-\ufe4f\uff3f"

# Extended_Pictographic of Unicode 12 to 15; later versions left out the symbols that are no emoji, such as stars.
_PICTOGRAPHS = (
    r"\xa9\xae\u203c\u2049\u2122\u2139\u2194-\u2199\u21a9\u21aa\u231a\u231b\u2328\u2388\u23cf\u23e9-\u23f3\u23f8-\u23fa"
    r"\u24c2\u25aa\u25ab\u25b6\u25c0\u25fb-\u25fe\u2600-\u2605\u2607-\u2612\u2614-\u2685\u2690-\u2705\u2708-\u2712\u2714"
    r"\u2716\u271d\u2721\u2728\u2733\u2734\u2744\u2747\u274c\u274e\u2753-\u2755\u2757\u2763-\u2767\u2795-\u2797\u27a1"
    r"\u27b0\u27bf\u2934\u2935\u2b05-\u2b07\u2b1b\u2b1c\u2b50\u2b55\u3030\u303d\u3297\u3299\U0001f000-\U0001f0ff"
    r"\U0001f10d-\U0001f10f\U0001f12f\U0001f16c-\U0001f171\U0001f17e\U0001f17f\U0001f18e\U0001f191-\U0001f19a"
    r"\U0001f1ad-\U0001f1e5\U0001f201-\U0001f20f\U0001f21a\U0001f22f\U0001f232-\U0001f23a\U0001f23c-\U0001f23f"
    r"\U0001f249-\U0001f3fa\U0001f400-\U0001f53d\U0001f546-\U0001f64f\U0001f680-\U0001f6ff\U0001f774-\U0001f77f"
    r"\U0001f7d5-\U0001f7ff\U0001f80c-\U0001f80f\U0001f848-\U0001f84f\U0001f85a-\U0001f85f\U0001f888-\U0001f88f"
    r"\U0001f8ae-\U0001f8ff\U0001f90c-\U0001f93a\U0001f93c-\U0001f945\U0001f947-\U0001faff\U0001fc00-\U0001fffd"
)

# Words of the characters of ASCII alone, in group 1; joiners without a word outside it. Quantifiers are possessive
# where what follows cannot begin with what they take, so that no text costs more than its length.
_ASCII_RUN = r"(?:[0-9]++(?:(?:_*+|[,;.'])[0-9])*+|[A-Za-z]++(?:(?:_*+|[:.'])[A-Za-z])*+)++"
_ASCII_WORDS = re.compile(rf"(_*+{_ASCII_RUN}(?:_++{_ASCII_RUN})*+_*+)|_++")


@functools.cache
def _any_words() -> regex.Pattern:
    """Words of any characters, as above; made on first use, for most texts never need it."""
    extend = r"[\p{WB=Format}\p{WB=Extend}\p{WB=ZWJ}]*+"
    hebrew = rf"(?:\p{{WB=Hebrew_Letter}}{extend})"
    letters = r"[[\p{Alphabetic}\u05f3]--[\p{Ideographic}\p{WB=Katakana}\p{LB=SA}\p{Script=Hiragana}\p{WB=Extend}]]"
    letter = rf"(?:{letters}{extend})"
    digit = rf"(?:[\p{{WB=Numeric}}\uff10-\uff19]{extend})"
    katakana = rf"(?:\p{{WB=Katakana}}{extend})"
    joiner = rf"(?:[{_JOINER}]{extend})"
    mid_letter = rf"(?:[{_MID_LETTER}{_MID_LETTER_OR_NUMBER}]{extend})"
    mid_digit = rf"(?:[{_MID_NUMBER}{_MID_LETTER_OR_NUMBER}]{extend})"
    run = (
        rf"(?:{katakana}(?:{joiner}*+{katakana})*+"
        rf"|(?:{hebrew}(?:'{extend}(?!{letter})|\"{extend}{hebrew})"
        rf"|{digit}(?:(?:{joiner}*+|{mid_digit}){digit})*+"
        rf"|{letter}(?:(?:{joiner}*+|{mid_letter}){letter})*+)++)"
    )
    # Presentation selectors end an emoji's own extension.
    in_emoji = r"[[\p{WB=Format}\p{WB=Extend}\p{WB=ZWJ}]--[\ufe0e\ufe0f]]*+"
    modifier = r"[\U0001f3fb-\U0001f3ff]"
    emoji = rf"(?:[{_PICTOGRAPHS}]{in_emoji}(?:{modifier}{in_emoji}|\ufe0f?)|{modifier}{in_emoji})"
    words = [
        rf"{joiner}*+{run}(?:{joiner}++{run})*+{joiner}*+",
        rf"{emoji}(?:[\U000e0020-\U000e007e]++\U000e007f|(?:(?:(?<=\u200d)|\u200d){emoji})*+)",
        rf"[#*]{in_emoji}\ufe0f?\u20e3{extend}",
        rf"(?:\p{{WB=Regional_Indicator}}{extend}){{2}}",
        rf"(?:\p{{LB=SA}}{extend})++",
        rf"[\p{{Script=Han}}\p{{Script=Hiragana}}]{extend}",
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


def make_analyzer(cache_size: int = 1 << 14) -> Callable[[str], list[str]]:
    """A function from a text to its search terms, in order, with repeats.

    No word reaches across white space, and texts repeat their words: the terms of the last `cache_size` pieces between
    white space are kept.
    """
    cached = functools.lru_cache(cache_size)(_terms)

    def analyze(text: str) -> list[str]:
        terms: list[str] = []
        for piece in text.lower().split():
            terms += cached(piece) if len(piece) <= _LONGEST_CACHED else _terms(piece)
        return terms

    return analyze

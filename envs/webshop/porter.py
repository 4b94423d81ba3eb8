"""Porter's stemmer as Lucene has it.

M. F. Porter, "An algorithm for suffix stripping", 1980, with the three departures of the author's own program: words of
one or two letters stay as they are, "bli" becomes "ble" (not only "abli"), and "logi" becomes "log". (Packages that
hold this stemmer take a second and 100 MB to import, for every worker process anew.)
"""

import re

# The form of a word: c for a consonant, v for a vowel; y is a vowel after a consonant.
_VOWELS = frozenset("aeiou")
_MEASURE = re.compile("vc")

_STEP_2 = (
    ("ational", "ate"),
    ("tional", "tion"),
    ("enci", "ence"),
    ("anci", "ance"),
    ("izer", "ize"),
    ("bli", "ble"),
    ("alli", "al"),
    ("entli", "ent"),
    ("eli", "e"),
    ("ousli", "ous"),
    ("ization", "ize"),
    ("ation", "ate"),
    ("ator", "ate"),
    ("alism", "al"),
    ("iveness", "ive"),
    ("fulness", "ful"),
    ("ousness", "ous"),
    ("aliti", "al"),
    ("iviti", "ive"),
    ("biliti", "ble"),
    ("logi", "log"),
)
_STEP_3 = (
    ("icate", "ic"),
    ("ative", ""),
    ("alize", "al"),
    ("iciti", "ic"),
    ("ical", "ic"),
    ("ful", ""),
    ("ness", ""),
)
_STEP_4 = (
    "al",
    "ance",
    "ence",
    "er",
    "ic",
    "able",
    "ible",
    "ant",
    "ement",
    "ment",
    "ent",
    "sion",
    "tion",
    "ou",
    "ism",
    "ate",
    "iti",
    "ous",
    "ive",
    "ize",
)
_SUFFIXES_2, _SUFFIXES_3 = (tuple(suffix for suffix, _ in rules) for rules in (_STEP_2, _STEP_3))


def stem(word: str) -> str:
    """The stem of a word in lower case; letters other than a to z count as consonants."""
    if len(word) <= 2:
        return word
    word = _step_1(word)
    # Most words end in none of them; one look at all is faster than one at each.
    if word.endswith(_SUFFIXES_2):
        word = _replace(word, _STEP_2)
    if word.endswith(_SUFFIXES_3):
        word = _replace(word, _STEP_3)
    if word.endswith(_STEP_4):
        word = _step_4(word)
    return _step_5(word)


def _form(word: str) -> str:
    form = ""
    for letter in word:
        vowel = letter in _VOWELS or (letter == "y" and form.endswith("c"))
        form += "v" if vowel else "c"
    return form


def _measure(word: str) -> int:
    """How many times consonants follow vowels: m in [C](VC)^m[V]."""
    return len(_MEASURE.findall(_form(word)))


def _ends_in_double_consonant(word: str) -> bool:
    return len(word) >= 2 and word[-1] == word[-2] and _form(word)[-1] == "c"


def _ends_short(word: str) -> bool:
    """Whether it ends consonant, vowel, consonant, the last none of w, x and y."""
    return _form(word)[-3:] == "cvc" and word[-1] not in "wxy"


def _step_1(word: str) -> str:
    """Plurals, -ed, -ing, and a final y."""
    if word.endswith(("sses", "ies")):
        word = word[:-2]
    elif word.endswith("s") and not word.endswith("ss"):
        word = word[:-1]
    if word.endswith("eed"):
        if _measure(word[:-3]) > 0:
            word = word[:-1]
    else:
        for suffix in ("ed", "ing"):
            if word.endswith(suffix) and "v" in _form(word[: -len(suffix)]):
                word = _after_removal(word[: -len(suffix)])
                break
    if word.endswith("y") and "v" in _form(word[:-1]):
        word = word[:-1] + "i"
    return word


def _after_removal(word: str) -> str:
    if word.endswith(("at", "bl", "iz")):
        return word + "e"
    if _ends_in_double_consonant(word):
        return word if word[-1] in "lsz" else word[:-1]
    if _measure(word) == 1 and _ends_short(word):
        return word + "e"
    return word


def _replace(word: str, rules: tuple[tuple[str, str], ...]) -> str:
    """Applies the first rule whose suffix fits, where something of measure above 0 is left."""
    for suffix, replacement in rules:
        if word.endswith(suffix):
            rest = word[: -len(suffix)]
            return rest + replacement if _measure(rest) > 0 else word
    return word


def _step_4(word: str) -> str:
    for suffix in _STEP_4:
        if word.endswith(suffix):
            cut = 3 if suffix in ("sion", "tion") else len(suffix)  # s and t stay
            rest = word[:-cut]
            return rest if _measure(rest) > 1 else word
    return word


def _step_5(word: str) -> str:
    """A final e, and ll."""
    if word.endswith("e"):
        measure = _measure(word[:-1])
        if measure > 1 or (measure == 1 and not _ends_short(word[:-1])):
            word = word[:-1]
    if word.endswith("ll") and _measure(word) > 1:
        word = word[:-1]
    return word

"""Search terms are those of Lucene's English analyzer."""

import gzip
import json
import pathlib
import random
import time

import pytest

from envs.webshop.porter import stem
from envs.webshop.tokens import STOP_WORDS, make_analyzer, words
from tests.shared_data import shared_path

GOLDEN = pathlib.Path(__file__).parent / "golden" / "lucene_tokens.json"


def test_terms_of_reference_queries_are_lucenes():
    analyze = make_analyzer()
    path = shared_path("data", "webshop", "lucene_reference_1000.jsonl.gz")
    queries = [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().strip().split("\n")]
    assert len(queries) == 1000
    for query in queries:
        assert analyze(query["query"]) == query["tokens"]


def test_every_character_of_unicode_12_makes_the_words_that_lucene_makes():
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    analyze = make_analyzer(1)
    seen, wrong = 0, []
    for shape, ranges in golden["characters"]:
        for first, last in (pair.split("-") for pair in ranges.split()):
            for character in map(chr, range(int(first, 16), int(last, 16) + 1)):
                lower = character.lower()
                found = [analyze(around.format(lower)) for around in golden["surroundings"]]
                if [[piece.replace(lower, "@") for piece in pieces] for pieces in found] != shape:
                    wrong.append((character, found, shape))
                seen += 1
    assert seen == 137_866 and not wrong


def test_random_texts_make_the_words_that_lucene_makes():
    analyze = make_analyzer()
    texts = json.loads(GOLDEN.read_text(encoding="utf-8"))["texts"]
    assert len(texts) == 1000 and sum(len(tokens) > 1 for _, tokens in texts) > 300
    assert [(text, analyze(text)) for text, _ in texts] == [(text, tokens) for text, tokens in texts]


# From Porter's paper, rule by rule, and the departures of his program.
STEM_TEXT = """
caresses caress ponies poni ties ti caress caress cats cat feed feed agreed agre plastered plaster bled bled
motoring motor sing sing conflated conflat troubled troubl sized size hopping hop tanned tan falling fall hissing hiss
fizzed fizz failing fail filing file happy happi sky sky relational relat conditional condit rational ration
valenci valenc hesitanci hesit digitizer digit conformabli conform radicalli radic differentli differ vileli vile
analogousli analog vietnamization vietnam predication predic operator oper feudalism feudal decisiveness decis
hopefulness hope callousness callous formaliti formal sensitiviti sensit sensibiliti sensibl triplicate triplic
formative form formalize formal electriciti electr electrical electr hopeful hope goodness good revival reviv
allowance allow inference infer airliner airlin gyroscopic gyroscop adjustable adjust defensible defens irritant irrit
replacement replac adjustment adjust dependent depend adoption adopt homologou homolog communism commun activate activ
angulariti angular homologous homolog effective effect bowdlerize bowdler probate probat rate rate cease ceas
controll control roll roll as as is is possibly possibl technology technolog dying dy women women
"""
STEMS = STEM_TEXT.split()


@pytest.mark.parametrize(("word", "expected"), list(zip(STEMS[::2], STEMS[1::2])))
def test_stems(word, expected):
    assert stem(word) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("can't 40.5 3,000 a.b 5oz x:y don’t", ["can't", "40.5", "3,000", "a.b", "5oz", "x:y", "don’t"]),
        ("a.5 1:2 -x- foo_bar __x__ ___ end.", ["a", "5", "1", "2", "x", "foo_bar", "__x__", "end"]),
        ("wi-fi 1/2 10% c++ (red) \"28''\"", ["wi", "fi", "1", "2", "10", "c", "red", "28"]),
        ("★best★ ✔ok ™ ❤️ é", ["★", "best", "★", "✔", "ok", "™", "❤️", "é"]),
        # A family is one word, two flags are two, a skin colour belongs to its hand.
        ("👨‍💼x 🇫🇷🇩🇪 👍🏽👍", ["👨‍💼", "x", "🇫🇷", "🇩🇪", "👍🏽", "👍"]),
        ("漢字 ひらがな カタカナ 한국어", ["漢", "字", "ひ", "ら", "が", "な", "カタカナ", "한국어"]),
        ("สวัสดีครับ a\u0301b №5 ＡＢ１２：３", ["สวัสดีครับ", "a\u0301b", "5", "ＡＢ１２", "３"]),
        ("ab：cd x·y", ["ab：cd", "x·y"]),
        ("אב' ʤש' אב\"ג ד א'_א", ["אב'", "ʤש'", 'אב"ג', "ד", "א'_א"]),
        ("\u200d® \u200d\u200d❤ x\u200d®", ["\u200d®", "\u200d\u200d❤", "x\u200d", "®"]),
        ("10\u202fml #️⃣ 1️⃣ צ'5 ג'", ["10\u202fml", "#️⃣", "1️⃣", "צ'5", "ג'"]),
        ("\ud83d \udc4d a\ud83db", ["a", "b"]),
        ("\0 \ufeff \u200d \u202e", []),
        ("", []),
    ],
)
def test_words(text, expected):
    assert words(text) == expected


def test_ascii_text_has_the_same_words_beside_other_text():
    # The quick pattern for ASCII and the full one are two ways to one answer.
    draws = random.Random(0)
    for _ in range(3000):
        text = "".join(draws.choice("ab1_.,:;'\"-# ") for _ in range(draws.randrange(1, 12)))
        assert words(text) == words(text + " é")[:-1], text


def test_terms_lose_possessives_stop_words_and_cases():
    analyze = make_analyzer()
    assert analyze("The Women's SHOES, for the dog’s o's") == ["women", "shoe", "dog", "o"]
    assert analyze(" ".join(STOP_WORDS)) == []
    assert analyze("'s ’s") == ["s", "s"]
    # No back doors: these are words like any other.
    assert analyze("<r> <a> <c> garden <q> shoes") == ["r", "c", "garden", "q", "shoe"]


def test_long_words_are_cut():
    assert [len(word) for word in words("x" * 600)] == [255, 255, 90]


@pytest.mark.parametrize(
    "piece",
    ["_", "a_", "1,", "é_", "\u200d", "👍\u200d", "a'", "א'", 'א"', "_🏽", "#", "\u20e3", "\u0301", "ก", "'", "🇫"],
)
def test_no_text_costs_more_than_its_length(piece):
    analyze = make_analyzer()
    started = time.process_time()
    analyze(piece * 100_000)
    # Quadratic cost would be minutes.
    assert time.process_time() - started < 5


def test_terms_do_not_depend_on_what_was_kept():
    texts = ["red shoes", "running red", "red RED shoes", "x" * 1000]
    small, large = make_analyzer(1), make_analyzer()
    assert [small(text) for text in texts] == [large(text) for text in texts] == [make_analyzer()(t) for t in texts]

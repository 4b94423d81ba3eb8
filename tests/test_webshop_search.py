"""Search is Lucene's, hit by hit, and exact however large the index is."""

import collections
import gzip
import json
import math
import random

import numpy as np
import pytest

from envs.webshop import bm25, index_build
from envs.webshop.catalogue import Catalogue
from envs.webshop.search import Index
from tests.shared_data import shared_path


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    folder = shared_path("data", "webshop")
    return Catalogue.open(folder, cache=tmp_path_factory.mktemp("cache"))


def test_reference_queries_have_lucenes_hits(official):
    path = shared_path("data", "webshop", "lucene_reference_1000.jsonl.gz")
    queries = [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().strip().split("\n")]
    first_pages = all_hits = 0
    for query in queries:
        found = [official.product(number).asin for number in official.search(query["query"])]
        expected = [asin for asin, _ in query["hits"]]
        # The reference keeps the first 20 of at most 50.
        assert len(found) == len(expected) if len(expected) < 20 else 20 <= len(found) <= 50
        first_pages += found[:10] == expected[:10]
        all_hits += found[:20] == expected
    assert (len(queries), first_pages, all_hits) == (1000, 1000, 1000)


def test_pages_of_the_original_show_these_hits(official):
    path = shared_path("data", "webshop", "golden_episodes_40.jsonl.gz")
    episodes = [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().strip().split("\n")]
    shown = 0
    for episode in episodes:
        for step in episode["steps"]:
            if step["action"].startswith("search[") and step["action"].endswith("]") and len(step["action"]) > 8:
                found = official.search(step["action"][len("search[") : -1])
                asins = [official.product(number).asin.lower() for number in found[:10]]
                clickables = step["avail"]["clickables"]
                assert [name for name in clickables if name not in ("back to search", "next >", "< prev")] == asins
                assert f"(Total results: {len(found)})" in step["obs"]
                shown += 1
    assert shown >= 30


def test_lengths_are_quantised_as_lucenes_small_float():
    # Exact up to 39, then with four leading bits above 24.
    assert bm25.LENGTHS[:48].tolist() == [*range(40), 40, 42, 44, 46, 48, 50, 52, 54]
    assert bm25.LENGTHS[bm25.quantised_lengths(np.array([0, 39, 41, 55, 56, 59, 158, 10**6]))].tolist() == (
        [0, 39, 40, 54, 56, 56, 152, 983064]
    )
    assert np.all(np.diff(bm25.LENGTHS) > 0)


def best_by_hand(documents, query):
    """A plain double loop over documents and terms; all that share a term, best first."""
    lengths = [len(document) for document in documents]
    known = sum(length > 0 for length in lengths)
    mean = np.float32(sum(lengths) / known)
    one, k1, b = np.float32(1), np.float32(0.9), np.float32(0.4)
    counts = collections.Counter(query)
    frequencies = {term: sum(term in document for document in documents) for term in counts}
    scored = []
    for number, document in enumerate(documents):
        total, shared = 0.0, False
        for term, times in counts.items():
            if term in document:
                shared = True
                idf = np.float32(math.log(1 + (known - frequencies[term] + 0.5) / (frequencies[term] + 0.5)))
                length = np.float32(bm25.LENGTHS[len(document) >= bm25.LENGTHS].max())
                inverse = one / (k1 * ((one - b) + b * length / mean))
                weight = np.float32(times) * idf
                total += float(weight - weight / (one + np.float32(document.count(term)) * inverse))
        if shared:
            scored.append((-np.float32(total), number))
    return [number for _, number in sorted(scored)]


def write_index(folder, documents, order=None):
    with index_build.IndexWriter(folder) as writer:
        for document in documents:
            writer.add(" ".join(document))
        writer.finish(np.arange(len(documents)) if order is None else np.asarray(order))
    return Index(folder)


@pytest.mark.parametrize("seed", range(4))
def test_index_equals_the_double_loop(tmp_path, monkeypatch, seed):
    # Many small batches, so that their seams are crossed.
    monkeypatch.setattr(index_build, "_FLUSHED_TOKENS", 50)
    monkeypatch.setattr(index_build, "_PLACED_POSTINGS", 40)
    draws = random.Random(seed)
    words = [f"w{number}" for number in range(60)]
    weights = [1 / (number + 1) for number in range(60)]
    documents = [draws.choices(words, weights, k=draws.choice([0, 1, 3, 8, 30, 90])) for _ in range(150)]
    # Equal documents are ties; one term more often than a byte can say.
    documents[20:24] = [list(documents[10])] * 4
    documents[5] = ["w3"] * 300 + ["w1"] * 254 + ["w2"] * 255
    index = write_index(tmp_path, documents)
    for _ in range(20):
        query = draws.choices(words, k=draws.choice([1, 2, 5, 12])) + draws.choices(["unknown", "w0", "w3"], k=1)
        expected = best_by_hand(documents, query)
        for count in (1, 3, 10, 200):
            assert index.best(" ".join(query), count) == expected[:count], query


def test_order_of_ties_is_the_one_given(tmp_path):
    documents = [["red", "mug"], ["red", "mug"], ["blue"], ["red", "mug"]]
    order = [3, 2, 0, 1]
    index = write_index(tmp_path, documents, order)
    assert [order[place] for place in index.best("mug", 50)] == [3, 0, 1]
    assert [order[place] for place in index.best("mug", 2)] == [3, 0]


def test_few_documents_are_looked_up_where_a_rare_term_decides(tmp_path, monkeypatch):
    # Without the bound the common terms would be gone through as well; the answer must not tell the difference.
    draws = random.Random(1)
    documents = [draws.choices(["a1", "b1", "c1"], k=20) + ["rare"] * (number % 40 == 0) for number in range(800)]
    index = write_index(tmp_path, documents)
    gone_through = []
    whole = index._postings
    monkeypatch.setattr(index, "_postings", lambda term, weight: gone_through.append(term) or whole(term, weight))
    assert index.best("rare a1 b1 c1", 10) == best_by_hand(documents, ["rare", "a1", "b1", "c1"])[:10]
    assert len(gone_through) == 1


def test_every_query_has_an_answer(official):
    assert official.search("") == official.search("the of and") == official.search("zzzqqqxxx \ud83d") == []
    assert official.search("THE SHOES") == official.search("shoes") != []
    assert len(official.search("women shoes " * 50_000)) == 50
    everything = " ".join(official.product(number).title for number in range(300))
    assert len(official.search(everything)) == 50
    # The first words that once bypassed search are words.
    for door in ("<r>", "<a>", "<c> garden", "<q> shoes"):
        assert official.search(door) == official.search(door.replace("<", " ").replace(">", " "))
    assert official.search("<r>") != official.search("<a>")


def test_answers_are_the_callers_own(official):
    first = official.search("shoes")
    copy = list(first)
    first.clear()
    assert official.search("shoes") == copy != []


def test_an_index_without_a_term_answers(tmp_path):
    assert write_index(tmp_path, [[], ["the"]]).best("the shoes", 5) == []

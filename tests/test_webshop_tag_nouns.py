"""Tagged nouns reach the products; the tagger itself is spaCy's and stands here as a stub."""

import gzip
import json
import sys
import types

import pytest

from envs.webshop import tag_nouns
from envs.webshop.builtin import Builtin
from envs.webshop.official import find_official_files, read_products


class Model:
    """Tags words of five letters as nouns, capital ones as names; a batch at a time."""

    def pipe(self, titles):
        titles = list(titles)
        for title in titles:
            tags = [
                (word, "NOUN" if len(word) == 5 else "PROPN" if word[0].isupper() else "ADJ") for word in title.split()
            ]
            yield [types.SimpleNamespace(text=word, pos_=tag) for word, tag in tags]


@pytest.fixture
def folder(tmp_path):
    Builtin(20).write_official_files(tmp_path)
    (tmp_path / "title_nouns.json").unlink()
    return tmp_path


def test_tagged_nouns_are_those_of_the_products(folder, monkeypatch, capsys):
    names = []
    stub = types.SimpleNamespace(load=lambda name, exclude: names.append(name) or Model())
    monkeypatch.setitem(sys.modules, "spacy", stub)
    guessed = list(read_products(find_official_files(folder)))
    tag_nouns.main([str(folder), "--model=my_model"])
    assert names == ["my_model"]
    assert capsys.readouterr().out.startswith("20 titles in ")
    tagged = list(read_products(find_official_files(folder)))
    for product in tagged:
        assert product.title_nouns == tuple(
            word.lower() for word in product.title.split() if len(word) == 5 or word[0].isupper()
        )
    assert [product.title_nouns for product in guessed] != [product.title_nouns for product in tagged]


def test_the_first_of_equal_asins_counts(folder):
    items = folder / "items_shuffle.json"
    first, second, *_ = json.loads(items.read_text())
    items.write_text(json.dumps([first | {"name": "first One of"}, second, first | {"name": "later"}]))
    assert tag_nouns.write_nouns(folder, Model()) == 3
    nouns = json.loads(gzip.decompress((folder / "title_nouns.json.gz").read_bytes()))
    assert list(nouns) == [first["asin"], second["asin"]]
    assert nouns[first["asin"]] == ["first", "one"]
    items.write_text("[]")
    assert tag_nouns.write_nouns(folder, Model()) == 0
    assert json.loads(gzip.decompress((folder / "title_nouns.json.gz").read_bytes())) == {}


def test_faults_leave_no_list_and_are_named(folder, monkeypatch):
    items = folder / "items_shuffle.json"
    items.write_text('[{"asin": "B1"}]')
    monkeypatch.setitem(sys.modules, "spacy", types.SimpleNamespace(load=lambda name, exclude: Model()))
    with pytest.raises(SystemExit, match=r"error: .*items_shuffle\.json: record 0 has no field 'name'"):
        tag_nouns.main([str(folder)])
    assert not (folder / "title_nouns.json.gz").exists()
    monkeypatch.setitem(sys.modules, "spacy", None)
    with pytest.raises(SystemExit, match="error: spaCy with its model 'en_core_web_sm' is needed"):
        tag_nouns.main([str(folder)])

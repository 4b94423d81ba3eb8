"""The benchmark of a large catalogue runs from end to end at a small size; that beside Lucene asks what it says."""

import collections
import gzip
import re
import sys

import numpy as np
import pytest

from benchmarks import webshop_catalogue, webshop_lucene
from envs.webshop.builtin import Builtin
from envs.webshop.catalogue import Catalogue


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc, which Linux alone has")
def test_a_small_run(tmp_path, capfd):
    webshop_catalogue.main(["--products=300", "--searches=20", "--workers=2", f"--directory={tmp_path}"])
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["300", "build", "search", "2"]
    assert re.search(r"index \d+ MB, products \d+ MB", lines[1])
    assert re.search(r"median \d+\.\d\d ms, p99 .* [1-9]\d*\.\d hits", lines[2])
    together, before = (int(number) for number in re.findall(r"(\d+) MB (?:together|before)", lines[3]))
    assert together >= before > 0
    assert not list(tmp_path.iterdir())


def test_words_follow_the_law():
    words = webshop_catalogue.vocabulary()
    assert len(set(words)) == len(words) == 200_000
    drawn = collections.Counter(webshop_catalogue.draw_words(words, 200_000, np.random.default_rng(0)))
    total = np.log((len(words) + 30) / 30)
    for rank in (0, 10, 100):
        expected = 200_000 * np.log((rank + 31) / (rank + 30)) / total
        # Five standard deviations of a count.
        assert abs(drawn[words[rank]] - expected) < 5 * np.sqrt(expected)


def test_queries_for_lucene_are_lines_of_lower_case(tmp_path):
    file = tmp_path / "queries.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"query": "Red\\nShoes"}\n\n{"query": "mug"}\n'))
    asked = webshop_lucene.queries(Catalogue.open(Builtin(60), cache=tmp_path), file)
    assert asked.pop("file") == ["red shoes", "mug"]
    assert sorted(asked) == ["descriptions", "instructions", "strung together", "titles"]
    for texts in asked.values():
        assert len(set(texts)) > 50
        assert all(text == text.lower() and len(text.splitlines()) == 1 for text in texts)


def test_lucene_needs_its_jar(tmp_path, capsys):
    with pytest.raises(SystemExit):
        webshop_lucene.main([f"--jar={tmp_path / 'anserini.jar'}"])
    assert f"--jar={tmp_path / 'anserini.jar'} is no file" in capsys.readouterr().err

"""The script that fetches the official files, with a stub gdown that serves files of the built-in catalogue."""

import os
import pathlib
import subprocess
import sys

import pytest

from envs.webshop.builtin import Builtin
from envs.webshop.official import find_official_files, read_products

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Serves by id, so that a mixed-up id would be seen, and counts the calls.
STUB = r"""#!/bin/bash
printf '%s\n' "$*" >> "$CALLS"
case $1 in
    *id=1EgHdxQ_YxqIQlvvq5iKlCrkEKR6-j0Ib | *id=1A2whVgOO0euk5O13n2iYDM0bQRkkRduB) name=items_shuffle.json ;;
    *id=1IduG0xl544V_A_jv3tHXC0kyFi7PnyBu | *id=1s2j6NgHljiZzQNL3veZaAiyW_qDEgBNi) name=items_ins_v2.json ;;
    *id=14Kb5SPBk_jfdLZ_CDBNitW98QLDlKR5O) name=items_human_ins.json ;;
    *) exit 9 ;;
esac
if [[ ${STUB_FAILS:-} == "$name" ]]; then echo "quota exceeded" >&2; exit 1; fi
cp "$SERVED/$name" "$3"
"""


@pytest.fixture
def fetch(tmp_path):
    """Runs the script with the stub first on PATH; returns exit status, output and error."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gdown").write_text(STUB)
    (tmp_path / "bin" / "gdown").chmod(0o755)
    (tmp_path / "served").mkdir()
    Builtin(30).write_official_files(tmp_path / "served")
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "SERVED": str(tmp_path / "served"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "TURNPPO_VENV": sys.prefix,
    }

    def run(*arguments, **more):
        command = ["bash", str(ROOT / "launch" / "webshop.sh"), *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment | more, capture_output=True, text=True, timeout=120
        )

    return run


@pytest.mark.parametrize(("size", "items"), [("small", "items_shuffle_1000.json"), ("all", "items_shuffle.json")])
def test_files_are_fetched_once_and_the_catalogue_is_built(fetch, tmp_path, size, items):
    done = fetch(f"--size={size}", "--folder=my shop")
    assert (done.returncode, done.stderr) == (0, "")
    assert "30 products" in done.stdout
    assert (tmp_path / "my shop" / size / items).read_bytes() == (tmp_path / "served/items_shuffle.json").read_bytes()
    assert len((tmp_path / "calls").read_text().splitlines()) == 3
    again = fetch(f"--size={size}", "--folder=my shop")
    assert "30 products" in again.stdout
    assert len((tmp_path / "calls").read_text().splitlines()) == 3


def test_nouns_are_listed_where_they_are_asked_for(fetch, tmp_path):
    # A spaCy that tags every word as a noun, in place of the real one.
    (tmp_path / "spacy.py").write_text(
        "from types import SimpleNamespace as N\n"
        "class Model:\n"
        "    def pipe(self, titles):\n"
        "        return ([N(text=word, pos_='NOUN') for word in title.split()] for title in titles)\n"
        "def load(name, exclude):\n"
        "    return Model()\n"
    )
    done = fetch("--size=small", "--folder=shop", "--nouns", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "30 titles" in done.stdout and "30 products" in done.stdout
    (product, *_) = read_products(find_official_files(tmp_path / "shop" / "small"))
    assert product.title_nouns == tuple(product.title.lower().split())


def test_a_failed_download_is_named_and_continued(fetch, tmp_path):
    failed = fetch("--size=small", "--folder=shop", STUB_FAILS="items_ins_v2.json")
    assert failed.returncode == 1
    assert "could not fetch items_ins_v2_1000.json" in failed.stderr
    assert sorted(path.name for path in (tmp_path / "shop/small").iterdir()) == ["items_shuffle_1000.json"]
    assert "30 products" in fetch("--size=small", "--folder=shop").stdout
    assert len((tmp_path / "calls").read_text().splitlines()) == 4


def test_a_page_instead_of_a_file_is_named(fetch, tmp_path):
    (tmp_path / "served/items_shuffle.json").write_text("<html>quota exceeded</html>")
    done = fetch("--size=small", "--folder=shop")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and "items_shuffle_1000.json is not a JSON array" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((), "--size is missing; allowed: small, all"), (("--size=medium",), "unexpected argument '--size=medium'")],
)
def test_wrong_calls_are_refused(fetch, arguments, message):
    done = fetch(*arguments)
    assert done.returncode == 2
    assert message in done.stderr

"""The catalogue is built once, whole or not at all, and every process reads the same."""

import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import pathlib
import subprocess
import sys

import pytest

from envs.webshop import cached_folder
from envs.webshop.catalogue import FORMAT, Catalogue, write_catalogue
from envs.webshop.official import OfficialFiles, find_official_files, read_products
from envs.webshop.product import HumanInstruction, Product
from envs.webshop.progress import Progress
from envs.webshop.storage import decode, encode
from tests.shared_data import shared_path


@dataclasses.dataclass(frozen=True)
class Made:
    """A source of products made on the spot."""

    products_made: tuple[Product, ...]
    log: str | None = None
    name: str = "made"

    def key(self):
        return {"asins": [product.asin for product in self.products_made]}

    def products(self, progress):
        if self.log:
            with open(self.log, "a") as file:
                print("built", file=file)
        for number, product in enumerate(self.products_made):
            progress(number / len(self.products_made))
            yield product


MUGS = tuple(
    Product(f"B00000000{number}", f"{colour} mug", "A mug.", ("Holds tea",), options={"size": ("s", "m")})
    for number, colour in enumerate(["red", "blue", "red"])
)


def test_products_come_back_as_they_were(tmp_path):
    files = find_official_files(shared_path("data", "webshop"))
    catalogue = Catalogue.open(files, cache=tmp_path)
    products = list(read_products(files))
    assert len(catalogue) == len(products) == 1000
    for number, product in enumerate(products):
        assert catalogue.product(number) == product
        assert catalogue.index(product.asin) == catalogue.index(product.asin.lower()) == number
    assert sum(bool(product.human_instructions) for product in products) == 13


def test_unusual_products_are_kept_exactly():
    odd = Product(
        "B\ud83d",
        "a\u2028b\0",
        bullets=("", "é"),
        prices=(1.1, 2.0),
        options={"": ("x | y",), "size": ()},
        instruction="",
        human_instructions=(HumanInstruction("i", ("a",), ()),),
        title_nouns=("a", "a"),
    )
    assert decode(encode(odd)) == odd
    with pytest.raises(ValueError, match="not a packed product"):
        decode(b"x" + encode(odd))


def test_look_ups_refuse_what_is_not_there(tmp_path):
    catalogue = Catalogue.open(Made(MUGS), cache=tmp_path)
    for asin in ("", "B000000003", "B00000000", "B000000000\0", "B0000000000", "\ud83d", "é" * 100):
        with pytest.raises(KeyError):
            catalogue.index(asin)
    for number in (-1, 3):
        with pytest.raises(IndexError, match="of a catalogue of 3"):
            catalogue.product(number)
    assert [catalogue.product(number).title for number in catalogue.search("red")] == ["red mug"] * 2


def test_ties_stand_in_the_order_of_asins_not_of_the_source(tmp_path):
    catalogue = Catalogue.open(Made(MUGS[::-1]), cache=tmp_path)
    assert [catalogue.product(number).asin for number in catalogue.search("mug")] == [mug.asin for mug in MUGS]
    assert [catalogue.index(mug.asin) for mug in MUGS] == [2, 1, 0]


def test_a_catalogue_is_built_once_and_again_when_its_source_changes(tmp_path):
    log = tmp_path / "log"
    for _ in range(2):
        Catalogue.open(Made(MUGS, str(log)), cache=tmp_path / "cache")
    assert log.read_text().count("built") == 1
    assert len(Catalogue.open(Made(MUGS[:2], str(log)), cache=tmp_path / "cache")) == 2
    assert log.read_text().count("built") == 2


def test_a_changed_official_file_is_another_source(tmp_path):
    items, attributes = tmp_path / "items_shuffle.json", tmp_path / "items_ins_v2.json"
    record = {"asin": "B1", "name": "mug", "full_description": "", "small_description": "", "query": ""}
    record |= {"category": "", "product_category": ""}
    attributes.write_text("{}")
    items.write_text(json.dumps([record]))
    assert Catalogue.open(tmp_path, cache=tmp_path).product(0).title == "mug"
    items.write_text(json.dumps([record | {"name": "cup"}]))
    os.utime(items, ns=(0, 0))
    assert Catalogue.open(tmp_path, cache=tmp_path).product(0).title == "cup"
    files = OfficialFiles(items, attributes)
    assert files.key() != dataclasses.replace(files, num_products=1).key()


DAMAGES = {
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "broken manifest": lambda folder: (folder / "manifest.json").write_text("{"),
    "foreign manifest": lambda folder: (folder / "manifest.json").write_text("[]"),
    "other format": lambda folder: (folder / "manifest.json").write_text('{"format": 0, "files": {}}'),
    "file gone": lambda folder: (folder / "lengths.npy").unlink(),
    "file cut": lambda folder: os.truncate(folder / "products.bin", 10),
    "bit turned": lambda folder: _turn_a_bit(folder / "documents.npy"),
}


def _turn_a_bit(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_built_again(tmp_path, damage):
    log = tmp_path / "log"
    cache = tmp_path / "cache"
    folder = Catalogue.open(Made(MUGS, str(log)), cache=cache).folder
    DAMAGES[damage](folder)
    with pytest.raises(ValueError, match=r"catalogue folder .* (has|lacks)") as caught:
        Catalogue(folder)
    assert "\n" not in str(caught.value)
    assert len(Catalogue.open(Made(MUGS, str(log)), cache=cache).search("mug")) == 3
    assert log.read_text().count("built") == 2
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [folder.name]


def test_large_files_are_told_by_their_size(tmp_path, monkeypatch):
    folder = Catalogue.open(Made(MUGS), cache=tmp_path).folder
    monkeypatch.setattr(cached_folder, "_CHECKED_BYTES", 10)
    _turn_a_bit(folder / "documents.npy")
    assert cached_folder.fault(folder, {}) is None
    os.truncate(folder / "documents.npy", 130)
    assert cached_folder.fault(folder, {}) == "has a damaged documents.npy"


def test_a_failed_or_killed_build_leaves_nothing_that_could_be_read(tmp_path):
    class Failing(Made):
        def products(self, progress):
            yield MUGS[0]
            raise ValueError("items.json: record 1 has no field 'asin'")

    with pytest.raises(ValueError, match="record 1 has no field"):
        Catalogue.open(Failing(MUGS), cache=tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    # What a killed process leaves behind goes with the next build.
    target = Catalogue.open(Made(MUGS), cache=tmp_path).folder
    left = tmp_path / f"{target.name}.building-killed"
    left.mkdir()
    (target / "manifest.json").unlink()
    Catalogue.open(Made(MUGS), cache=tmp_path)
    assert not left.exists()


def _open_in_process(arguments):
    cache, log = arguments
    catalogue = Catalogue.open(Made(MUGS, log), cache=cache)
    return catalogue.search("mug")


def test_processes_that_build_at_once_get_one_catalogue(tmp_path):
    log = str(tmp_path / "log")
    with concurrent.futures.ProcessPoolExecutor(4, multiprocessing.get_context("spawn")) as pool:
        answers = list(pool.map(_open_in_process, [(tmp_path / "cache", log)] * 4))
    assert answers == [[0, 1, 2]] * 4
    assert pathlib.Path(log).read_text().count("built") == 1


def test_without_locks_each_process_builds_and_the_first_stays(tmp_path, monkeypatch):
    def no_locks(file, how):
        raise OSError("no locks here")

    monkeypatch.setattr(cached_folder.fcntl, "flock", no_locks)

    class Slower(Made):
        """While it is built, another process begins and finishes; a third is still at it."""

        def products(self, progress):
            (tmp_path / "made-third.building-1").mkdir()
            Catalogue.open(Made(MUGS), cache=tmp_path)
            (first,) = (path for path in tmp_path.glob("made-*") if (path / "manifest.json").exists())
            (first / "first").touch()
            yield from super().products(progress)

    folder = Catalogue.open(Slower(MUGS), cache=tmp_path).folder
    assert (folder / "first").exists()
    assert (tmp_path / "made-third.building-1").exists()
    assert len(Catalogue(folder)) == 3


def test_faults_of_places_are_named_in_one_line(tmp_path):
    cases = [
        (tmp_path / "nowhere", "catalogue folder .*nowhere does not exist"),
        (tmp_path, r"catalogue folder .* has no items_shuffle\*\.json \(or \.json\.gz\) and is no built catalogue"),
        (OfficialFiles(tmp_path / "a.json", tmp_path / "b.json"), r"cannot read .*a\.json: No such file"),
        (Made(()), "made: no products"),
    ]
    for source, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            Catalogue.open(source, cache=tmp_path / "cache")
        assert "\n" not in str(caught.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot build .*; name another cache folder"):
        Catalogue.open(Made(MUGS), cache=tmp_path / "file" / "cache")
    for name in ("items_shuffle.json", "items_shuffle_1000.json.gz"):
        (tmp_path / name).write_text("")
    with pytest.raises(
        ValueError, match=r"several items_shuffle\*\.json: items_shuffle\.json, .*; allowed: one of them"
    ):
        Catalogue.open(tmp_path)
    with pytest.raises(ValueError, match="num_products must be at least 1 or None, got 0"):
        OfficialFiles(tmp_path, tmp_path, num_products=0)


def test_the_users_cache_is_where_xdg_says(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = Catalogue.open(Made(MUGS)).folder
    assert folder.parent == tmp_path / "turnppo_jax" / "webshop"
    assert len(Catalogue.open(folder)) == 3  # a built folder is a source as well


def test_progress_is_shown_only_where_it_takes_long(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("envs.webshop.progress.time.monotonic", lambda: now[0])
    bar = Progress("webshop catalogue")
    bar.show("reading", 0.1)
    bar.end("3 products")
    assert capsys.readouterr().err == ""
    now[0] = 10.0
    bar.show("reading", 0.5)
    bar.show("reading", 0.6)  # too soon after the last
    now[0] = 50.0
    bar.end("3 products")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "webshop catalogue: reading ███████████████░░░░░░░░░░░░░░░  50%, 10 s",
        "webshop catalogue: 3 products, 50 s",
    ]
    silent = Progress("webshop catalogue", shown=False)
    now[0] = 90.0
    silent.show("reading", 0.5)
    silent.end("3 products")
    assert capsys.readouterr().err == ""


def test_the_environment_needs_no_accelerator_library():
    code = "import sys, envs.webshop.catalogue; print([m for m in ('jax', 'turnppo_jax', 'nltk') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_writing_to_a_folder_of_ones_own(tmp_path):
    write_catalogue(Made(MUGS), tmp_path, progress=False)
    cached_folder.seal(tmp_path, {"format": FORMAT})
    assert len(Catalogue(tmp_path)) == 3

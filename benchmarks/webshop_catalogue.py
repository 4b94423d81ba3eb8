"""A WebShop catalogue of a million made-up products: time and memory to build it, its size, the time of a search.

    python -m benchmarks.webshop_catalogue [--products=1000000] [--searches=2000] [--shop=FOLDER]
        [--workers=8] [--directory=DIR]

Writes official files of that many products to DIR (default: a temporary folder; two kilobytes a product), builds a
catalogue from them in a fresh process, searches it in another, and deletes both. Then --workers processes open one
catalogue of 1,000 products (the built-in one, or that of the official files in --shop) and search it; Pss shares the
mapped pages between those that map them. One process at a time but for those.

Words are drawn by Zipf's law, 1 / (rank + 30), from 200,000 made-up ones: 150 words a product, the most frequent in two
products of five, as "women" or "size" are once stop words are gone. A query is 5 to 15 words of one product.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import numpy as np

from envs.webshop.builtin import Builtin
from envs.webshop.catalogue import Catalogue
from envs.webshop.official import OfficialFiles, find_official_files

_VOCABULARY = 200_000
_MANDELBROT = 30  # of Zipf's law for the most frequent words
_TITLE, _DESCRIPTION, _BULLET = 12, 80, 20  # words
_VALUES = 12  # options of one product, three words each
_BATCH = 10_000


def vocabulary() -> np.ndarray:
    """Different words of two to five syllables, the most frequent first."""
    draws = np.random.default_rng(0)
    syllables = [first + vowel for first in "bcdfghjklmnprstvwz" for vowel in "aeiou"]
    words: dict[str, None] = {}
    while len(words) < _VOCABULARY:
        sizes = draws.integers(2, 6, 10_000)
        parts = draws.integers(0, len(syllables), (10_000, 5))
        words |= dict.fromkeys("".join(syllables[part] for part in row[:size]) + "t" for row, size in zip(parts, sizes))
    return np.array(list(words)[:_VOCABULARY], object)


def draw_words(words: np.ndarray, count: int, draws: np.random.Generator) -> np.ndarray:
    """`count` words by Zipf's law."""
    # Inverts the integral of 1 / (rank + c), which is the law up to rounding.
    ranks = (_MANDELBROT * ((len(words) + _MANDELBROT) / _MANDELBROT) ** draws.random(count)) - _MANDELBROT
    return words[ranks.astype(np.int64)]


def records(number: int) -> Iterator[tuple[dict, dict]]:
    """Items and attributes in the official schema."""
    words, draws = vocabulary(), np.random.default_rng(1)
    each = _TITLE + _DESCRIPTION + 2 * _BULLET + 3 * _VALUES + 8
    for begin in range(0, number, _BATCH):
        batch = draw_words(words, _BATCH * each, draws).reshape(_BATCH, each).tolist()
        for place, text in enumerate(batch[: number - begin]):
            take = iter(text)

            def some(count, take=take):
                return " ".join(next(take) for _ in range(count))

            yield (
                {
                    "asin": f"B{begin + place:09d}",
                    "name": some(_TITLE),
                    "full_description": some(_DESCRIPTION),
                    "small_description": [some(_BULLET), some(_BULLET)],
                    "customization_options": {"Color": [{"value": some(3)} for _ in range(_VALUES)]},
                    "pricing": f"${1 + (begin + place) % 200}.99",
                    "query": some(1),
                    "category": "garden",
                    "product_category": "Home › Kitchen › Mugs",
                    "images": [],
                },
                {"attributes": [some(2), some(2)], "instruction": f"Find me {some(1)}", "instruction_attributes": []},
            )


def write_files(folder: pathlib.Path, number: int) -> OfficialFiles:
    """Writes the official files, a record at a time."""
    files = OfficialFiles(folder / "items_shuffle.json", folder / "items_ins_v2.json")
    with files.items.open("w") as items, files.attributes.open("w") as attributes:
        items.write("[")
        attributes.write("{")
        for place, (item, entry) in enumerate(records(number)):
            comma = ",\n" if place else ""
            items.write(comma + json.dumps(item))
            attributes.write(f"{comma}{json.dumps(item['asin'])}: {json.dumps(entry)}")
        items.write("]")
        attributes.write("}")
    return files


def build(folder: pathlib.Path) -> dict[str, float]:
    """Builds the catalogue of the files in `folder`; seconds and bytes."""
    started = time.perf_counter(), time.process_time()
    catalogue = Catalogue.open(find_official_files(folder), cache=folder / "cache")
    seconds, cpu = time.perf_counter() - started[0], time.process_time() - started[1]
    sizes = {path.name: path.stat().st_size for path in catalogue.folder.iterdir()}
    products = sum(size for name, size in sizes.items() if name.startswith("products"))
    return {
        "seconds": seconds,
        "cpu": cpu,
        # Pages of mapped files count here too; the system drops them when it needs room.
        "resident": memory("/proc/self/status", "VmHWM"),
        "products_bytes": products,
        "index_bytes": sum(sizes.values()) - products,
        "sources_bytes": sum(path.stat().st_size for path in folder.glob("*.json")),
    }


def search(folder: pathlib.Path, number: int) -> dict[str, float]:
    """Times `number` different queries; seconds of the processor, for searches that wait for nothing."""
    started = time.perf_counter()
    catalogue = Catalogue.open(find_official_files(folder), cache=folder / "cache")
    opening = time.perf_counter() - started
    draws = np.random.default_rng(2)
    queries = []
    for product in draws.integers(0, len(catalogue), number):
        text = catalogue.product(int(product))
        words = f"{text.title} {text.description}".split()
        queries.append(" ".join(draws.choice(words, draws.integers(5, 16), replace=False)))
    for query in queries[: number // 10]:  # reads the pages that every query needs
        catalogue.search(query)
    times, hits = [], []
    for query in queries[number // 10 :]:
        started = time.process_time()
        hits.append(len(catalogue.search(query)))
        times.append(time.process_time() - started)
    return {
        "opening": opening,
        "median": statistics.median(times),
        "p99": float(np.quantile(times, 0.99)),
        "most": max(times),
        "hits": statistics.mean(hits),
        "resident": memory("/proc/self/status", "VmHWM"),
    }


def work(folder: str, barrier) -> dict[str, float]:
    """One of the workers: opens, searches for 200 products, says what it holds; bytes."""
    before = memory("/proc/self/smaps_rollup", "Pss")
    catalogue = Catalogue(folder)
    for number in range(0, len(catalogue), max(1, len(catalogue) // 200)):
        for found in catalogue.search(catalogue.product(number).title)[:10]:
            catalogue.product(found)
    barrier.wait()  # so that all are there when each is weighed
    row = {name.lower(): memory("/proc/self/smaps_rollup", name) for name in ("Pss", "Rss")}
    barrier.wait()
    return row | {"before": before}


def workers(number: int, shop: pathlib.Path | None, cache: pathlib.Path) -> list[dict[str, float]]:
    """What each of `number` processes with one catalogue holds."""
    folder = str(Catalogue.open(shop or Builtin(1000), cache=cache).folder)
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, concurrent.futures.ProcessPoolExecutor(number, context) as pool:
        barrier = manager.Barrier(number)
        return list(pool.map(work, [folder] * number, [barrier] * number))


def memory(file: str, field: str) -> int:
    """Bytes of a field of a file in /proc."""
    for line in pathlib.Path(file).read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no field {field} in {file}; this needs Linux")


def in_fresh_process(what: str, folder: pathlib.Path, *arguments: str) -> dict[str, float]:
    """The result of `build` or `search` in a process that did nothing before."""
    command = [sys.executable, "-m", "benchmarks.webshop_catalogue", f"--measure={what}", f"--directory={folder}"]
    root = pathlib.Path(__file__).resolve().parents[1]
    done = subprocess.run([*command, *arguments], cwd=root, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{what} failed with exit status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--products", type=int, default=1_000_000)
    parser.add_argument("--searches", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--shop", type=pathlib.Path, default=None)
    parser.add_argument("--directory", type=pathlib.Path, default=None)
    parser.add_argument("--measure", choices=("build", "search"), default=None, help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    if flags.measure:
        result = build(flags.directory) if flags.measure == "build" else search(flags.directory, flags.searches)
        print(json.dumps(result))
        return
    directory = pathlib.Path(tempfile.mkdtemp(prefix="webshop_catalogue_", dir=flags.directory))
    try:
        started = time.perf_counter()
        write_files(directory, flags.products)
        print(f"{flags.products:,} products written in {time.perf_counter() - started:.0f} s", flush=True)
        built = in_fresh_process("build", directory)
        print(
            f"build    {built['seconds']:.0f} s ({built['cpu']:.0f} s of CPU) from "
            f"{built['sources_bytes'] / 1e9:.2f} GB of files, resident at most {built['resident'] / 1e9:.2f} GB; "
            f"index {built['index_bytes'] / 1e6:.0f} MB, products {built['products_bytes'] / 1e6:.0f} MB",
            flush=True,
        )
        found = in_fresh_process("search", directory, f"--searches={flags.searches}")
        print(
            f"search   median {found['median'] * 1e3:.2f} ms, p99 {found['p99'] * 1e3:.2f} ms, longest "
            f"{found['most'] * 1e3:.2f} ms, {found['hits']:.1f} hits; opened in {found['opening'] * 1e3:.0f} ms, "
            f"resident at most {found['resident'] / 1e6:.0f} MB",
            flush=True,
        )
        rows = workers(flags.workers, flags.shop, directory / "cache")
        pss, rss, before = (np.array([row[name] for row in rows]) / 1e6 for name in ("pss", "rss", "before"))
        print(
            f"{flags.workers} workers with 1,000 products: Pss {pss.sum():.0f} MB together "
            f"({before.sum():.0f} MB before they opened it), Rss {rss.mean():.0f} MB each"
        )
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

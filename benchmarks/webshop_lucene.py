"""WebShop's search beside the engine that the original uses: the first 50 hits of many queries, in order.

    python -m benchmarks.webshop_lucene --jar=anserini-0.22.1-fatjar.jar [--catalogue=FOLDER] [--queries=FILE.jsonl.gz]

Needs a JDK of 11 or later and the jar, which lies in the package pyserini 0.22.1 (`pip download --no-deps
pyserini==0.22.1`, a zip file). Anserini indexes the products of a catalogue and is asked, in lower case as the original
asks it: goals' instructions, titles, beginnings of descriptions, words of several products strung together in odd ways,
and the "query" of each line of --queries. A line of JSON for each kind.
"""

import argparse
import gzip
import json
import pathlib
import random
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

from envs.webshop.builtin import Builtin
from envs.webshop.catalogue import Catalogue
from envs.webshop.goals import GoalTable
from envs.webshop.product import searched_text

_HITS, _PAGE = 50, 10
_EACH = 2000  # queries of a kind, at most
_BETWEEN = (" ", "-", ", ", "/", "'s ", "_", " & ", "\N{NO-BREAK SPACE}", "\N{BLACK STAR}", "x", ".", ": ")
_INDEXING = "-collection JsonCollection -generator DefaultLuceneDocumentGenerator -threads 1"
_JAVA = """
import io.anserini.search.SimpleSearcher;
import java.io.*; import java.nio.charset.StandardCharsets; import java.nio.file.*;
public class Search {
  public static void main(String[] paths) throws Exception {
    var searcher = new SimpleSearcher(paths[0]);
    try (var out = new PrintWriter(paths[2], StandardCharsets.UTF_8)) {
      for (String query : Files.readString(Path.of(paths[1]), StandardCharsets.UTF_8).split("\\n", -1)) {
        for (var hit : searcher.search(query, HITS)) out.print(hit.docid + " ");
        out.print("\\n");
      }
    }
  }
}
""".replace("HITS", str(_HITS))


def queries(catalogue: Catalogue, file: pathlib.Path | None) -> dict[str, list[str]]:
    """What is asked, by kind."""
    draws = random.Random(0)
    products = [catalogue.product(number) for number in range(min(len(catalogue), _EACH))]
    table = GoalTable(catalogue)
    words = [word for product in products for word in searched_text(product).split()]
    asked = {
        "instructions": [table.goal(*table.place(index)).instruction for index in range(min(len(table), _EACH))],
        "titles": [product.title for product in products],
        "descriptions": [product.description[:300] for product in products],
        "strung together": [
            "".join(draws.choice(words) + draws.choice(_BETWEEN) for _ in range(draws.randint(1, 8)))
            for _ in range(_EACH)
        ],
    }
    if file is not None:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        asked["file"] = [json.loads(line)["query"] for line in content.split(b"\n") if line.strip()]
    # One a line.
    return {kind: [re.sub(r"[\r\n]", " ", text).lower() for text in texts] for kind, texts in asked.items()}


def lucene_hits(catalogue: Catalogue, texts: list[str], jar: pathlib.Path) -> list[list[str]]:
    """The asins that Anserini finds for each text."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        source, asked, found, index = (folder / part for part in ("Search.java", "queries", "hits", "index"))
        (folder / "documents").mkdir()
        with (folder / "documents" / "documents.jsonl").open("w") as file:
            for number in range(len(catalogue)):
                product = catalogue.product(number)
                file.write(json.dumps({"id": product.asin, "contents": searched_text(product)}) + "\n")
        source.write_text(_JAVA, encoding="utf-8")
        asked.write_bytes("\n".join(texts).encode())
        places = ["-input", str(folder / "documents"), "-index", str(index)]
        for command in (
            ["io.anserini.index.IndexCollection", *_INDEXING.split(), *places],
            [str(source), str(index), str(asked), str(found)],
        ):
            done = subprocess.run(["java", "-cp", str(jar), *command], capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"java ended with {done.returncode}: {done.stderr.strip()[-1000:]}")
        return [line.split() for line in found.read_bytes().decode().split("\n")[:-1]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints how many queries of each kind have the same hits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jar", type=pathlib.Path, required=True)
    parser.add_argument("--catalogue", default=None, help="folder of official files; default: the built-in catalogue")
    parser.add_argument("--queries", type=pathlib.Path, default=None)
    flags = parser.parse_args(arguments)
    for name, path in (("jar", flags.jar), ("queries", flags.queries)):
        if path is not None and not path.is_file():
            parser.error(f"--{name}={path} is no file")
    if shutil.which("java") is None:
        parser.error("no java on the PATH; needs a JDK of 11 or later")
    catalogue = Catalogue.open(flags.catalogue or Builtin(1000))
    asked = queries(catalogue, flags.queries)
    hits = iter(lucene_hits(catalogue, [text for texts in asked.values() for text in texts], flags.jar))
    for kind, texts in asked.items():
        first_pages = all_hits = 0
        for text in texts:
            expected = next(hits)
            found = [catalogue.product(number).asin for number in catalogue.search(text)]
            first_pages += found[:_PAGE] == expected[:_PAGE]
            all_hits += found == expected
        row = {"queries": kind, "asked": len(texts), "same_first_page": first_pages, "same_hits": all_hits}
        print(json.dumps({"bench": "webshop_lucene"} | row), flush=True)


if __name__ == "__main__":
    main()

"""Lists the nouns of official titles as the original's tagger finds them: python -m envs.webshop.tag_nouns FOLDER.

Writes title_nouns.json.gz into the folder, where the catalogue looks for it. Needs spaCy and its English model, as the
original does at run time (`pip install .[spacy]`, `python -m spacy download en_core_web_sm`); a title takes a few
milliseconds. Without the list the nouns are guessed (`nouns.py`): of random pairs of products one in thirty-five is
then taken for more or less of one kind than the original takes it for.
"""

import argparse
import gzip
import json
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from envs.webshop.json_stream import read_array
from envs.webshop.official import find_official_files
from envs.webshop.progress import Progress
from envs.webshop.records import field

_NOUNS = ("NOUN", "PROPN")
_UNUSED = ("parser", "ner", "lemmatizer")  # parts of the model that do not change tags


def tagged_nouns(titles: Iterable[str], model: Any) -> Iterator[list[str]]:
    """For each title the words that a spaCy model tags as nouns or names, lower case, in order, with repeats."""
    for parsed in model.pipe(titles):  # with their capitals, by which the tagger knows names
        yield [token.text.lower() for token in parsed if token.pos_ in _NOUNS]


def write_nouns(folder: pathlib.Path, model: Any) -> int:
    """Writes title_nouns.json.gz; returns the number of titles.

    Raises:
      ValueError: the folder lacks an official file, or has one that is broken; one line that names it.
    """
    items = find_official_files(folder).items
    bar = Progress("title nouns")
    asins: list[str] = []

    def titles() -> Iterator[str]:
        for number, record in enumerate(read_array(items, lambda share: bar.show("reading", share))):
            where = f"{items}: record {number}"
            asins.append(field(where, record, "asin", str))
            yield field(where, record, "name", str)

    # Written beside its place and renamed: half a list would be taken for the whole.
    target = folder / "title_nouns.json.gz"
    unfinished = target.with_suffix(".unfinished")
    with gzip.open(unfinished, "wt", encoding="utf-8") as file:
        number, seen = 0, set()
        for number, nouns in enumerate(tagged_nouns(titles(), model), 1):
            asin = asins[number - 1]
            if asin not in seen:  # of equal asins the catalogue takes the first
                file.write(f"{',' if seen else '{'}\n{json.dumps(asin)}: {json.dumps(nouns)}")
                seen.add(asin)
        file.write("\n}\n" if seen else "{}\n")
    os.replace(unfinished, target)
    bar.end(f"{number:,} titles")
    return number


def main(arguments: Sequence[str] | None = None) -> None:
    """Tags and writes."""
    parser = argparse.ArgumentParser(prog="python -m envs.webshop.tag_nouns", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="holds items_shuffle*.json and items_ins_v2*.json")
    parser.add_argument("--model", default="en_core_web_sm", help="name of the spaCy model")
    flags = parser.parse_args(arguments)
    try:
        import spacy

        model = spacy.load(flags.model, exclude=_UNUSED)
    except (ImportError, OSError) as error:
        sys.exit(f"error: spaCy with its model {flags.model!r} is needed ({str(error).splitlines()[0]})")
    try:
        number = write_nouns(flags.folder, model)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"{number:,} titles in {flags.folder / 'title_nouns.json.gz'}")


if __name__ == "__main__":
    main()

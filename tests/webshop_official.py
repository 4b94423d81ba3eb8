"""The official files of the 1,000-product catalogue among the shared reference data, and records to compare with."""

import gzip
import json
from typing import Any

from envs.webshop.official import OfficialFiles
from tests.shared_data import shared_path


def official_files() -> OfficialFiles:
    """The files; skips the calling test where they are absent."""
    names = ("items_shuffle_1000", "items_ins_v2_1000", "items_human_ins_13", "title_nouns_spacy380")
    return OfficialFiles(*(shared_path("data", "webshop", f"{name}.json.gz") for name in names))


def records(name: str) -> list[Any]:
    """The lines of a JSON-lines file, or what a JSON file holds in a list of one."""
    with gzip.open(shared_path("data", "webshop", name), "rt", encoding="utf-8") as file:
        if name.endswith(".jsonl.gz"):
            return [json.loads(line) for line in file if line.strip()]
        return [json.load(file)]

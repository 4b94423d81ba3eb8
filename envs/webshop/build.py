"""Builds the catalogue of a folder of official WebShop files ahead of a run: python -m envs.webshop.build FOLDER.

Environments build a small one themselves when it is not there, and ask for this command where it would take minutes.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence

from envs.webshop.cached_folder import default_cache
from envs.webshop.catalogue import Catalogue
from envs.webshop.official import find_official_files


def main(arguments: Sequence[str] | None = None) -> None:
    """Builds, or finds what was built, and says what there is."""
    parser = argparse.ArgumentParser(prog="python -m envs.webshop.build", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, help="holds items_shuffle*.json and items_ins_v2*.json")
    parser.add_argument("--num_products", type=int, default=None, help="of the file, counted from its start")
    parser.add_argument("--cache", type=pathlib.Path, default=None, help=f"default {default_cache()}")
    flags = parser.parse_args(arguments)
    try:
        files = find_official_files(flags.folder, flags.num_products)
        catalogue = Catalogue.open(files, cache=flags.cache)
    except ValueError as error:
        sys.exit(f"error: {error}")
    size = sum(path.stat().st_size for path in catalogue.folder.iterdir())
    print(f"{len(catalogue):,} products, {size / 1e6:.1f} MB in {catalogue.folder}")


if __name__ == "__main__":
    main()

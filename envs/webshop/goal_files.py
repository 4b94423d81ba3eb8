"""The goals of a large catalogue in files, so that its processes need not each read every product."""

import dataclasses
import functools
import hashlib
import pathlib

import numpy as np

from envs.webshop.cached_folder import MANIFEST, built_folder, default_cache
from envs.webshop.catalogue import Catalogue
from envs.webshop.goals import GoalNumbers, GoalTable, draw_goals
from envs.webshop.search import mapped

# Of the files and of how goals are drawn.
FORMAT = 1
# Below this number of products reading them takes less than half a second.
_SMALL = 20_000
_NAMES = tuple(field.name for field in dataclasses.fields(GoalNumbers))


def goal_table(catalogue: Catalogue, kind: str, price_seed: int) -> GoalTable:
    """The goals of a catalogue; those of a large one are drawn once, put into the user's cache and mapped.

    Args:
      catalogue: whose goals.
      kind: "synthetic" or "human".
      price_seed: see `goals.draw_goals`.

    Raises:
      ValueError: as `draw_goals`, or the cache cannot be written.
    """
    if len(catalogue) < _SMALL:
        return GoalTable(catalogue, kind, price_seed)
    about = {"format": FORMAT, "catalogue": hashlib.sha256((catalogue.folder / MANIFEST).read_bytes()).hexdigest()}
    target = default_cache() / f"goals-{kind}-{price_seed}-{about['catalogue'][:16]}"
    folder = built_folder(target, about, functools.partial(_write, catalogue, kind, price_seed))
    numbers = GoalNumbers(**{name: mapped(folder / f"{name}.npy") for name in _NAMES})
    return GoalTable(catalogue, kind, price_seed, numbers)


def _write(catalogue: Catalogue, kind: str, price_seed: int, folder: pathlib.Path) -> None:
    numbers = draw_goals(catalogue, kind, price_seed)
    for name in _NAMES:
        np.save(folder / f"{name}.npy", getattr(numbers, name))

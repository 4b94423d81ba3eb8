"""Which room a seed gets: training and evaluation rooms kept apart by content.

Small rooms repeat: with seeds alone, half of 256 "unseen" rooms turn up within a few thousand training
seeds. So the evaluation rooms are a fixed set, and a training seed whose room equals one of them, up to
the 8 symmetries of the square, moves on to its next attempt.

| split | room of a seed |
|---|---|
| `train` | never equal to an evaluation room |
| `eval` | evaluation room number seed mod num_eval_rooms |
| `seed` | the plain room of the seed; no promise (what other codebases do) |
"""

import functools
import hashlib

from envs.sokoban import boxoban, generator, rules

SPLITS = ("train", "eval", "seed")

# How many seeds of the reserved stream are tried for one more distinct evaluation room; past this the family
# is taken to have no more, and a room is repeated.
_DISTINCT_TRIES = 100


def check_split(split: str, num_eval_rooms: int) -> None:
    """Raises ValueError for an unknown split or a set of fewer than one room."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
    if isinstance(num_eval_rooms, bool) or not isinstance(num_eval_rooms, int) or num_eval_rooms < 1:
        raise ValueError(f"num_eval_rooms must be a whole number of at least 1, got {num_eval_rooms!r}")


@functools.lru_cache(maxsize=16)
def evaluation_rooms(settings: generator.RoomSettings, num_eval_rooms: int) -> tuple[rules.Room, ...]:
    """The evaluation rooms of a family, distinct up to symmetry as long as it has enough rooms.

    Room number i depends on the settings alone, so a smaller set is the beginning of a larger one. Made
    once a process.
    """
    rooms, seen, seed = [], set(), 0
    while len(rooms) < num_eval_rooms:
        for _ in range(_DISTINCT_TRIES):
            room = generator.generate(settings, "eval", seed)
            seed += 1
            if rules.canonical(room) not in seen:
                break
        seen.add(rules.canonical(room))
        rooms.append(room)
    return tuple(rooms)


@functools.lru_cache(maxsize=16)
def _held_out(settings: generator.RoomSettings, num_eval_rooms: int) -> frozenset[str]:
    return frozenset(map(rules.canonical, evaluation_rooms(settings, num_eval_rooms)))


def generated_room(settings: generator.RoomSettings, split: str, seed: int, num_eval_rooms: int) -> rules.Room:
    """The room of a seed.

    Raises:
      generator.NoRoomError: no room meets the settings, or, for `train`, the evaluation set holds all that do.
    """
    if split == "eval":
        return evaluation_rooms(settings, num_eval_rooms)[seed % num_eval_rooms]
    if split == "seed":
        return generator.generate(settings, "seed", seed)
    held_out = _held_out(settings, num_eval_rooms)
    try:
        return generator.generate(settings, "train", seed, lambda room: rules.canonical(room) not in held_out)
    except generator.NoRoomError as error:
        raise generator.NoRoomError(f"{error}, or hold out fewer (num_eval_rooms={num_eval_rooms})") from error


@functools.lru_cache(maxsize=4)
def level_sets(path: str, num_eval_rooms: int) -> dict[str, tuple[rules.Room, ...]]:
    """The levels of a file, by split; read once a process.

    The order of the file says nothing about a level, but neighbours may be related, so the evaluation
    levels are those whose content has the smallest hashes. For `seed` the levels stand in file order.

    Raises:
      ValueError: the file cannot be read, or has no level left for training.
    """
    levels = boxoban.load_levels(path)
    by_content = {rules.canonical(level): level for level in levels}
    order = sorted(by_content, key=lambda text: hashlib.blake2b(text.encode(), digest_size=16).digest())
    if len(order) <= num_eval_rooms:
        raise ValueError(
            f"the levels file {path!r} has {len(order)} distinct levels; "
            f"num_eval_rooms={num_eval_rooms} leaves none for training"
        )
    return {
        "eval": tuple(by_content[text] for text in order[:num_eval_rooms]),
        "train": tuple(by_content[text] for text in order[num_eval_rooms:]),
        "seed": tuple(levels),
    }

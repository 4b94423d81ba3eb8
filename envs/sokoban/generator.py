"""Rooms made by reverse play: solvable by construction, a pure function of their seed.

A random walk carves the floor, targets and player are drawn, every box starts on its target and is
then pulled away from it: whatever was pulled there can be pushed back. This is the scheme of
gym-sokoban (Schrader, 2018) and its variant in RAGEN, with an exhaustive breadth-first search in
place of their depth-first one, so it needs no recursion and its work is bounded.
"""

import dataclasses
import hashlib
import random
from collections.abc import Callable

from envs.sokoban import rules

# A room that these limits cannot make does not exist for all practical purposes: one attempt in two
# fails for three boxes in 6x6, the most crowded setting that people use.
MAX_ATTEMPTS = 500
# Bounds one attempt to some tens of milliseconds; 6x6 with one box has 240 states.
MAX_STATES = 20_000

_TURN_PROBABILITY = 0.35  # that the carving walk changes direction, as in gym-sokoban
_CARVE_STEPS_PER_SIDE = 1.7  # steps of the walk = this times (height + width), as in gym-sokoban
# What a step of the walk carves, as (row, column) offsets: two bars, two corners, a square.
_BRUSHES = (
    ((0, -1), (0, 0), (0, 1)),
    ((-1, 0), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, 0)),
    ((0, 1), (0, 0), (1, 0)),
    ((0, -1), (0, 0), (1, -1), (1, 0)),
)


@dataclasses.dataclass(frozen=True)
class RoomSettings:
    """What the rooms of a family have in common.

    Attributes:
      height, width: the grid, border walls included.
      num_boxes: boxes, and targets.
      search_depth: moves of reverse play at most; more makes boxes start farther from their targets.
    """

    height: int = 6
    width: int = 6
    num_boxes: int = 1
    search_depth: int = 300

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{field.name} must be a whole number of at least 1, got {value!r}")
        inside = max(self.height - 2, 0) * max(self.width - 2, 0)
        needed = 2 * self.num_boxes + 1
        if inside < needed:
            raise ValueError(
                f"height={self.height}, width={self.width} leave {inside} cells inside the walls; "
                f"num_boxes={self.num_boxes} needs at least {needed} (boxes, targets, player)"
            )


class NoRoomError(ValueError):
    """No room meets the settings (and the condition) within the attempts allowed."""


def generate(
    settings: RoomSettings, stream: str, seed: int, accept: Callable[[rules.Room], bool] = lambda room: True
) -> rules.Room:
    """The room of a seed: the first attempt that gives one that is accepted.

    Each attempt draws from a generator of its own, seeded by a hash of (stream, seed, settings, attempt),
    so the room depends on nothing else: not on the process, the thread, PYTHONHASHSEED, or what was
    generated before.

    Args:
      settings: of the room.
      stream: separates families of seeds; equal seeds of two streams give unrelated rooms.
      seed: any whole number.
      accept: a further condition.

    Returns:
      A room with every target uncovered, solvable.

    Raises:
      NoRoomError: after MAX_ATTEMPTS.
    """
    for attempt in range(MAX_ATTEMPTS):
        room = _attempt(settings, _Draws(f"{stream}|{int(seed)}|{dataclasses.astuple(settings)}|{attempt}"))
        if room is not None and accept(room):
            return room
    raise NoRoomError(f"no room found for {settings} (seed {seed}) in {MAX_ATTEMPTS} attempts; use a larger room")


class _Draws:
    """Random numbers from a text key. Only random() is used: Python promises its values across versions."""

    def __init__(self, key: str):
        self._random = random.Random(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=16).digest(), "big"))

    def below(self, n: int) -> int:
        return int(self._random.random() * n)

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def shuffled(self, items: list[int]) -> list[int]:
        items = list(items)
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]
        return items


def _attempt(settings: RoomSettings, draws: _Draws) -> rules.Room | None:
    floor = _carve(settings, draws)
    if len(floor) < 2 * settings.num_boxes + 1:
        return None
    player, *targets = draws.shuffled(sorted(floor))[: settings.num_boxes + 1]
    directions = draws.shuffled([-settings.width, settings.width, -1, 1])
    pulled = _reverse_play(floor, targets, player, directions, settings.search_depth)
    if pulled is None:
        return None
    boxes, player, displacement = pulled
    player = _stroll(floor - set(boxes), player, displacement, directions, draws)
    cells = frozenset(range(settings.height * settings.width))
    return rules.Room(settings.height, settings.width, cells - floor, frozenset(targets), frozenset(boxes), player)


def _carve(settings: RoomSettings, draws: _Draws) -> set[int]:
    """The floor: what a random walk with a random brush touches inside the border."""
    height, width = settings.height, settings.width
    row, column = 1 + draws.below(height - 2), 1 + draws.below(width - 2)
    directions = ((-1, 0), (1, 0), (0, -1), (0, 1))
    down, right = directions[draws.below(4)]
    floor = set()
    for _ in range(int(_CARVE_STEPS_PER_SIDE * (height + width))):
        if draws.chance(_TURN_PROBABILITY):
            down, right = directions[draws.below(4)]
        row = min(max(row + down, 1), height - 2)
        column = min(max(column + right, 1), width - 2)
        for brush_down, brush_right in _BRUSHES[draws.below(len(_BRUSHES))]:
            if 0 < row + brush_down < height - 1 and 0 < column + brush_right < width - 1:
                floor.add((row + brush_down) * width + column + brush_right)
    return floor


def _reverse_play(
    floor: set[int], targets: list[int], player: int, directions: list[int], depth: int
) -> tuple[tuple[int, ...], int, int] | None:
    """Pulls the boxes off their targets and keeps the best position met.

    The score of a position with every target uncovered is (how often the pulled box changed) times (the
    distance of all boxes from their own targets). A step away from a box pulls it, as in RAGEN. Of equal
    scores the first wins; the shuffled directions decide which is first.

    Returns:
      boxes, player, distance of the boxes in moves; None where no position uncovers every target.
    """
    width = max(directions)
    goal_mask = sum(1 << cell for cell in targets)
    frontier = [(player, tuple(targets), goal_mask, -1, 0)]
    seen = {(player, goal_mask)}
    best, best_score = None, 0
    for _ in range(depth):
        reached = []
        for player, boxes, mask, last_pulled, changes in frontier:
            for step in directions:
                to = player + step
                if to not in floor or mask >> to & 1:
                    continue
                behind = player - step
                if not mask >> behind & 1:
                    if (to, mask) not in seen:
                        seen.add((to, mask))
                        reached.append((to, boxes, mask, last_pulled, changes))
                    continue
                new_mask = mask ^ (1 << behind) ^ (1 << player)
                if (to, new_mask) in seen:
                    continue
                seen.add((to, new_mask))
                box = boxes.index(behind)
                new_boxes = (*boxes[:box], player, *boxes[box + 1 :])
                new_changes = changes + (box != last_pulled)
                reached.append((to, new_boxes, new_mask, box, new_changes))
                if new_mask & goal_mask:
                    continue
                displacement = sum(
                    abs(a // width - b // width) + abs(a % width - b % width)
                    for a, b in zip(new_boxes, targets, strict=True)
                )
                if new_changes * displacement > best_score:
                    best, best_score = (new_boxes, to, displacement), new_changes * displacement
        frontier = reached
        if not frontier or len(seen) > MAX_STATES:
            break
    return best


def _stroll(free: set[int], player: int, displacement: int, directions: list[int], draws: _Draws) -> int:
    """Walks the player away from the last pull by up to 3 steps, more often where the room is trivial."""
    if not draws.chance(0.8 if displacement == 1 else 0.5):
        return player
    back = None
    for _ in range(3):
        steps = [step for step in directions if step != back and player + step in free]
        if not steps:
            break
        step = steps[draws.below(len(steps))]
        player, back = player + step, -step
        if not draws.chance(0.5):
            break
    return player

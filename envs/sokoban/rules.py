"""Rooms of Sokoban and what a move does to one.

Cells are numbered row by row: cell = row * width + column. The border of a room is wall, so a step
never leaves the grid and never wraps to the next row.
"""

import dataclasses
from collections.abc import Sequence

WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = "#_O√XPS"
ACTIONS = ("Up", "Down", "Left", "Right")

STEP_REWARD = -0.1  # each move, also one that changes nothing
BOX_REWARD = 1.0  # a box comes onto a target; minus this when it leaves one
SOLVED_REWARD = 10.0  # every box on a target


@dataclasses.dataclass(frozen=True)
class Room:
    """One position of the game. Every cell that is not a wall can be walked on."""

    height: int
    width: int
    walls: frozenset[int]
    targets: frozenset[int]
    boxes: frozenset[int]
    player: int

    @property
    def boxes_on_target(self) -> int:
        """How many boxes stand on a target."""
        return len(self.boxes & self.targets)

    @property
    def solved(self) -> bool:
        """Whether every box stands on a target."""
        return self.boxes <= self.targets

    def rows(self) -> list[str]:
        """The room as text, one string a row, one symbol a cell."""
        cells = [FLOOR] * (self.height * self.width)
        for cell in self.walls:
            cells[cell] = WALL
        for cell in self.targets:
            cells[cell] = TARGET
        for cell in self.boxes:
            cells[cell] = BOX_ON_TARGET if cell in self.targets else BOX
        cells[self.player] = PLAYER_ON_TARGET if self.player in self.targets else PLAYER
        return ["".join(cells[row * self.width : (row + 1) * self.width]) for row in range(self.height)]


def step_of(action: str, width: int) -> int:
    """The difference between neighbouring cell numbers in the direction of an action."""
    return {"Up": -width, "Down": width, "Left": -1, "Right": 1}[action]


def move(room: Room, action: str) -> tuple[Room, float]:
    """One move of the player, by the rules of gym-sokoban.

    The player steps onto a free cell; a box there is pushed one cell on when the cell behind it is
    free; otherwise nothing changes, and the move is paid for all the same. The reward is

        -0.1 + 1 (a box came onto a target) - 1 (a box left one) + 10 (every box is on a target)

    Args:
      room: before the move.
      action: one of ACTIONS.

    Returns:
      room: after the move.
      reward: between -1.1 and 10.9.
    """
    step = step_of(action, room.width)
    ahead = room.player + step
    boxes = room.boxes
    if ahead in boxes:
        behind = ahead + step
        if behind in room.walls or behind in boxes:
            return room, STEP_REWARD
        boxes = (boxes - {ahead}) | {behind}
    elif ahead in room.walls:
        return room, STEP_REWARD
    moved = dataclasses.replace(room, boxes=boxes, player=ahead)
    reward = STEP_REWARD + BOX_REWARD * (moved.boxes_on_target - room.boxes_on_target)
    return moved, reward + SOLVED_REWARD * moved.solved


def parse_rows(rows: Sequence[str]) -> Room:
    """Reads a room written with our symbols.

    Args:
      rows: equally long, border of walls, exactly one player, as many boxes as targets.

    Raises:
      ValueError: names what is wrong.
    """
    height, width = len(rows), len(rows[0]) if rows else 0
    if any(len(row) != width for row in rows):
        raise ValueError(f"rows of a room must be equally long, got lengths {[len(row) for row in rows]}")
    cells = "".join(rows)
    unknown = set(cells) - set("#_O√XPS")
    if unknown:
        raise ValueError(f"unknown symbols {sorted(unknown)} in a room; known: # _ O √ X P S")
    where = {symbol: [cell for cell, found in enumerate(cells) if found == symbol] for symbol in "#_O√XPS"}
    players = where[PLAYER] + where[PLAYER_ON_TARGET]
    boxes = frozenset(where[BOX] + where[BOX_ON_TARGET])
    targets = frozenset(where[TARGET] + where[BOX_ON_TARGET] + where[PLAYER_ON_TARGET])
    walls = frozenset(where[WALL])
    if len(players) != 1:
        raise ValueError(f"a room has exactly one player, got {len(players)}")
    if not boxes or len(boxes) != len(targets):
        raise ValueError(f"a room has as many boxes as targets, got {len(boxes)} and {len(targets)}")
    border = [
        cell for cell in range(height * width) if cell // width in (0, height - 1) or cell % width in (0, width - 1)
    ]
    if not walls.issuperset(border):
        raise ValueError("the border of a room must be walls")
    return Room(height, width, walls, targets, boxes, players[0])


def canonical(room: Room) -> str:
    """One text for a room and its mirror images and rotations: the smallest of the eight.

    Two rooms have the same canonical text exactly when one of the 8 symmetries of the square maps one
    onto the other, walls, targets, boxes and player alike.
    """
    rows = room.rows()
    images = []
    for _ in range(4):
        images.append("\n".join(rows))
        images.append("\n".join(row[::-1] for row in rows))
        rows = ["".join(column) for column in zip(*rows[::-1], strict=True)]
    return min(images)

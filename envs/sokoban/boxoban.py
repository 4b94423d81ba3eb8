"""Levels in Boxoban's text format: `; n`, then rows of `#` wall, space floor, `@` player, `$` box, `.` target.

`*` (box on a target) and `+` (player on a target), which other collections of the same format use, are read too.
"""

import pathlib

from envs.sokoban import rules

_SYMBOLS = {
    "#": rules.WALL,
    " ": rules.FLOOR,
    "@": rules.PLAYER,
    "$": rules.BOX,
    ".": rules.TARGET,
    "*": rules.BOX_ON_TARGET,
    "+": rules.PLAYER_ON_TARGET,
}


def load_levels(path: str | pathlib.Path) -> list[rules.Room]:
    """All levels of a file, in order.

    Args:
      path: a text file in Boxoban's format.

    Raises:
      ValueError: no such file, no level in it, or a level that is no proper room; names file and level.
    """
    path = pathlib.Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read the levels file {str(path)!r}: {error.strerror}") from error
    levels, rows, name = [], [], ""
    for line in [*text.split("\n"), ";"]:
        line = line.rstrip("\r")
        if not line.startswith(";"):
            rows.append(line)
            continue
        rows = [row for row in rows if row.strip()]
        if rows:
            levels.append(_level(path, name, rows))
        rows, name = [], line[1:].strip()
    if not levels:
        raise ValueError(f"the levels file {str(path)!r} holds no level")
    return levels


def _level(path: pathlib.Path, name: str, rows: list[str]) -> rules.Room:
    try:
        unknown = set("".join(rows)) - set(_SYMBOLS)
        if unknown:
            raise ValueError(f"unknown symbols {sorted(unknown)}; known: {' '.join(sorted(_SYMBOLS))}")
        room = rules.parse_rows(["".join(_SYMBOLS[symbol] for symbol in row) for row in rows])
        if room.solved:
            raise ValueError("it is already solved")
    except ValueError as error:
        raise ValueError(f"level {name!r} of {str(path)!r}: {error}") from error
    return room

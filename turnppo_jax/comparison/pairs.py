"""Episodes of two runs on the same goals, side by side, turn by turn."""

import collections
import dataclasses
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len, chop_cells

from turnppo_jax.command_line import UserError
from turnppo_jax.training.trajectory_log import read_trajectories, trajectory_path

Record = Mapping[str, Any]  # one line of a trajectories file

_NARROWEST = 60  # columns of a terminal, or of no terminal


@dataclasses.dataclass(frozen=True)
class Side:
    """The episodes of one of the two.

    Attributes:
      path: of the file.
      records: its lines.
    """

    path: pathlib.Path
    records: Sequence[Record]


@dataclasses.dataclass(frozen=True)
class Paired:
    """Two sides, episode by episode.

    Attributes:
      left: the first one.
      right: the second one.
      pairs: episodes of both that answer the same goal; the n-th of a goal with the n-th of it.
      alone_left: episodes of the first without a partner.
      alone_right: the same of the second.
    """

    left: Side
    right: Side
    pairs: Sequence[tuple[Record, Record]]
    alone_left: int
    alone_right: int


def read_sides(paths: Sequence[pathlib.Path], step: int | None) -> list[Side]:
    """Reads two trajectory files, or those of a step of two runs.

    Args:
      paths: two files or run directories.
      step: of run directories; None is the newest step that both have.

    Raises:
      UserError: something is not there; names it.
    """
    known = {path: _steps(path) for path in paths if path.is_dir()}
    if step is None and known:
        common = set.intersection(*map(set, known.values()))
        if not common:
            raise UserError(f"{' and '.join(map(str, known))} have no step of trajectories in common")
        step = max(common)
    sides = []
    for path in paths:
        if path in known and step not in known[path]:
            raise UserError(f"{path} has no trajectories of step {step}; it has {_spans(known[path])}")
        file = trajectory_path(path, step) if path in known else path
        if not file.is_file():
            raise UserError(f"no trajectories at {path}: neither a file nor a run directory")
        records = read_trajectories(file)
        for record in records:
            if not isinstance(record, dict) or not {"seed", "turns", "return", "success"} <= record.keys():
                raise UserError(f"{file} is no file of trajectories: a line lacks seed, turns, return or success")
        sides.append(Side(file, records))
    return sides


def pair(left: Side, right: Side) -> Paired:
    """Pairs episodes by their environment seed, and by how they were sampled where the file says so.

    Raises:
      UserError: not one pair.
    """
    waiting = collections.defaultdict(collections.deque)
    for record in right.records:
        waiting[_goal(record)].append(record)
    pairs = [(record, waiting[_goal(record)].popleft()) for record in left.records if waiting[_goal(record)]]
    if not pairs:
        raise UserError(f"{left.path} and {right.path} have no seed in common")
    return Paired(left, right, pairs, len(left.records) - len(pairs), len(right.records) - len(pairs))


def to_text(paired: Paired, num_printed: int, width: int | None = None) -> str:
    """The first pairs as two columns.

    Args:
      paired: of `pair`.
      num_printed: how many pairs.
      width: of the text; None is that of the terminal.
    """
    width = max(width or shutil.get_terminal_size((160, 40)).columns, _NARROWEST)
    lines = _wrapped([summary_line(paired)], width)
    lines += [*_columns([f"left: {paired.left.path}"], [f"right: {paired.right.path}"], width)]
    for number, (left, right) in enumerate(paired.pairs[:num_printed], start=1):
        title = f" seed {left['seed']} (pair {number} of {len(paired.pairs)}) "
        lines += ["", title.center(width, "="), *_columns([headline(left)], [headline(right)], width)]
        for index in range(max(len(left["turns"]), len(right["turns"]))):
            lines.append(f" turn {index + 1} ".center(width, "-"))
            turns = [record["turns"][index] if index < len(record["turns"]) else None for record in (left, right)]
            if None not in turns and turns[0]["observation"] == turns[1]["observation"]:
                lines += [*_wrapped(["both see:", *shown(turns[0]["observation"]).split("\n")], width), ""]
                lines += _columns(*(_turn_lines(turn, observation=False) for turn in turns), width)
            else:
                lines += _columns(*(_turn_lines(turn, observation=True) for turn in turns), width)
    return "\n".join(line.rstrip() for line in lines)


def summary_line(paired: Paired) -> str:
    """How many pairs there are, who has no partner, and what both sides reach on the pairs."""
    returns = [_mean(pair[side]["return"] for pair in paired.pairs) for side in (0, 1)]
    success = [_mean(bool(pair[side]["success"]) for pair in paired.pairs) for side in (0, 1)]
    alone = f"; without a partner: {paired.alone_left} left, {paired.alone_right} right"
    return (
        f"{len(paired.pairs)} pairs{alone}. On the pairs: return {returns[0]:.3f} and {returns[1]:.3f}, success "
        f"{success[0]:.3f} and {success[1]:.3f}"
    )


def headline(record: Record) -> str:
    """An episode in a few words."""
    ended = "success" if record["success"] else "truncated" if record.get("truncated") else "no success"
    turns = len(record["turns"])
    return f"return {record['return']:.3f}, {ended}, {turns} turn{'' if turns == 1 else 's'}"


def numbers(turn: Mapping[str, Any]) -> str:
    """What is known of a turn beside its text; the critic's value only where there is one."""
    parts = [f"reward {turn['reward']:+.3f}"]
    parts += [f"{name} {turn[name]:+.3f}" for name in ("value", "advantage") if turn.get(name) is not None]
    parts += [f"{turn['num_tokens']} tokens"] if "num_tokens" in turn else []
    return ", ".join(parts + ([f"stop {turn['stop']}"] if turn.get("stop") else []))


def shown(text: str) -> str:
    """Text with its line breaks, and U+FFFD for what would steer a terminal or turn the order of letters."""
    return "".join(c if c == "\n" or c.isprintable() else "�" for c in text.replace("\t", "    "))


def _goal(record: Record) -> tuple[Any, Any]:
    return record["seed"], record.get("sampling")


def _turn_lines(turn: Mapping[str, Any] | None, *, observation: bool) -> list[str]:
    if turn is None:
        return ["(the episode is over)"]
    seen = ["sees:", *shown(turn["observation"]).split("\n"), ""] if observation else []
    return [*seen, "does:", *shown(turn["action"]).split("\n"), "", numbers(turn)]


def _columns(left: Sequence[str], right: Sequence[str], width: int) -> list[str]:
    half = (width - 3) // 2
    left, right = _wrapped(left, half), _wrapped(right, half)
    rows = max(len(left), len(right))
    left, right = left + [""] * (rows - len(left)), right + [""] * (rows - len(right))
    return [f"{a}{' ' * (half - cell_len(a))} | {b}" for a, b in zip(left, right)]


def _wrapped(lines: Sequence[str], width: int) -> list[str]:
    """Cut at the width of a column, after a space where there is one; counted in cells: some letters take two."""
    out = []
    for line in lines:
        while cell_len(line) > width:
            head = chop_cells(line, width)[0]
            at = head.rfind(" ") + 1 or len(head)
            out.append(line[:at])
            line = line[at:]
        out.append(line)
    return out


def _steps(directory: pathlib.Path) -> list[int]:
    numbers = [path.stem.removeprefix("step_") for path in directory.glob("trajectories/step_*.jsonl")]
    return sorted(int(number) for number in numbers if number.isdigit())


def _spans(steps: Sequence[int]) -> str:
    return f"{len(steps)} steps from {steps[0]} to {steps[-1]}" if steps else "none"


def _mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)

"""Compiled programs as text (HLO): computations, instructions, and the sizes of shapes."""

import dataclasses
import math
import re

_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_OPCODE = re.compile(r"([\w\-]+)\(")
_LAST_WORD = re.compile(r"%?([\w.\-]+)$")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
# Computations that run as often as their caller does; reducers (to_apply) run on single numbers and do not count.
_CALLED = re.compile(r"\bcalls=%?([\w.\-]+)")
_BITS = re.compile(r"[a-z]+(\d+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: unique in its computation.
      shape: as written, with layouts.
      opcode: "fusion", "all-gather", ...
      operands: names.
      attributes: everything behind the operands.
      literal: of a constant or the number of a parameter, what stands in the parentheses.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    literal: str

    def attribute(self, name: str) -> str | None:
        """The word behind "name=", None where it is not there."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return match and match[1]

    def called(self) -> list[str]:
        """Computations that run once whenever this instruction does; those of loops and conditionals are not here."""
        names = _CALLED.findall(self.attributes)
        if self.opcode == "call" and (target := self.attribute("to_apply")):
            names.append(target)
        return names

    def branches(self) -> list[str]:
        """Computations of a conditional, by the index that chooses them; the one for false comes first."""
        listed = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        if listed:
            return re.findall(r"[\w.\-]+", listed[1])
        return [self.attribute("false_computation"), self.attribute("true_computation")]


@dataclasses.dataclass
class Computation:
    """Instructions by name, in order, and the one whose value it returns."""

    name: str
    instructions: dict[str, Instruction]
    root: str = ""


@dataclasses.dataclass
class Module:
    """A compiled program."""

    computations: dict[str, Computation]
    entry: str


def parse(text: str) -> Module:
    """Reads the text of a compiled program.

    Raises:
      ValueError: there is no entry computation in it.
    """
    computations: dict[str, Computation] = {}
    entry, current, pending = "", None, ""
    for line in text.splitlines():
        if current is None:
            match = _COMPUTATION.match(line)
            if match:
                current = computations[match[2]] = Computation(match[2], {})
                entry = match[2] if match[1] else entry
            continue
        # An instruction may run over several lines: kernels carry text with line breaks, braces included. It ends where
        # the next one begins, the computation where a line is a single brace, with or without the core that runs it.
        ends = line == "}" or line.startswith("}, execution_thread=")
        if ends or _INSTRUCTION.match(line):
            if pending:
                _add(current, pending)
            pending = "" if ends else line
            current = None if ends else current
        else:
            pending += line
    if not entry:
        raise ValueError(f"no ENTRY computation in the text of {len(text)} characters; allowed: a compiled HLO module")
    return Module(computations, entry)


def num_bytes(shape: str, *, on_chip: bool = True) -> float:
    """Bytes of a shape, those of all elements of a tuple together.

    Args:
      shape: as written in the text.
      on_chip: whether arrays in the chip's small fast memory (spaces other than 0) count.
    """
    return sum(size for size, space in arrays(shape) if on_chip or space == 0)


def arrays(shape: str) -> list[tuple[float, int]]:
    """(bytes, memory space) of every array of a shape; space 0 is the device's main memory."""
    out = []
    for dtype, dimensions, layout in _ARRAY.findall(shape):
        bits = {"pred": 8, "token": 0, "opaque": 0}.get(dtype)
        bits = int(_BITS.match(dtype)[1]) if bits is None else bits
        count = math.prod(int(size.lstrip("<=")) for size in dimensions.split(",") if size)
        space = re.search(r"S\((\d+)\)", layout)
        out.append((count * bits / 8, int(space[1]) if space else 0))
    return out


def dimensions(shape: str) -> tuple[int, ...]:
    """Sizes of the axes of the first array of a shape."""
    return tuple(int(size.lstrip("<=")) for size in _ARRAY.search(shape)[2].split(",") if size)


def _add(computation: Computation, line: str) -> None:
    match = _INSTRUCTION.match(line)
    rest = line[match.end() :]
    end = _closing(rest) if rest.startswith("(") else rest.index(" ") - 1
    shape, rest = rest[: end + 1], rest[end + 2 :]
    opcode = _OPCODE.match(rest)
    rest = rest[opcode.end() - 1 :]
    end = _closing(rest)
    inside = rest[1:end]
    computation.instructions[match[2]] = Instruction(
        match[2], shape, opcode[1], _operands(opcode[1], inside), rest[end + 1 :], inside
    )
    if match[1]:
        computation.root = match[2]


def _operands(opcode: str, inside: str) -> tuple[str, ...]:
    """Names of the operands: the last word of each; their shapes may stand before them."""
    if opcode in ("constant", "parameter"):
        return ()
    parts, depth = [], 0
    for piece in inside.split(","):
        if depth:
            parts[-1] += piece
        else:
            parts.append(piece)
        depth += sum(map(piece.count, "([{")) - sum(map(piece.count, ")]}"))
    words = (_LAST_WORD.search(part.strip()) for part in parts)
    return tuple(word[1] for word in words if word)


def _closing(text: str) -> int:
    """Index of the parenthesis that closes the one at 0."""
    depth = 0
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return index
    raise ValueError(f"unbalanced parentheses in HLO: {text[:80]!r}")

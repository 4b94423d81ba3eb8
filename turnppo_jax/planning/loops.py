"""How often each computation of a compiled program runs.

The compiler's own counts take the body of a loop once. Here a computation counts as often as the loops around it run
it; the number of iterations is read from a loop's condition, as the text of a TPU program names it nowhere else.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

from turnppo_jax.planning.hlo import Instruction, Module


@dataclasses.dataclass(frozen=True)
class Visit:
    """A computation in one place of the program.

    Attributes:
      computation: its name.
      times: how often it runs there.
      caller: the visit of the computation that runs it; None for the entry.
      instruction: name of the instruction there that runs it.
      loops: dynamic loops around it.
    """

    computation: str
    times: float
    caller: "Visit | None" = None
    instruction: str = ""
    loops: int = 0


def visits(module: Module, dynamic_trips: Sequence[float] = (), branch: int = 0) -> Iterator[Visit]:
    """Every computation in every place where it runs, callers first.

    Args:
      module: from `hlo.parse`.
      dynamic_trips: iterations of loops whose number the program does not hold: the first for the outermost such loop,
        the next for those inside it.
      branch: of a conditional, the one that runs; 0 is that for false.

    Raises:
      ValueError: a loop with a dynamic number of iterations and no entry for it.
    """
    stack = [Visit(module.entry, 1.0)]
    while stack:
        visit = stack.pop()
        yield visit
        for instruction in module.computations[visit.computation].instructions.values():
            if instruction.opcode == "while":
                trips, loops = trip_count(module, visit, instruction), visit.loops
                if trips is None:
                    if loops >= len(dynamic_trips):
                        raise ValueError(
                            f"loop {instruction.name} in {visit.computation} has a dynamic number of iterations; "
                            f"dynamic_trips has {len(dynamic_trips)} entries, needs {loops + 1}"
                        )
                    trips, loops = dynamic_trips[loops], loops + 1
                for role in ("body", "condition"):
                    name = instruction.attribute(role)
                    stack.append(Visit(name, visit.times * trips, visit, instruction.name, loops))
            else:
                names = instruction.called()
                if instruction.opcode == "conditional":
                    names = instruction.branches()
                    names = [names[min(branch, len(names) - 1)]]
                for name in names:
                    if name in module.computations:
                        stack.append(Visit(name, visit.times, visit, instruction.name, visit.loops))


def trip_count(module: Module, visit: Visit, loop: Instruction) -> int | None:
    """Iterations of a while loop that counts up to a constant; None where the bound is computed at run time.

    Args:
      module: from `hlo.parse`.
      visit: where the loop stands.
      loop: the while instruction.
    """
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    inside = Visit(loop.attribute("condition"), 1.0, visit, loop.name)
    for left, right, direction in _comparisons(module, inside):
        for counter, bound in ((left, right), (right, left)):
            limit, index = _value(module, *bound), _carried(module, *counter)
            if limit is None or index is None:
                continue
            start, step = _start(module, visit, loop, index), _step(module, visit, loop, index)
            if start is None or not step:
                continue
            inclusive = math.copysign(1, step) if direction in ("LE", "GE") else 0
            return max(0, math.ceil((limit + inclusive - start) / step))
    return None


def _comparisons(module: Module, visit: Visit) -> Iterator[tuple]:
    """((visit, name) of the left side, of the right side, direction) of the comparisons that end a loop."""
    stack = [(visit, module.computations[visit.computation].root)]
    while stack:
        here, name = stack.pop()
        instruction = module.computations[here.computation].instructions[name]
        if instruction.opcode == "compare":
            left, right = instruction.operands
            yield (here, left), (here, right), instruction.attribute("direction")
        elif instruction.opcode == "fusion":
            target = instruction.called()[0]
            stack.append((Visit(target, 1.0, here, name), module.computations[target].root))
        elif instruction.opcode in ("and", "copy", "bitcast", "convert"):
            stack += [(here, operand) for operand in instruction.operands]


def _trace(module: Module, visit: Visit, name: str) -> tuple[Visit, Instruction]:
    """Where a value comes from: through copies, and from the parameters of fusions to what is passed in."""
    while True:
        instruction = module.computations[visit.computation].instructions[name]
        if instruction.opcode in ("copy", "bitcast", "convert", "reshape", "copy-done", "copy-start"):
            name = instruction.operands[0]
            continue
        caller = visit.caller
        if instruction.opcode == "parameter" and caller is not None:
            outer = module.computations[caller.computation].instructions[visit.instruction]
            if outer.opcode in ("fusion", "call"):
                visit, name = caller, outer.operands[int(instruction.literal)]
                continue
        return visit, instruction


def _carried(module: Module, visit: Visit, name: str) -> int | None:
    """Index in the loop's tuple of a value that the loop carries; None for other values."""
    where, instruction = _trace(module, visit, name)
    if instruction.opcode != "get-tuple-element":
        return None
    source = module.computations[where.computation].instructions[instruction.operands[0]]
    return int(instruction.attribute("index")) if source.opcode == "parameter" else None


def _value(module: Module, visit: Visit, name: str) -> int | None:
    """A whole number known when the program is compiled: a constant, or one that enclosing loops pass through."""
    where, instruction = _trace(module, visit, name)
    if instruction.opcode == "constant":
        return int(instruction.literal) if re.fullmatch(r"-?\d+", instruction.literal) else None
    index = _carried(module, where, instruction.name)
    caller = where.caller
    if index is None or caller is None:
        return None
    loop = module.computations[caller.computation].instructions[where.instruction]
    if loop.opcode != "while" or not _passes_through(module, loop, index):
        return None
    return _start(module, caller, loop, index)


def _passes_through(module: Module, loop: Instruction, index: int) -> bool:
    body = module.computations[loop.attribute("body")]
    root = body.instructions[body.root]
    if root.opcode != "tuple":
        return False
    return _carried(module, Visit(body.name, 1.0), root.operands[index]) == index


def _start(module: Module, visit: Visit, loop: Instruction, index: int) -> int | None:
    where, start = _trace(module, visit, loop.operands[0])
    return _value(module, where, start.operands[index]) if start.opcode == "tuple" else None


def _step(module: Module, visit: Visit, loop: Instruction, index: int) -> int | None:
    """What an iteration adds to the counter."""
    body = Visit(loop.attribute("body"), 1.0, visit, loop.name)
    instructions = module.computations[body.computation].instructions
    root = instructions[module.computations[body.computation].root]
    if root.opcode != "tuple":
        return None
    where, added = _trace(module, body, root.operands[index])
    if added.opcode == "fusion":
        inner = added.called()[0]
        where = Visit(inner, 1.0, where, added.name)
        where, added = _trace(module, where, module.computations[inner].root)
    if added.opcode not in ("add", "subtract"):
        return None
    sign = 1 if added.opcode == "add" else -1
    sides = [_value(module, where, operand) for operand in added.operands]
    return next((sign * value for value in reversed(sides) if value is not None), None)

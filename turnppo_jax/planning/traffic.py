"""Bytes that a compiled program moves through the main memory of one chip.

Every instruction reads its operands and writes its result, but for what stays in the chip's fast memory, what only
renames a buffer, and slices of larger buffers (the weights of one layer out of a stack), of which only the slice moves.
"""

from collections.abc import Iterator, Sequence

from turnppo_jax.planning import hlo, loops
from turnppo_jax.planning.hlo import Computation, Instruction, Module

# Names for buffers, control flow, and the second halves of asynchronous pairs.
_FREE = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional", "after-all")
    + ("partition-id", "replica-id", "opt-barrier", "add-dependency", "domain")
)
_THROUGH = frozenset(("bitcast", "reshape", "copy"))

_KERNEL = 'custom_call_target="tpu_custom_call"'


def memory_bytes(module: Module, dynamic_trips: Sequence[float] = (), branch: int = 0) -> float:
    """Bytes read and written in main memory by one run of the program, without those of Pallas kernels.

    What a kernel reads does not stand in the text: see `kernel_costs`.

    Args:
      module: from `hlo.parse`.
      dynamic_trips: see `loops.visits`.
      branch: see `loops.visits`.
    """
    inside = _fused(module)
    total = 0.0
    for visit in loops.visits(module, dynamic_trips, branch):
        if visit.computation in inside:
            continue
        computation = module.computations[visit.computation]
        for instruction in computation.instructions.values():
            total += visit.times * instruction_bytes(module, computation, instruction)
    return total


def instruction_bytes(module: Module, computation: Computation, instruction: Instruction) -> float:
    """Bytes read and written in main memory by one instruction outside of fusions."""
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith(("-done", "-update")) or _KERNEL in instruction.attributes:
        return 0.0
    operands = [computation.instructions[name] for name in instruction.operands if name in computation.instructions]
    if opcode == "fusion":
        fused = module.computations[instruction.called()[0]]
        read = sum(
            min(_in_memory(operand.shape), _read_of(module, fused, index)) for index, operand in enumerate(operands)
        )
        return read + _written(module, fused, instruction.shape)
    if opcode in ("dynamic-slice", "slice", "gather"):
        return 2 * _in_memory(instruction.shape)
    if opcode in ("dynamic-update-slice", "scatter"):
        return 2 * _in_memory(operands[1 if opcode == "dynamic-update-slice" else -1].shape)
    if opcode.endswith("-start"):
        return _started(instruction)
    return sum(_in_memory(operand.shape) for operand in operands) + _in_memory(instruction.shape)


def _started(instruction: Instruction) -> float:
    """Bytes of the first half of an asynchronous pair, whose shape holds what is read and what is written."""
    if instruction.called():
        return 0.0  # what it runs is visited by itself
    if "slice" in instruction.opcode:
        (_, source), (size, target), *_ = hlo.arrays(instruction.shape)
        return size * ((source == 0) + (target == 0))
    return _in_memory(instruction.shape)


def _in_memory(shape: str) -> float:
    return hlo.num_bytes(shape, on_chip=False)


def _fused(module: Module) -> set[str]:
    """Computations whose values never leave the chip one by one."""
    names: set[str] = set()
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            if instruction.opcode == "fusion":
                names.update(instruction.called())
    return names


def _read_of(module: Module, fused: Computation, index: int) -> float:
    """Bytes that a fusion reads of its operand number `index`; infinite for all of it."""
    parameter = next(
        one for one in fused.instructions.values() if one.opcode == "parameter" and int(one.literal) == index
    )
    total = 0.0
    for user, position in _users(fused, parameter.name):
        if user.opcode in ("dynamic-slice", "gather", "slice") and position == 0:
            total += hlo.num_bytes(user.shape)
        elif user.opcode == "dynamic-update-slice" and position == 0:
            continue  # written in place
        elif user.opcode == "fusion":
            total += _read_of(module, module.computations[user.called()[0]], position)
        elif user.opcode != "tuple":  # in the result it is the same buffer under another name
            return float("inf")
    return total


def _users(fused: Computation, name: str) -> Iterator[tuple[Instruction, int]]:
    """(instruction, operand number) of everything that reads a value, also under another name."""
    for instruction in fused.instructions.values():
        for position, operand in enumerate(instruction.operands):
            if operand == name:
                if instruction.opcode in _THROUGH and instruction.name != fused.root:
                    yield from _users(fused, instruction.name)
                else:
                    yield instruction, position


def _written(module: Module, fused: Computation, shape: str) -> float:
    """Bytes that a fusion writes of its results."""
    root = fused.instructions[fused.root]
    results = [fused.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
    sizes = hlo.arrays(shape)
    if len(sizes) != len(results):
        return sum(size for size, space in sizes if space == 0)
    total = 0.0
    for result, (size, space) in zip(results, sizes, strict=True):
        while result.opcode in _THROUGH and result.operands[0] in fused.instructions:
            result = fused.instructions[result.operands[0]]
        if space != 0 or result.opcode == "parameter":
            continue
        if result.opcode == "dynamic-update-slice":
            total += hlo.num_bytes(fused.instructions[result.operands[1]].shape)
        elif result.opcode == "fusion":
            total += _written(module, module.computations[result.called()[0]], result.shape)
        else:
            total += size
    return total

"""The collectives of a compiled or partitioned program, read from its HLO text."""

import dataclasses
import math
import pathlib
import re
import tempfile

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_LINE = re.compile(rf"= (.+?) ({'|'.join(_KINDS)})(?:-start)?\(")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction; `bytes` of its largest operand or result, whose type and shape are `dtype` and `shape`."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    line: str


def collectives(text):
    """Every collective in an HLO module's text."""
    found = []
    for line in text.splitlines():
        match = _LINE.search(line)
        if match:
            # The result, which may be a tuple, and the operands where the text gives their shapes.
            arrays = []
            for dtype, numbers in _SHAPE.findall(match[1]) + _SHAPE.findall(line[match.end() :].split("), ")[0]):
                if dtype in _BYTES:
                    shape = tuple(int(n) for n in numbers.split(",") if n)
                    arrays.append((_BYTES[dtype] * math.prod(shape), dtype, shape))
            size, dtype, shape = max(arrays)
            found.append(Collective(match[2], dtype, shape, size, line.strip()))
    return found


def partitioned_text(lowered, **options):
    """The text of a lowered program as the partitioner leaves it, before the backend changes any collective.

    A CPU multiplies and sums bfloat16 as float32; what crosses devices there has the width that the program asked
    for in this text alone.
    """
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd.*"}
        lowered.compile(compiler_options=dump | options)
        (path,) = (x for x in pathlib.Path(folder).iterdir() if re.search(r"\.after_(tpu-)?spmd-partitioning", x.name))
        return path.read_text()

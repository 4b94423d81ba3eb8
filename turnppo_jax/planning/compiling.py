"""Compiles one program for a topology under a memory limit, and keeps what the compiler said.

Results are kept in a folder, by a hash of the program, the options and the versions: compiling takes a minute, reading
a moment. (jax's own cache of compiled programs cannot be read back without the device.)
"""

import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
import tempfile
import time
from typing import Any

import jax

# Compiles in a third of the time with the same partitioning, but fuses less and schedules memory otherwise.
FAST = {"exec_time_optimization_effort": -1.0}
_PARTITIONING = "tpu-spmd-partitioning"
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One of the largest buffers of a program."""

    bytes: float
    shape: str


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler made of a program.

    Attributes:
      fits: whether it compiled under the limit; the compiler's own refusal decides.
      limit: bytes that it was given.
      arguments, outputs, aliased, temporaries: bytes a chip; outputs share the aliased bytes with arguments.
      peak: bytes a chip at the fullest moment, arguments included; what was asked for where it does not fit.
      seconds: it took.
      buffers: the largest, largest first.
      text: of the compiled program; of the last stage before the refusal where it does not fit.
      partitioned: text of the program of one chip before products are fused.
      cached: read from the folder of earlier results.
    """

    fits: bool
    limit: float
    arguments: float
    outputs: float
    aliased: float
    temporaries: float
    peak: float
    seconds: float
    buffers: tuple[Buffer, ...]
    text: str
    partitioned: str
    cached: bool = False


def compile_program(
    lowered: jax.stages.Lowered, *, limit: float, fast: bool, place: str, cache: pathlib.Path | None
) -> Compiled:
    """Compiles a lowered program.

    Args:
      lowered: for devices of a topology.
      limit: bytes of memory that the program may have, its arguments included.
      fast: less effort (`FAST`).
      place: names topology and devices, for the hash; the program's text does not hold them.
      cache: folder of earlier results; None keeps none.

    Raises:
      jax.errors.JaxRuntimeError: the compiler refuses for another reason than memory.
    """
    options: dict[str, Any] = dict(FAST) if fast else {}
    # Whole MiB: the option takes no less. At least one, as 0 means no limit.
    options["xla_tpu_max_hbm_size_mib"] = max(1, int(limit // 2**20))
    path = None if cache is None else cache / f"{_key(lowered, options, place)}.json.gz"
    if path is not None and path.is_file():
        return dataclasses.replace(_from_json(json.loads(gzip.decompress(path.read_bytes()))), cached=True)
    result = _compile(lowered, options, limit)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Renamed into place, so that a killed run leaves no half of a file behind.
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(gzip.compress(json.dumps(dataclasses.asdict(result)).encode(), 5, mtime=0))
        unfinished.rename(path)
    return result


def versions() -> dict[str, str]:
    """Versions of what decides about the result."""
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}


def default_cache() -> pathlib.Path:
    """The folder of results where none is named."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "turnppo_jax" / "plan"


def _key(lowered: jax.stages.Lowered, options: dict[str, Any], place: str) -> str:
    parts = [options, versions(), place, os.environ.get("LIBTPU_INIT_ARGS", ""), lowered.as_text()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _compile(lowered: jax.stages.Lowered, options: dict[str, Any], limit: float) -> Compiled:
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": _PARTITIONING}
        began = time.perf_counter()
        try:
            program = lowered.compile(compiler_options=options | dump)
        except jax.errors.JaxRuntimeError as error:
            needed = needed_bytes(str(error))
            if needed is None:
                raise
            fits, sizes, text = False, {"peak": needed}, _read(folder, "after_optimizations.txt")
        else:
            stats = program.memory_analysis()
            fits, text = True, program.as_text()
            sizes = {
                "arguments": stats.argument_size_in_bytes,
                "outputs": stats.output_size_in_bytes,
                "aliased": stats.alias_size_in_bytes,
                "temporaries": stats.temp_size_in_bytes,
                "peak": stats.peak_memory_in_bytes,
            }
        seconds = time.perf_counter() - began
        # Nothing is partitioned for a single device.
        partitioned = _read(folder, f"after_{_PARTITIONING}") or _read(folder, "before_optimizations.txt")
        buffers = largest_buffers(_read(folder, "memory-usage-report.txt"))
    sizes = {"arguments": 0, "outputs": 0, "aliased": 0, "temporaries": 0} | sizes
    return Compiled(fits, limit, **sizes, seconds=seconds, buffers=buffers, text=text, partitioned=partitioned)


def needed_bytes(message: str) -> float | None:
    """Bytes that a program asked for, from the compiler's refusal; None where memory is not the reason."""
    if "RESOURCE_EXHAUSTED" not in message or "hbm" not in message.lower():
        return None
    match = re.search(r"\((\d+(?:\.\d+)?)([KMGT])\) exceeds", message) or re.search(
        r"Used (\d+(?:\.\d+)?)([KMGT]) of", message
    )
    return float(match[1]) * _UNITS[match[2]] if match else None


def largest_buffers(report: str, count: int = 5) -> tuple[Buffer, ...]:
    """The largest buffers of main memory in the compiler's memory report."""
    spaces = report.split("Memory Space:")
    found = []
    for line in (spaces[1] if len(spaces) > 1 else "").splitlines():
        fields = [field.strip() for field in line.split(";")]
        size = re.fullmatch(r"([\d.]+)([KMGT]?)i?B", fields[1]) if len(fields) == 5 else None
        if size:
            found.append(Buffer(float(size[1]) * _UNITS.get(size[2], 1), fields[4]))
    return tuple(sorted(found, key=lambda buffer: -buffer.bytes)[:count])


def _read(folder: str, name: str) -> str:
    """Text of the file of the dump whose name holds `name`, "" where there is none."""
    for path in sorted(pathlib.Path(folder).iterdir()):
        if name in path.name and path.is_file():
            return path.read_text()
    return ""


def _from_json(fields: dict[str, Any]) -> Compiled:
    return Compiled(**fields | {"buffers": tuple(Buffer(**buffer) for buffer in fields["buffers"])})

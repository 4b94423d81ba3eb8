"""Command: does a config fit a TPU slice, and how fast can it be? Answered on a machine without a TPU.

    python -m turnppo_jax.plan --config=configs/NAME.py[:…] --topology=v5e:4x4[,v6e:4x4] [--output=DIR]

Compiles the run's own programs for the chips of the slice, each under the memory that the others leave, and counts what
they compute and move. Ends with 1 where a program does not fit. Needs the package libtpu, and no weights.
"""

import json
import pathlib

from absl import flags

from turnppo_jax import command_line
from turnppo_jax.models.sizes import ModelSizes
from turnppo_jax.planning import compiling, environment, record, report, topology
from turnppo_jax.planning.making import make_plan
from turnppo_jax.planning.model import model_sizes
from turnppo_jax.settings import RunSettings, run_settings
from turnppo_jax.training.json_lines import write_atomically

_CONFIG = command_line.config_flag()
_TOPOLOGY = flags.DEFINE_list("topology", [], "TPU slices, TYPE:XxY or TYPE:XxYxZ, separated by commas.")
_OUTPUT = flags.DEFINE_string("output", None, "Directory for plan.json and plan.txt.")
_EFFORT = flags.DEFINE_enum(
    "effort", "full", ["full", "fast"], "Effort of the compiler: fast takes a third of the time and plans memory worse."
)
_CACHE = flags.DEFINE_string("cache", None, "Directory of earlier compilations; 'none' for none.")


def plan(
    settings: RunSettings, sizes: ModelSizes, names: list[str], *, fast: bool, cache: pathlib.Path | None
) -> tuple[list[dict], str, bool]:
    """Plans a config for each of several slices and prints the tables.

    Returns:
      (records for plan.json, the text that was printed, whether everything fits everywhere).
    """
    slices = [topology.parse(name) for name in names]
    records, texts, fits = [], [], True
    for one in slices:
        made = make_plan(settings, sizes, one, fast=fast, cache=cache, say=lambda line: print(line, flush=True))
        records.append(record.record(made))
        texts.append(report.text(made))
        print("\n" + texts[-1], flush=True)
        fits = fits and made.fits
    return records, "\n".join(texts), fits


def main(_) -> int | None:
    """Plans as the flags say."""
    if not _TOPOLOGY.value:
        raise command_line.UserError("--topology=TYPE:XxY is missing, for example --topology=v5e:4x4")
    environment.prepare()
    cache = compiling.default_cache() if _CACHE.value is None else pathlib.Path(_CACHE.value)
    settings = run_settings(command_line.finalise(_CONFIG.value))
    records, printed, fits = plan(
        settings,
        model_sizes(settings.model.name),
        _TOPOLOGY.value,
        fast=_EFFORT.value == "fast",
        cache=None if _CACHE.value == "none" else cache,
    )
    if _OUTPUT.value is not None:
        folder = pathlib.Path(_OUTPUT.value)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "plan.json", (json.dumps(records, indent=2) + "\n").encode())
        write_atomically(folder / "plan.txt", printed.encode())
    return None if fits else 1


if __name__ == "__main__":
    command_line.run(main)

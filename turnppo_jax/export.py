"""Command: a trained actor as a Hugging Face directory that transformers loads.

    python -m turnppo_jax.export --workdir=runs/sokoban --output=models/sokoban [--step=200] [--dtype=bfloat16]

config.json, generation_config.json and the tokenizer's files are kept from the directory that the run started
from; the weights are the checkpoint's, under the names and in the dtype of that directory.
"""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from absl import flags

from turnppo_jax import command_line
from turnppo_jax.models.checkpoint_files import resolve_model
from turnppo_jax.models.sizes import SIZES
from turnppo_jax.parallel.mesh import make_mesh
from turnppo_jax.parallel.sharding import shardings
from turnppo_jax.policy import export_model
from turnppo_jax.rollout.builtin_tokenizer import build_tokenizer
from turnppo_jax.training.checkpoint import restore_actor_params

_WORKDIR = command_line.workdir_flag()
_OUTPUT = flags.DEFINE_string("output", None, "Directory to write.")
_STEP = flags.DEFINE_integer("step", None, "Step of the checkpoint; default the newest.")
_SOURCE = flags.DEFINE_string("source", None, "Model directory or hub id to keep config and tokenizer files from; "
                              "default the run's model.")  # fmt: skip
_DTYPE = flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], "Of the weights; default the source's.")


def export_workdir(
    workdir: str | os.PathLike,
    output: str | os.PathLike,
    *,
    step: int | None = None,
    source: str | None = None,
    dtype: str | None = None,
) -> pathlib.Path:
    """`export_model` of the actor in a run's checkpoint.

    Args:
      workdir: of the run.
      output: directory to write.
      step: of the checkpoint; None takes the newest.
      source: model directory or hub id; None takes what the run's config names as its model. A run that began
        from one of `SIZES` has no source: its config.json is made from the sizes, its tokenizer is the built-in one.
      dtype: see `export_model`.

    Raises:
      ValueError: no checkpoint, no source, or as `export_model`.
    """
    params, sizes, config = restore_actor_params(workdir, step, shardings=_spread)
    model = config.get("model") or {}
    if not isinstance(model, Mapping):
        model = {"name": model}
    source = source or model.get("name")
    if source is None:
        raise ValueError(f"{workdir}: the run's config names no model; pass --source")
    if source in SIZES and not pathlib.Path(source).is_dir():
        return export_model(params, sizes, output, tokenizer=build_tokenizer(model.get("words", ())), dtype=dtype)
    return export_model(params, sizes, output, source=resolve_model(source), dtype=dtype)


def _spread(shapes: Any) -> Any:
    """Shardings over the devices here: a model that trained on many of them may not fit on one."""
    devices = jax.local_devices()
    return shardings(make_mesh(fsdp=len(devices), devices=devices), shapes)


def main(argv: Sequence[str]) -> None:
    """Checks the flags, exports, prints where."""
    for flag in (_WORKDIR, _OUTPUT):
        if not flag.value:
            raise command_line.UserError(f"flag --{flag.name} is missing")
    output = export_workdir(_WORKDIR.value, _OUTPUT.value, step=_STEP.value, source=_SOURCE.value, dtype=_DTYPE.value)
    print(f"export: wrote {output}")


if __name__ == "__main__":
    command_line.run(main)

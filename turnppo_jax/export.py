"""Command: a trained actor as a Hugging Face directory that transformers loads.

    python -m turnppo_jax.export --workdir=runs/sokoban --output=models/sokoban [--step=200] [--dtype=bfloat16]

config.json, generation_config.json and the tokenizer's files are kept from the directory that the run started
from; the weights are the checkpoint's, under the names and in the dtype of that directory.
"""

import json
import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from turnppo_jax import command_line
from turnppo_jax.models.checkpoint_files import load_model_config, resolve_model, save_weights
from turnppo_jax.models.sizes import SIZES, ModelSizes
from turnppo_jax.rollout.builtin_tokenizer import build_tokenizer
from turnppo_jax.training.checkpoint import restore_actor_params

_WORKDIR = flags.DEFINE_string("workdir", None, "Run directory with checkpoints.")
_OUTPUT = flags.DEFINE_string("output", None, "Directory to write.")
_STEP = flags.DEFINE_integer("step", None, "Step of the checkpoint; default the newest.")
_SOURCE = flags.DEFINE_string("source", None, "Model directory or hub id to keep config and tokenizer files from; "
                              "default the run's model.")  # fmt: skip
_DTYPE = flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], "Of the weights; default the source's.")

KEPT_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def export_model(
    params: Any,
    sizes: ModelSizes,
    output: str | os.PathLike,
    *,
    source: str | os.PathLike | None = None,
    tokenizer: Any = None,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
) -> pathlib.Path:
    """Writes a Hugging Face model directory.

    Args:
      params: of the decoder.
      sizes: of the decoder.
      output: directory; files of the same names are replaced.
      source: directory whose config.json (but for the dtype), generation_config.json and tokenizer files are
        kept; None writes a config.json from the sizes.
      tokenizer: where there is no source, a transformers tokenizer to write beside the weights.
      dtype: "float32" or "bfloat16"; None takes the source's, float32 where there is none.
      max_shard_bytes: see `save_weights`.

    Returns:
      The directory.

    Raises:
      ValueError: the source's config.json does not fit the sizes, `output` is `source`, unknown dtype.
    """
    output = pathlib.Path(output)
    if source is None:
        dtype = dtype or "float32"
        config = sizes.to_hf_config(dtype)
        if tokenizer is not None:
            # Without them transformers would take the family's own ids and never stop, or stop at a letter.
            config |= {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    else:
        source = pathlib.Path(source)
        if output.resolve() == source.resolve():
            raise ValueError(f"output {output} is the source directory; choose another")
        source_sizes, config = load_model_config(source)
        _check_same(sizes, source_sizes, source)
        kept = config.get("dtype", config.get("torch_dtype"))
        dtype = dtype or (kept if kept in ("float32", "bfloat16") else "float32")
        for field in ("dtype", "torch_dtype"):
            if field in config:
                config[field] = dtype
        if kept is None:
            config["torch_dtype"] = dtype
    limit = {} if max_shard_bytes is None else {"max_shard_bytes": max_shard_bytes}
    save_weights(params, sizes, output, dtype, **limit)
    if source is None:
        if tokenizer is not None:
            tokenizer.save_pretrained(output)
    else:
        for name in KEPT_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, output / name)
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return output


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
    params, sizes, config = restore_actor_params(workdir, step)
    source = source or _model_name(config)
    if source is None:
        raise ValueError(f"{workdir}: the run's config names no model; pass --source")
    if source in SIZES and not pathlib.Path(source).is_dir():
        return export_model(params, sizes, output, tokenizer=build_tokenizer(), dtype=dtype)
    return export_model(params, sizes, output, source=resolve_model(source), dtype=dtype)


def _model_name(config: Mapping[str, Any]) -> str | None:
    """The run's model: config field `model`, itself a name or a group with a `name`."""
    model = config.get("model")
    if isinstance(model, Mapping):
        model = model.get("name")
    return model or None


def _check_same(sizes: ModelSizes, source_sizes: ModelSizes, source: pathlib.Path) -> None:
    for field, value in vars(sizes).items():
        # config.json does not hold the number of ids; float fields pass through JSON unchanged.
        if field != "num_token_ids" and getattr(source_sizes, field) != value:
            raise ValueError(
                f"source {source}: {field} is {getattr(source_sizes, field)} in its config.json and {value} in the "
                "parameters; pass --source of the model that the run began from"
            )


def main(argv: Sequence[str]) -> None:
    """Checks the flags, exports, prints where."""
    for flag in (_WORKDIR, _OUTPUT):
        if not flag.value:
            raise command_line.UserError(f"flag --{flag.name} is missing")
    output = export_workdir(_WORKDIR.value, _OUTPUT.value, step=_STEP.value, source=_SOURCE.value, dtype=_DTYPE.value)
    print(f"export: wrote {output}")


if __name__ == "__main__":
    command_line.run(main)

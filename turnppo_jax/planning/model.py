"""Sizes of the model that a config names, without its weights."""

import pathlib
import re

from turnppo_jax.command_line import UserError
from turnppo_jax.models.checkpoint_files import load_model_config
from turnppo_jax.models.sizes import SIZES, ModelSizes

# What publishers add to the name of one and the same shape.
_VARIANTS = re.compile(r"-(instruct|base|chat|thinking|it|\d{4})$")


def model_sizes(name: str) -> ModelSizes:
    """Sizes of `config.model.name`.

    A directory in Hugging Face format is read, and so is a hub id that was downloaded before; of other hub ids the
    last part, without "-Instruct" and the like, must be a key of `models.sizes.SIZES`. A key alone means the published
    vocabulary, which is more than fresh weights with the built-in tokenizer have.

    Raises:
      UserError: the name is none of these; the known sizes are listed.
      ValueError: a config.json that the decoder does not compute.
    """
    directory = pathlib.Path(name).expanduser()
    if not directory.is_dir():
        directory = _downloaded(name)
    if directory is not None:
        return load_model_config(directory)[0]
    key = name.split("/")[-1].lower()
    while key not in SIZES and (shorter := _VARIANTS.sub("", key)) != key:
        key = shorter
    if key not in SIZES:
        raise UserError(
            f"config.model.name={name!r}: no directory, not downloaded, and no known size; known: {', '.join(SIZES)}"
        )
    return SIZES[key]


def _downloaded(name: str) -> pathlib.Path | None:
    """The folder of a hub id in the local cache of downloads; nothing is fetched."""
    if name.count("/") != 1:
        return None
    import huggingface_hub

    found = huggingface_hub.try_to_load_from_cache(name, "config.json")
    return pathlib.Path(found).parent if isinstance(found, str) else None

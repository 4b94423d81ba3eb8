"""The policy that a run begins from: weights, sizes and chat from a model's name; and back into a directory.

A name is a directory in Hugging Face format, a hub id, or one of `models.sizes.SIZES`. The last makes fresh
weights of that shape with the built-in tokenizer.
"""

import dataclasses
import json
import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from turnppo_jax.models.checkpoint_files import load_model_config, load_weights, resolve_model
from turnppo_jax.models.decoder import decoder_shapes, init_decoder
from turnppo_jax.models.sizes import SIZES, ModelSizes
from turnppo_jax.models.weight_saving import save_weights
from turnppo_jax.parallel.agreement import together
from turnppo_jax.parallel.hosts import is_first
from turnppo_jax.parallel.sharding import shardings
from turnppo_jax.rollout.builtin_tokenizer import build_tokenizer
from turnppo_jax.rollout.chat import Chat, load_tokenizer

# What a model directory holds beside config and weights.
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
# The vocabulary of fresh models is rounded up to this, so that meshes can split it.
_VOCAB_MULTIPLE = 8


@dataclasses.dataclass(frozen=True)
class Policy:
    """What a run begins from.

    Attributes:
      params: of the decoder, float32; None where they come from elsewhere.
      sizes: of the decoder; `num_token_ids` is the tokenizer's.
      chat: messages to tokens and back.
      tokenizer: the transformers tokenizer behind it.
      source: the directory that it was loaded from; None for fresh weights.
    """

    params: Any
    sizes: ModelSizes
    chat: Chat
    tokenizer: Any
    source: pathlib.Path | None


def load_policy(
    name: str,
    *,
    seed: int,
    mesh: Mesh | None = None,
    thinking: bool = True,
    chat_template: str = "",
    words: Sequence[str] = (),
    weights: bool = True,
) -> Policy:
    """Loads a model with its tokenizer, or makes a fresh one.

    Args:
      name: directory, hub id, or a key of `SIZES` (a directory of that name wins).
      seed: of fresh weights.
      mesh: places the parameters by the sharding rules, each device's part made or read for it alone; None leaves
        them on the default device.
      thinking: see `Chat`.
      chat_template: see `load_tokenizer`.
      words: of a fresh model; see `builtin_tokenizer.vocabulary`.
      weights: False makes and reads none; a checkpoint has them.

    Raises:
      ValueError: no such model, or a tokenizer with more ids than the embedding has rows.
    """
    if name in SIZES and not pathlib.Path(name).is_dir():
        tokenizer = build_tokenizer(words)
        chat = Chat(tokenizer, thinking=thinking)
        rows = -(-chat.num_token_ids // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
        sizes = dataclasses.replace(SIZES[name], vocab_size=rows, num_token_ids=chat.num_token_ids)
        params = init_decoder(sizes, jax.random.key(seed), shardings=_places(mesh, sizes)) if weights else None
        return Policy(params, sizes, chat, tokenizer, None)
    directory = resolve_model(name)
    tokenizer = load_tokenizer(directory, template=chat_template)
    chat = Chat(tokenizer, thinking=thinking)
    sizes, _ = load_model_config(directory)
    if chat.num_token_ids > sizes.vocab_size:
        raise ValueError(
            f"model {name!r}: its tokenizer has ids up to {chat.num_token_ids - 1}, its embedding only "
            f"{sizes.vocab_size} rows"
        )
    sizes = dataclasses.replace(sizes, num_token_ids=chat.num_token_ids)
    params = load_weights(directory, sizes, jnp.float32, _places(mesh, sizes)) if weights else None
    return Policy(params, sizes, chat, tokenizer, directory)


def save_policy(policy: Policy, directory: str | os.PathLike, dtype: str = "float32") -> None:
    """Writes a policy as a directory that `load_policy` and transformers read; see `export_model`."""
    export_model(policy.params, policy.sizes, directory, source=policy.source, tokenizer=policy.tokenizer, dtype=dtype)


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
      The directory. With several processes all must call; process 0 writes, the others return when it stands.

    Raises:
      ValueError: the source's config.json does not fit the sizes, `output` is `source`, unknown dtype.
      OSError: the files cannot be written; the other processes raise `HostError`.
    """
    output, source = pathlib.Path(output), None if source is None else pathlib.Path(source)
    with together():
        if source is None:
            config, dtype = _own_config(sizes, tokenizer, dtype or "float32")
        elif output.resolve() == source.resolve():
            raise ValueError(f"output {output} is the source directory; choose another")
        else:
            config, dtype = _kept_config(sizes, source, dtype)
    limit = {} if max_shard_bytes is None else {"max_shard_bytes": max_shard_bytes}
    save_weights(params, sizes, output, dtype, **limit)
    with together():
        if is_first():
            if source is not None:
                for name in KEPT_FILES:
                    if (source / name).is_file():
                        shutil.copyfile(source / name, output / name)
            elif tokenizer is not None:
                tokenizer.save_pretrained(output)
            (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return output


def _own_config(sizes: ModelSizes, tokenizer: Any, dtype: str) -> tuple[dict[str, Any], str]:
    """(config.json of a model that has no source, dtype of its weights)."""
    config = sizes.to_hf_config(dtype)
    if tokenizer is not None:
        # Without them transformers would take the family's own ids and never stop, or stop at a letter.
        config |= {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    return config, dtype


def _kept_config(sizes: ModelSizes, source: pathlib.Path, dtype: str | None) -> tuple[dict[str, Any], str]:
    """(the source's config.json with the dtype of the weights in it, that dtype)."""
    source_sizes, config = load_model_config(source)
    _check_same(sizes, source_sizes, source)
    kept = config.get("dtype", config.get("torch_dtype"))
    dtype = dtype or (kept if kept in ("float32", "bfloat16") else "float32")
    for field in ("dtype", "torch_dtype"):
        if field in config:
            config[field] = dtype
    if kept is None:
        config["torch_dtype"] = dtype
    return config, dtype


def _places(mesh: Mesh | None, sizes: ModelSizes) -> Any:
    return None if mesh is None else shardings(mesh, decoder_shapes(sizes))


def _check_same(sizes: ModelSizes, source_sizes: ModelSizes, source: pathlib.Path) -> None:
    for field, value in vars(sizes).items():
        # config.json does not hold the number of ids; float fields pass through JSON unchanged.
        if field != "num_token_ids" and getattr(source_sizes, field) != value:
            raise ValueError(
                f"source {source}: {field} is {getattr(source_sizes, field)} in its config.json and {value} in the "
                "parameters; pass --source of the model that the run began from"
            )

"""The policy that a run begins from: weights, sizes and chat from a model's name; and back into a directory.

A name is a directory in Hugging Face format, a hub id, or one of `models.sizes.SIZES`. The last makes fresh
weights of that shape with the built-in tokenizer.
"""

import dataclasses
import json
import os
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp

from turnppo_jax.models.checkpoint_files import load_model_config, load_weights, resolve_model, save_weights
from turnppo_jax.models.decoder import decoder_shapes, init_decoder
from turnppo_jax.models.sizes import SIZES, ModelSizes
from turnppo_jax.parallel.sharding import shard, shardings
from turnppo_jax.rollout.builtin_tokenizer import build_tokenizer
from turnppo_jax.rollout.chat import Chat, load_tokenizer

# The vocabulary of fresh models is rounded up to this, so that meshes can split it.
_VOCAB_MULTIPLE = 8


@dataclasses.dataclass(frozen=True)
class Policy:
    """What a run begins from.

    Attributes:
      params: of the decoder, float32.
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


def load_policy(name: str, *, seed: int, mesh=None, thinking: bool = True, chat_template: str = "") -> Policy:
    """Loads a model with its tokenizer, or makes a fresh one.

    Args:
      name: directory, hub id, or a key of `SIZES` (a directory of that name wins).
      seed: of fresh weights.
      mesh: places the parameters by the sharding rules; None leaves them on the default device.
      thinking: see `Chat`.
      chat_template: see `load_tokenizer`.

    Raises:
      ValueError: no such model, or a tokenizer with more ids than the embedding has rows.
    """
    if name in SIZES and not pathlib.Path(name).is_dir():
        tokenizer = build_tokenizer()
        chat = Chat(tokenizer, thinking=thinking)
        rows = -(-chat.num_token_ids // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
        sizes = dataclasses.replace(SIZES[name], vocab_size=rows, num_token_ids=chat.num_token_ids)
        params = init_decoder(sizes, jax.random.key(seed))
        return Policy(params if mesh is None else shard(mesh, params), sizes, chat, tokenizer, None)
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
    places = None if mesh is None else shardings(mesh, decoder_shapes(sizes))
    return Policy(load_weights(directory, sizes, jnp.float32, places), sizes, chat, tokenizer, directory)


def save_policy(policy: Policy, directory: str | os.PathLike, dtype: str = "float32") -> None:
    """Writes weights, config.json and tokenizer as a directory that `load_policy` and transformers read.

    Raises:
      ValueError: unknown dtype; the directory is the one that the policy was loaded from.
    """
    directory = pathlib.Path(directory)
    if policy.source is not None and directory.resolve() == policy.source.resolve():
        raise ValueError(f"{directory} is the directory that the model was loaded from; choose another")
    save_weights(policy.params, policy.sizes, directory, dtype)
    policy.tokenizer.save_pretrained(directory)
    if policy.source is None:
        ids = {"bos_token_id": None, "eos_token_id": policy.chat.end_id, "pad_token_id": policy.chat.pad_id}
        config = policy.sizes.to_hf_config(dtype) | ids
    else:
        _, config = load_model_config(policy.source)
        config = {key: value for key, value in config.items() if key != "dtype"} | {"torch_dtype": dtype}
        if (policy.source / "generation_config.json").is_file():
            shutil.copyfile(policy.source / "generation_config.json", directory / "generation_config.json")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

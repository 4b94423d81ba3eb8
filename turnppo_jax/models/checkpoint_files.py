"""Model directories in Hugging Face format: config.json and safetensors weights, in and out.

Tensors pass one at a time: the most that is held beside the parameters is one tensor (in) or one shard (out).
"""

import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from turnppo_jax.models.parameters import decoder_shapes
from turnppo_jax.models.sizes import ModelSizes
from turnppo_jax.models.tensor_files import INDEX_FILE, SINGLE_FILE, TensorFiles, read_json

# Size at which transformers starts a new shard.
MAX_SHARD_BYTES = 5_000_000_000

_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

# Parameter path below "layers" -> name of the tensor below "model.layers.<index>.".
_LAYER_NAMES = {
    "attention_norm/scale": "input_layernorm.weight",
    "attention/q/kernel": "self_attn.q_proj.weight",
    "attention/q/bias": "self_attn.q_proj.bias",
    "attention/k/kernel": "self_attn.k_proj.weight",
    "attention/k/bias": "self_attn.k_proj.bias",
    "attention/v/kernel": "self_attn.v_proj.weight",
    "attention/v/bias": "self_attn.v_proj.bias",
    "attention/o/kernel": "self_attn.o_proj.weight",
    "attention/q_norm/scale": "self_attn.q_norm.weight",
    "attention/k_norm/scale": "self_attn.k_norm.weight",
    "mlp_norm/scale": "post_attention_layernorm.weight",
    "mlp/gate/kernel": "mlp.gate_proj.weight",
    "mlp/up/kernel": "mlp.up_proj.weight",
    "mlp/down/kernel": "mlp.down_proj.weight",
}
_TOP_NAMES = {
    "embed/embedding": "model.embed_tokens.weight",
    "final_norm/scale": "model.norm.weight",
    "lm_head/kernel": "lm_head.weight",
}
# Tables of rotary frequencies that old checkpoints carry; they are computed, not loaded.
_COMPUTED_SUFFIX = "rotary_emb.inv_freq"


def load_model_config(directory: str | os.PathLike) -> tuple[ModelSizes, dict[str, Any]]:
    """Sizes, and the contents of the directory's config.json.

    Raises:
      ValueError: there is no config.json, it is not JSON, or it asks for what the decoder does not compute.
    """
    path = pathlib.Path(directory) / "config.json"
    if not path.is_file():
        raise ValueError(f"no config.json in {directory}")
    config = read_json(path)
    return ModelSizes.from_hf_config(config), config


def resolve_model(name_or_path: str | os.PathLike) -> pathlib.Path:
    """The directory of a model: itself where it exists, else a download of that hub id.

    Raises:
      ValueError: neither a directory nor an id that the hub gives; says why in one line.
    """
    path = pathlib.Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    name = str(name_or_path)
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"model {name!r}: no such directory (and not of the form of a hub id, owner/name)")
    import huggingface_hub

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # whatever the network or the hub did, the user needs the one line
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"model {name!r}: not a directory here, and the hub did not give it: {reason}") from error


def load_weights(directory: str | os.PathLike, sizes: ModelSizes, dtype: Any, shardings: Any = None) -> dict:
    """Parameters of `decoder_shapes(sizes)` from `model.safetensors` or from the shards of its index.

    Args:
      directory: of the model.
      sizes: what the parameters must be.
      dtype: of the result.
      shardings: tree of `jax.sharding.Sharding` like the parameters, or None for the default device.

    Returns:
      Parameters, each filled exactly once.

    Raises:
      ValueError: a tensor that is missing, unknown, doubled or of another shape, a shard that is missing, a
        tied checkpoint whose `lm_head.weight` differs from its embedding; each by name.
    """
    with TensorFiles(pathlib.Path(directory)) as files:
        return _load(files, sizes, jnp.dtype(dtype), shardings)


def save_weights(
    params: Any,
    sizes: ModelSizes,
    directory: str | os.PathLike,
    dtype: str,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes `model.safetensors`, or shards with an index where it would pass `max_shard_bytes`.

    Weights of another layout already in the directory (a single file, an index, its shards) are removed
    after the new ones stand, so that it never holds two sets.

    Args:
      params: tree of `decoder_shapes(sizes)`.
      sizes: of the decoder.
      directory: made where it is missing.
      dtype: "float32" or "bfloat16".
      max_shard_bytes: of one file; a larger tensor gets a file of its own.

    Raises:
      ValueError: unknown dtype, parameters that do not fit the sizes.
    """
    if str(dtype) not in _DTYPES:
        raise ValueError(f"dtype={dtype!r}; allowed: {', '.join(_DTYPES)}")
    target = _DTYPES[str(dtype)]
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    leaves = _checked_leaves(params, sizes)
    shards = _plan_shards(sizes, leaves, target.itemsize, max_shard_bytes)
    single = len(shards) == 1
    names = [SINGLE_FILE] if single else [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in _count(shards)]
    for file_name, shard in zip(names, shards, strict=True):
        tensors = {}
        for name, path, index in shard:
            leaf = leaves[path] if index is None else leaves[path][index]
            tensors[name] = np.ascontiguousarray(_to_hf(path, np.asarray(leaf)).astype(target))
        _write_tensors(tensors, directory / file_name)
    stale = {path.name for path in directory.glob("model*.safetensors")} - set(names)
    if single:
        stale |= {INDEX_FILE}
    else:
        weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name, _, _ in shard}
        total = sum(int(np.prod(leaf.shape)) for leaf in leaves.values()) * target.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_text(directory / INDEX_FILE, json.dumps(index, indent=2))
    for name in stale:
        (directory / name).unlink(missing_ok=True)


def tensor_names(sizes: ModelSizes) -> list[str]:
    """Names of the tensors of a checkpoint of these sizes, in the order of the layers."""
    return [name for name, _, _ in _entries(sizes)]


def _entries(sizes: ModelSizes) -> Iterator[tuple[str, str, int | None]]:
    """(tensor name, parameter path, layer index or None), embedding first, head last."""
    paths = _paths(decoder_shapes(sizes))
    yield _TOP_NAMES["embed/embedding"], "embed/embedding", None
    for index in range(sizes.num_layers):
        for path, name in _LAYER_NAMES.items():
            if f"layers/{path}" in paths:
                yield f"model.layers.{index}.{name}", f"layers/{path}", index
    for path in ("final_norm/scale", "lm_head/kernel"):
        if path in paths:
            yield _TOP_NAMES[path], path, None


def _paths(tree: Any) -> dict[str, Any]:
    return {"/".join(k.key for k in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _checked_leaves(params: Any, sizes: ModelSizes) -> dict[str, Any]:
    leaves, wanted = _paths(params), _paths(decoder_shapes(sizes))
    for path in sorted(wanted.keys() ^ leaves.keys()):
        raise ValueError(f"parameter {path} is {'missing' if path in wanted else 'unknown'}")
    for path, shape in wanted.items():
        if tuple(leaves[path].shape) != shape.shape:
            raise ValueError(f"parameter {path} has shape {tuple(leaves[path].shape)}, the sizes say {shape.shape}")
    return leaves


def _from_hf(path: str, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Kernels are [out, in] in the files and [in, out] here, heads split; embedding and head stay [V, D]."""
    is_projection = path.startswith("layers/") and path.endswith("/kernel")
    return (tensor.T if is_projection else tensor).reshape(shape)


def _to_hf(path: str, leaf: np.ndarray) -> np.ndarray:
    """Inverse of `_from_hf`; `leaf` is that of one layer."""
    if not path.startswith("layers/"):
        return leaf
    if path.endswith("/bias"):
        return leaf.reshape(-1)
    if not path.endswith("/kernel"):
        return leaf
    inputs = leaf.shape[0] * leaf.shape[1] if path.endswith("/o/kernel") else leaf.shape[0]
    return leaf.reshape(inputs, -1).T


def _hf_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return _to_hf(path, np.broadcast_to(np.int8(0), shape)).shape


def _load(files: TensorFiles, sizes: ModelSizes, dtype: np.dtype, shardings: Any) -> dict:
    shapes = decoder_shapes(sizes)
    entries: dict[str, list[tuple[str, int | None]]] = {}
    for name, path, index in _entries(sizes):
        entries.setdefault(path, []).append((name, index))
    wanted = set(tensor_names(sizes))
    missing, unknown = sorted(wanted - files.names), sorted(files.names - wanted)
    unknown = [name for name in unknown if not name.endswith(_COMPUTED_SUFFIX)]
    redundant_head = sizes.tie_word_embeddings and "lm_head.weight" in unknown
    if redundant_head:
        unknown.remove("lm_head.weight")
    if missing or unknown:
        kind, names = ("missing", missing) if missing else ("unknown", unknown)
        raise ValueError(f"{files.directory}: {kind} tensor {names[0]}" + _and_more(names))

    def fill(path: Any, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        path = "/".join(key.key for key in path)
        per_layer = shape.shape[1:] if path.startswith("layers/") else shape.shape
        expected = _hf_shape(path, per_layer)
        filled = np.empty(shape.shape, dtype)
        for name, index in entries[path]:
            tensor = files.read(name)
            if tensor.shape != expected:
                raise ValueError(f"{files.directory}: tensor {name} has shape {tensor.shape}, expected {expected}")
            filled[... if index is None else index] = _from_hf(path, tensor, per_layer).astype(dtype)
        return filled

    if redundant_head and not np.array_equal(
        files.read("lm_head.weight").view(np.uint8), files.read("model.embed_tokens.weight").view(np.uint8)
    ):
        raise ValueError(
            f"{files.directory}: config.json ties the embeddings, but tensor lm_head.weight differs from "
            "model.embed_tokens.weight"
        )
    if shardings is None:
        return jax.tree.map_with_path(lambda path, shape: jnp.asarray(fill(path, shape)), shapes)

    def place(path: Any, shape: jax.ShapeDtypeStruct, sharding: Any) -> jax.Array:
        filled = fill(path, shape)
        return jax.make_array_from_callback(shape.shape, sharding, lambda index: filled[index])

    return jax.tree.map_with_path(place, shapes, shardings)


def _plan_shards(
    sizes: ModelSizes, leaves: dict[str, Any], itemsize: int, max_shard_bytes: int
) -> list[list[tuple[str, str, int | None]]]:
    """Entries in order, cut before the one that would pass the limit."""
    shards, filled = [[]], 0
    for name, path, index in _entries(sizes):
        shape = leaves[path].shape if index is None else leaves[path].shape[1:]
        size = int(np.prod(shape)) * itemsize
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append((name, path, index))
        filled += size
    return shards


def _write_tensors(tensors: dict[str, np.ndarray], path: pathlib.Path) -> None:
    # Renamed into place, so that a reader never meets half a file. The metadata is what transformers asks for.
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, path)


def _write_text(path: pathlib.Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text + "\n")
    os.replace(partial, path)


def _count(items: list) -> range:
    return range(1, len(items) + 1)


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""

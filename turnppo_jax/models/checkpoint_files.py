"""Model directories in Hugging Face format, inwards: config.json, and safetensors weights onto their devices.

A device's part of one parameter is filled layer by layer from slices of the files and handed over before the next one
begins, so that a part is the most that a host holds beside the arrays themselves.
"""

import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from turnppo_jax.models.parameters import decoder_shapes
from turnppo_jax.models.sizes import ModelSizes
from turnppo_jax.models.tensor_files import TensorFiles, read_json
from turnppo_jax.models.tensor_layout import COMPUTED_SUFFIX, Tensor, row_blocks, tensors_of


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

    Each process reads what its own devices hold, a part that several of them hold once. Everything is checked before
    the first array is made.

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
        tensors = tensors_of(sizes)
        _check_tensors(files, tensors, sizes)
        by_path: dict[str, list[Tensor]] = {}
        for tensor in tensors:
            by_path.setdefault(tensor.path, []).append(tensor)
        shapes = decoder_shapes(sizes, jnp.dtype(dtype))
        if shardings is None:
            shardings = jax.tree.map(lambda _: None, shapes)

        def load(path: Any, leaf: jax.ShapeDtypeStruct, sharding: Sharding | None) -> jax.Array:
            return _load_parameter(files, by_path["/".join(key.key for key in path)], leaf, sharding)

        return jax.tree.map_with_path(load, shapes, shardings)


def _check_tensors(files: TensorFiles, tensors: list[Tensor], sizes: ModelSizes) -> None:
    wanted = {tensor.name for tensor in tensors}
    missing, unknown = sorted(wanted - files.names), sorted(files.names - wanted)
    unknown = [name for name in unknown if not name.endswith(COMPUTED_SUFFIX)]
    redundant_head = sizes.tie_word_embeddings and "lm_head.weight" in unknown
    if redundant_head:
        unknown.remove("lm_head.weight")
    if missing or unknown:
        kind, names = ("missing", missing) if missing else ("unknown", unknown)
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        raise ValueError(f"{files.directory}: {kind} tensor {names[0]}{more}")
    for tensor in tensors:
        shape = files.shape(tensor.name)
        if shape != tensor.shape:
            raise ValueError(f"{files.directory}: tensor {tensor.name} has shape {shape}, expected {tensor.shape}")
    if redundant_head and not _equal(files, "lm_head.weight", "model.embed_tokens.weight"):
        raise ValueError(
            f"{files.directory}: config.json ties the embeddings, but tensor lm_head.weight differs from "
            "model.embed_tokens.weight"
        )


def _equal(files: TensorFiles, one: str, other: str) -> bool:
    """Whether two matrices are the same bytes."""
    shape = files.shape(one)
    if shape != files.shape(other):
        return False
    for rows in row_blocks(shape):
        blocks = [files.read(name, (rows, slice(0, shape[1]))).view(np.uint8) for name in (one, other)]
        if not np.array_equal(*blocks):
            return False
    return True


def _load_parameter(
    files: TensorFiles, tensors: list[Tensor], leaf: jax.ShapeDtypeStruct, sharding: Sharding | None
) -> jax.Array:
    """One parameter, its tensors in the order of the layers; without a sharding on the default device."""
    if sharding is None:
        return jax.device_put(_read_part(files, tensors, leaf, tuple(slice(0, size) for size in leaf.shape)))
    holders: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        bounds = tuple(one.indices(size)[:2] for one, size in zip(index, leaf.shape, strict=True))
        holders.setdefault(bounds, []).append(device)
    arrays = []
    for bounds, devices in holders.items():
        part = _read_part(files, tensors, leaf, tuple(slice(*bound) for bound in bounds))
        placed = [
            jax.device_put(part, SingleDeviceSharding(device, memory_kind=sharding.memory_kind)) for device in devices
        ]
        # Otherwise parts would pile up on the host, each waiting for its transfer.
        arrays += jax.block_until_ready(placed)
        del part, placed
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays, dtype=leaf.dtype)


def _read_part(
    files: TensorFiles, tensors: list[Tensor], leaf: jax.ShapeDtypeStruct, index: tuple[slice, ...]
) -> np.ndarray:
    """`parameter[index]` in memory of its own, converted slice by slice; the slices have bounds."""
    part = np.empty([one.stop - one.start for one in index], leaf.dtype)
    if tensors[0].layer is None:
        targets = [(tensors[0], part)]
    else:
        targets = zip(tensors[index[0]], part, strict=True)
        index = index[1:]
    for tensor, target in targets:
        target[...] = tensor.to_part(files.read(tensor.name, tensor.slices(index)), index)
    return part

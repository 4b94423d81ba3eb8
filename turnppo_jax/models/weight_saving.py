"""Weights out: parameters on any devices, of one process or of several, as safetensors files of Hugging Face format.

One layer of one parameter comes to the host at a time, of an embedding or a head a block of rows, and goes to the disk
before the next one, so that a model that no host could hold is written all the same.
"""

import functools
import json
import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from turnppo_jax.models.parameters import decoder_shapes
from turnppo_jax.models.sizes import ModelSizes
from turnppo_jax.models.tensor_files import INDEX_FILE, SINGLE_FILE, WRITTEN_DTYPES, write_tensors, write_text
from turnppo_jax.models.tensor_layout import Tensor, paths_of, row_blocks, tensors_of
from turnppo_jax.parallel.agreement import agree, together

# Size at which transformers starts a new shard.
MAX_SHARD_BYTES = 5_000_000_000


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

    With several processes all must call it: process 0 writes, the others give it their parts and return when the
    files stand.

    Args:
      params: tree of `decoder_shapes(sizes)`, on any devices.
      sizes: of the decoder.
      directory: made where it is missing.
      dtype: "float32" or "bfloat16".
      max_shard_bytes: of one file; a larger tensor gets a file of its own.

    Raises:
      ValueError: unknown dtype, parameters that do not fit the sizes.
      OSError: the files cannot be written; the other processes raise `HostError`.
    """
    if str(dtype) not in WRITTEN_DTYPES:
        raise ValueError(f"dtype={dtype!r}; allowed: {', '.join(WRITTEN_DTYPES)}")
    target = WRITTEN_DTYPES[str(dtype)]
    directory = pathlib.Path(directory)
    leaves = _checked_leaves(params, sizes)
    shards = _plan_shards(tensors_of(sizes), target.itemsize, max_shard_bytes)
    single, count = len(shards) == 1, len(shards)
    names = [SINGLE_FILE] if single else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    writes = jax.process_index() == 0
    with together():
        if writes:
            directory.mkdir(parents=True, exist_ok=True)
    failed = None
    for name, shard in zip(names, shards, strict=True):
        shard = sorted(shard, key=lambda tensor: tensor.name)
        blocks = _blocks(shard, leaves, target)
        if writes and failed is None:
            try:
                write_tensors(directory / name, target, [(tensor.name, tensor.shape) for tensor in shard], blocks)
            except OSError as error:
                failed = error
        # Blocks that are not written are asked for all the same: every process takes part in bringing them here.
        for _ in blocks:
            pass
    agree(failed)
    with together():
        if writes:
            _write_index(directory, names, shards, sum(leaf.size for leaf in leaves.values()) * target.itemsize)


def _checked_leaves(params: Any, sizes: ModelSizes) -> dict[str, Any]:
    leaves, wanted = paths_of(params), paths_of(decoder_shapes(sizes))
    for path in sorted(wanted.keys() ^ leaves.keys()):
        raise ValueError(f"parameter {path} is {'missing' if path in wanted else 'unknown'}")
    for path, shape in wanted.items():
        if tuple(leaves[path].shape) != shape.shape:
            raise ValueError(f"parameter {path} has shape {tuple(leaves[path].shape)}, the sizes say {shape.shape}")
    return leaves


def _plan_shards(tensors: list[Tensor], itemsize: int, max_shard_bytes: int) -> list[list[Tensor]]:
    """Tensors in order, cut before the one that would pass the limit."""
    shards, filled = [[]], 0
    for tensor in tensors:
        size = math.prod(tensor.shape) * itemsize
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
    return shards


def _blocks(shard: list[Tensor], leaves: dict[str, Any], dtype: np.dtype) -> Iterator[np.ndarray]:
    """The tensors of a file as they lie in it, one after another in blocks of rows; none is kept here."""
    for tensor in shard:
        for index in row_blocks(tensor.shape) if tensor.layer is None else (tensor.layer,):
            yield tensor.from_part(_on_host(leaves[tensor.path], index)).astype(dtype, copy=False)


def _on_host(leaf: Any, index: int | slice) -> np.ndarray:
    """`leaf[index]` of the first axis; with several processes on every one of them, and all must ask for it."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)[index]
    # One process can read what is spread over its own devices; the others' parts it must be sent.
    everywhere = None if leaf.is_fully_addressable else NamedSharding(leaf.sharding.mesh, PartitionSpec())
    if isinstance(index, slice):
        return np.asarray(_rows(leaf, index.start, index.stop, everywhere))
    return np.asarray(_layer(leaf, index, everywhere))


@functools.partial(jax.jit, static_argnums=2)
def _layer(leaf: jax.Array, index: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    """One program for all layers: the axis of the layers is never split."""
    layer = jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False)
    return layer if sharding is None else jax.lax.with_sharding_constraint(layer, sharding)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _rows(leaf: jax.Array, start: int, stop: int, sharding: NamedSharding | None) -> jax.Array:
    """A program for each block: of a split axis, rows at a traced position would be gathered whole first."""
    rows = jax.lax.slice_in_dim(leaf, start, stop)
    return rows if sharding is None else jax.lax.with_sharding_constraint(rows, sharding)


def _write_index(directory: pathlib.Path, names: list[str], shards: list[list[Tensor]], total_bytes: int) -> None:
    """The index where there are several files; removes weights of another layout."""
    stale = {path.name for path in directory.glob("model*.safetensors")} - set(names)
    if len(names) == 1:
        stale |= {INDEX_FILE}
    else:
        weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        write_text(directory / INDEX_FILE, json.dumps(index, indent=2))
    for name in stale:
        (directory / name).unlink(missing_ok=True)

"""Weights out: what is written, in what order, and what is refused."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.checkpoint_fixtures import source_tensors, write_sharded
from tests.model_fixtures import random_params, small_sizes
from turnppo_jax.models import tensor_layout
from turnppo_jax.models.checkpoint_files import load_weights
from turnppo_jax.models.tensor_files import SINGLE_FILE, write_tensors
from turnppo_jax.models.tensor_layout import row_blocks
from turnppo_jax.models.weight_saving import save_weights

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


def test_two_sets_of_weights_are_refused_and_saving_leaves_one(tmp_path):
    sizes = small_sizes("llama")
    write_sharded(tmp_path, source_tensors(sizes))
    params = load_weights(tmp_path, sizes, jnp.float32)
    save_weights(params, sizes, tmp_path, "float32")
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE_FILE]
    save_weights(params, sizes, tmp_path, "float32", max_shard_bytes=20_000)
    assert not (tmp_path / SINGLE_FILE).exists()
    jax.tree.map(np.testing.assert_array_equal, load_weights(tmp_path, sizes, jnp.float32), params)
    save_file({"x": np.ones(1)}, tmp_path / SINGLE_FILE)
    with pytest.raises(ValueError, match=r"both model.safetensors and model.safetensors.index.json"):
        load_weights(tmp_path, sizes, jnp.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_written_file_is_the_one_that_safetensors_writes(dtype, tmp_path):
    tensors = dict(sorted(source_tensors(small_sizes("qwen2"), DTYPES[dtype]).items()))
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    # Matrices in blocks of seven rows, vectors whole.
    blocks = (t[i : i + rows] for t in tensors.values() for rows in (7 if t.ndim > 1 else len(t),)
              for i in range(0, len(t), rows))  # fmt: skip
    shapes = [(name, t.shape) for name, t in tensors.items()]
    write_tensors(tmp_path / "ours", np.dtype(DTYPES[dtype]), shapes, blocks)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"ours", "theirs"}


def test_writing_refuses_blocks_that_do_not_fill_the_shapes(tmp_path):
    for block, message in (
        (np.ones(3, np.float32), "12 bytes of tensors; the shapes need 16"),
        (np.ones(5, np.float32), "20 bytes of tensors; the shapes need 16"),
        (np.ones(2, np.float64), "a block of float64; allowed: float32"),
    ):
        with pytest.raises(ValueError, match=message):
            write_tensors(tmp_path / "x", np.dtype(np.float32), [("a", (4,))], [block])
        assert not (tmp_path / "x").exists()


def test_large_matrices_pass_in_blocks_of_rows(tmp_path, monkeypatch):
    assert list(row_blocks((7,))) == [slice(0, 7)]
    monkeypatch.setattr(tensor_layout, "_BLOCK_ELEMENTS", 96)
    assert list(row_blocks((7, 32))) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    assert list(row_blocks((2, 100))) == [slice(0, 1), slice(1, 2)]  # a row is never cut
    monkeypatch.setattr(tensor_layout, "_BLOCK_ELEMENTS", 20 * 32)
    sizes = small_sizes("qwen2")
    tensors = source_tensors(sizes)
    head = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors | {"lm_head.weight": head}, tmp_path / SINGLE_FILE)
    params = load_weights(tmp_path, sizes, jnp.float32)
    save_weights(params, sizes, tmp_path / "out", "float32")
    assert load_file(tmp_path / "out" / SINGLE_FILE).keys() == tensors.keys()
    for name, tensor in load_file(tmp_path / "out" / SINGLE_FILE).items():
        np.testing.assert_array_equal(tensor, tensors[name], err_msg=name)
    head[-1, -1] += 1  # in the last block
    save_file(tensors | {"lm_head.weight": head}, tmp_path / SINGLE_FILE)
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        load_weights(tmp_path, sizes, jnp.float32)


def test_save_refuses_what_does_not_fit(tmp_path):
    sizes = small_sizes("llama")
    params = random_params(sizes)
    with pytest.raises(ValueError, match="dtype='float16'; allowed: float32, bfloat16"):
        save_weights(params, sizes, tmp_path, "float16")
    with pytest.raises(ValueError, match="parameter lm_head/kernel is missing"):
        save_weights({k: v for k, v in params.items() if k != "lm_head"}, sizes, tmp_path, "float32")
    with pytest.raises(ValueError, match="parameter extra is unknown"):
        save_weights(params | {"extra": jnp.ones(1)}, sizes, tmp_path, "float32")
    with pytest.raises(ValueError, match=r"parameter final_norm/scale has shape \(3,\), the sizes say \(32,\)"):
        save_weights(params | {"final_norm": {"scale": jnp.ones(3)}}, sizes, tmp_path, "float32")

"""What loading needs beside the arrays, measured on a small model as the benchmark does on a large one."""

import dataclasses
import sys

import pytest

from benchmarks.load_memory import measure, write_checkpoint
from turnppo_jax.models.sizes import SIZES

# Untied, so that no parameter is more than a quarter of the whole: 80 MB as bfloat16.
SMALL = dataclasses.replace(
    SIZES["tiny-qwen3"], hidden_size=512, intermediate_size=2048, num_layers=8, num_heads=8, num_kv_heads=2,
    head_dim=64, vocab_size=8192, num_token_ids=8192, tie_word_embeddings=False,
)  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="anonymous memory is read from /proc, which Linux alone has")
@pytest.mark.parametrize(("dtype", "copies"), [("bfloat16", 1), ("float32", 2)])
def test_loading_and_writing_need_little_beside_the_arrays(dtype, copies, tmp_path, monkeypatch):
    # glibc gives back at once what is larger than this; else it keeps tens of MB, which a small model would feel.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**18))
    size = write_checkpoint(tmp_path, SMALL)
    assert 70e6 < size < 80e6
    row = measure(tmp_path, dtype, write=True)
    assert copies * size < row["arrays"] < 1.01 * copies * size  # norms lie on every device
    # The arrays are there at the end, or the watch saw nothing.
    assert row["peak"] >= row["end"] > 0.98 * row["arrays"]
    # Beside them there may be one device's part of the largest parameter (1/8 of 17 MB as bfloat16), its copy in
    # transfer and a layer's slice: 5 MB; as float32 9 MB. One whole parameter, or a second copy of the model, would
    # pass what is allowed.
    assert row["peak"] < row["arrays"] + copies * 8e6, row
    # Writing: the embedding, 8 MB as bfloat16, in the dtype of the parameters on the devices and on the host, and
    # converted: 42 MB at most, and programs are compiled on the way. Any file held whole would be a quarter more.
    assert row["writing"] < 60e6, row

"""Point writes into the cache by copies of tiles, emulated, against single assignments in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import cache_oracle as oracle
from turnppo_jax.models import ragged_write as ragged
from turnppo_jax.models.ragged_write import make_spans, ragged_write

BLOCK, CAPACITY, LAYER = 128, 256, 1

CASES = {
    # name: slots (None: row r is slot r), first positions, numbers of positions, positions of a row
    "decode": (None, [0, 127, 128, 7, 255], [1, 1, 1, 0, 1], 1),
    "decode of chosen slots": ([4, -1, 2], [15, 3, 16], [1, 1, 1], 1),
    "prefill": ([2, -1, 0], [120, 0, 3], [16, 5, 9], 16),
    "prefill to the end and within a tile": ([3, 1], [225, 18], [31, 3], 40),
}


def written(k, v, slots, positions, new_k, new_v, joined):
    lanes = joined * new_k.shape[-1]
    shape = (*new_k.shape[:2], new_k.shape[2] // joined, lanes)
    for cache, new in ((k, new_k.reshape(shape)), (v, new_v.reshape(shape))):
        for row, slot in enumerate(range(5) if slots is None else slots):
            for query, position in enumerate(positions[row]):
                if slot >= 0 and position >= 0:
                    place = cache[LAYER, position // BLOCK, slot, :, position % BLOCK]
                    place[:, :lanes], place[:, lanes:] = new[row, query], 0
    return k, v


def check(slots, starts, counts, width, dtype, kv_heads=2, head_dim=128, joined=1):
    rng = np.random.default_rng(width)
    k, v = (rng.normal(size=(2, 2, 5, kv_heads // joined, BLOCK, 128)).astype(dtype) for _ in "kv")
    positions = oracle.positions_of(starts, counts, width)
    new_k, new_v = (rng.normal(size=(*positions.shape, kv_heads, head_dim)).astype(dtype) for _ in "kv")

    @jax.jit
    def write(k, v, positions, new_k, new_v):
        spans = make_spans(k, None if slots is None else jnp.asarray(slots, jnp.int32), positions)
        return ragged_write(k, v, jnp.int32(LAYER), spans, new_k, new_v, interpret=True)

    ours = write(k, v, positions, new_k, new_v)
    for found, expected in zip(ours, written(k.copy(), v.copy(), slots, positions, new_k, new_v, joined)):
        np.testing.assert_array_equal(np.asarray(found, np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("name", CASES)
def test_new_positions_are_written_and_no_others(name):
    check(*CASES[name], jnp.bfloat16)


def test_float32_has_tiles_of_eight():
    check(*CASES["prefill"], np.float32)


def test_heads_that_share_lanes_or_fill_none():
    check(*CASES["prefill"], jnp.bfloat16, head_dim=64, joined=2)
    check(*CASES["decode"], jnp.bfloat16, kv_heads=1, head_dim=40)


def test_rows_in_several_grid_steps(monkeypatch):
    monkeypatch.setattr(ragged, "_STEP_BYTES", 16 << 10)  # two rows of 2 heads * 16 positions * 128 lanes * 2 bytes
    check(*CASES["decode"], jnp.bfloat16)


def test_what_lies_past_the_last_block_is_dropped():
    k = jax.ShapeDtypeStruct((1, 2, 3, 1, BLOCK, 128), jnp.bfloat16)
    spans = make_spans(k, jnp.asarray([0, 1, 2, 3]), oracle.positions_of([250, 256, 5, 5], [16, 4, 2, 2], 16))
    np.testing.assert_array_equal(spans.end, [256, 256, 7, 0])  # slot 3 does not exist
    np.testing.assert_array_equal(spans.first, [250, 256, 5, 5])

"""The ragged attention kernel, emulated, against loops in float64 and against the plain implementation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import cache_oracle as oracle
from tests.kernel_products import kernel_precisions
from turnppo_jax.models import cache_attention, ragged_schedule
from turnppo_jax.models.ragged_attention import ragged_attend
from turnppo_jax.models.ragged_schedule import joined_heads, make_schedule, ragged_block

BLOCK, CAPACITY, LAYER = 128, 384, 1


def random_case(slots, positions, kv_heads, group, head_dim, dtype=np.float32):
    """(k, v [L, S, Nkv, C, H], q [R, Q, N, H]), keys and values NaN wherever no query looks."""
    rng = np.random.default_rng(len(positions))
    k, v = (rng.normal(size=(2, 5, kv_heads, CAPACITY, head_dim)).astype(dtype) for _ in "kv")
    q = rng.normal(size=(*positions.shape, kv_heads * group, head_dim)).astype(dtype)
    return oracle.spoil_beyond(k, slots, positions), oracle.spoil_beyond(v, slots, positions), q


@functools.partial(jax.jit, static_argnames="kv_heads")
def attend(k, v, slots, positions, q, kv_heads):
    schedule = make_schedule(k, slots, positions, q.shape[2])
    return ragged_attend(k, v, jnp.int32(LAYER), schedule, q, kv_heads, interpret=True)


def run_kernel(k, v, slots, positions, q):
    """Of caches [L, S, Nkv, C, H]; slots None: row r is slot r."""
    kv_heads, head_dim = k.shape[2], k.shape[4]
    k, v = (oracle.blocked(x, BLOCK, 128, joined_heads(kv_heads, head_dim)) for x in (k, v))
    slots = None if slots is None else jnp.asarray(slots, jnp.int32)
    return np.asarray(attend(k, v, slots, positions, q, kv_heads))


CASES = {
    # name: slots, first positions, numbers of queries, queries of a row, key/value heads, group, head size
    "decode": ([0, 1, 2, 3, 4], [0, 127, 128, 0, 383], [1, 1, 1, 0, 1], 1, 2, 3, 128),
    "decode, eight heads a key": ([4, -1, 0, 2], [255, 7, 100, 256], [1, 1, 1, 1], 1, 1, 8, 128),
    "prefill": ([2, -1, 0, 4], [120, 0, 0, 368], [16, 9, 5, 16], 16, 2, 1, 128),
    "long prefill in an empty and a full slot": ([3, 1, 0], [0, 320, 90], [64, 64, 0], 64, 1, 2, 128),
    "heads of 64 share lanes": ([1, 0], [130, 3], [16, 2], 16, 2, 2, 64),
    "heads that fill no lanes": ([1, 0], [250, 0], [1, 1], 1, 3, 1, 40),
}


@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_loops_whatever_lies_beyond(name):
    slots, starts, counts, width, *sizes = CASES[name]
    positions = oracle.positions_of(starts, counts, width)
    k, v, q = random_case(slots, positions, *sizes)
    out = run_kernel(k, v, None if slots == list(range(5)) else slots, positions, q)
    real = (positions >= 0) & (np.asarray(slots) >= 0)[:, None]
    expected = oracle.attend(k[LAYER], v[LAYER], slots, positions, q)
    # float32 sums of up to 384 terms of size 1, averaged by weights: 1e-6 of rounding.
    np.testing.assert_allclose(out[real], expected[real], rtol=0, atol=3e-6)
    assert np.isfinite(out).all()  # at padding too
    assert not out[~real.any(axis=1)].any()  # rows that read nothing


def test_kernel_equals_the_plain_implementation():
    slots, positions = [3, 0, 1], oracle.positions_of([100, 0, 300], [8, 3, 8], 8)
    k, v, q = random_case(slots, positions, 2, 2, 128)
    k, v = np.nan_to_num(k), np.nan_to_num(v)  # which must be finite everywhere
    plain = cache_attention.attend_blocks(
        jnp.asarray(oracle.blocked(k, BLOCK, 128).swapaxes(-1, -2)),
        jnp.asarray(oracle.blocked(v, BLOCK, 128)),
        jnp.int32(LAYER),
        (jnp.asarray(slots), positions),
        q,
        2,
    )
    ours = run_kernel(k, v, slots, positions, q)
    np.testing.assert_allclose(ours[positions >= 0], np.asarray(plain)[positions >= 0], rtol=0, atol=3e-6)


def test_queries_of_a_row_in_several_tiles(monkeypatch):
    monkeypatch.setattr(ragged_schedule, "_MOST_QUERIES_OF_KEYS", 16)  # 8 queries of 2 heads a tile
    slots, positions = [1, 2], oracle.positions_of([110, 0], [24, 9], 24)
    k, v, q = random_case(slots, positions, 1, 2, 128)
    out = run_kernel(k, v, slots, positions, q)
    expected = oracle.attend(k[LAYER], v[LAYER], slots, positions, q)
    np.testing.assert_allclose(out[positions >= 0], expected[positions >= 0], rtol=0, atol=3e-6)


def test_bfloat16_is_close_to_loops_over_the_same_numbers():
    slots, positions = [0, 2], oracle.positions_of([200, 40], [8, 8], 8)
    k, v, q = random_case(slots, positions, 1, 2, 128, jnp.bfloat16)
    out = run_kernel(k, v, slots, positions, q)
    assert out.dtype == jnp.bfloat16
    expected = oracle.attend(*(np.asarray(x, np.float32) for x in (k[LAYER], v[LAYER])), slots, positions, q)
    # Scores are exact products summed in float32; weights and result are rounded to 8 bits, 2 ** -9 of their size
    # each: averages of normal numbers, below 1, err by less than 2 ** -8.
    np.testing.assert_allclose(out.astype(np.float32), expected, rtol=0, atol=2**-8)


def test_a_row_keeps_its_bits_whatever_the_others_hold():
    slots = [3, 1, 0, 2]
    own = None
    for starts in ([140, 0, 0, 0], [140, 383, 129, 256]):
        positions = oracle.positions_of(starts, [1, 1, 1, 1], 1)
        k, v, q = random_case(slots, oracle.positions_of([383] * 4, [1] * 4, 1), 1, 2, 128)
        out = run_kernel(k, v, slots, positions, q)[0]
        own = out if own is None else own
        np.testing.assert_array_equal(out, own)


def walk(schedule, num_blocks):
    """The grid as it runs: [(row, slot, block)] of its listed steps, and the fetches of cache blocks that it makes."""
    schedule = jax.tree.map(np.asarray, schedule)
    halves, visited, fetches = len(schedule.totals), [], 0
    width = len(schedule.rows) // halves
    for half in range(halves):
        last = None
        for item in range(max(schedule.totals)):
            place = min(item, schedule.totals[half] - 1)
            row = schedule.rows[half * width + place]
            source = schedule.slots[row], place + schedule.shift[row]
            assert 0 <= source[1] < num_blocks
            fetches += source != last
            last = source
            if item < schedule.totals[half]:
                visited.append((row, *source))
    return visited, fetches


@pytest.mark.parametrize("rows", [1, 7, 16])
def test_the_grid_visits_live_blocks_once_in_order_and_fetches_no_other(rows):
    rng = np.random.default_rng(rows)
    cache = jax.ShapeDtypeStruct((1, 6, 16, 2, BLOCK, 128), jnp.bfloat16)
    for _ in range(20):
        slots = rng.permutation(16)[:rows].astype(np.int32)
        last = np.where(rng.random(rows) < 0.3, -1, rng.integers(0, 6 * BLOCK, rows)).astype(np.int32)
        slots[rng.random(rows) < 0.1] = -1
        visited, fetches = walk(make_schedule(cache, slots, last[:, None], 4), 6)
        live = (last >= 0) & (slots >= 0)
        expected = []
        for row in range(rows):
            if live[row]:
                expected += [(row, slots[row], block) for block in range(last[row] // BLOCK + 1)]
        # Every row's blocks in one piece, in order; rows in order within a half.
        assert sorted(item for item in visited if live[item[0]]) == expected
        order = [item[0] for item in visited]
        halves = [order] if rows % 2 else [[r for r in order if r % 2 == half] for half in (0, 1)]
        assert order == [r for half in halves for r in half] and all(half == sorted(half) for half in halves)
        assert {item[0] for item in visited} == set(range(rows))  # so that every output is written
        # A half that begins with rows that rest fetches one block for them.
        assert len(expected) <= fetches <= len(expected) + 2
        lengths = np.where(live, last + 1, 0).tolist()
        assert cache_attention.CACHE_ATTENTION["ragged"].blocks_read(lengths, BLOCK) == len(expected)


@pytest.mark.parametrize(
    ("kv_heads", "capacity", "block"),
    [(2, 4096, 512), (4, 4096, 256), (8, 16384, 128), (1, 65536, 512), (2, 1024, 128), (2, 100, 128), (2, 2048, 256)],
)
def test_blocks_are_worth_a_step_and_small_beside_a_slot(kv_heads, capacity, block):
    assert ragged_block(kv_heads, 128, capacity, jnp.bfloat16) == block
    assert block == 128 or (block * 8 <= capacity and 2 * kv_heads * block * 128 * 2 <= 512 << 10)


def test_layouts_that_a_tpu_cannot_tile_are_refused():
    q = jnp.zeros((1, 1, 2, 16))
    for shape, message in (((1, 1, 1, 2, 64, 128), "cache block=64"), ((1, 1, 1, 2, 128, 16), "cache head size=16")):
        k = jnp.zeros(shape)
        schedule = make_schedule(k, None, jnp.zeros((1, 1), jnp.int32), 2)
        with pytest.raises(ValueError, match=f"{message}; allowed with attention='ragged': a multiple of 128"):
            ragged_attend(k, k, jnp.int32(0), schedule, q, 2)


def test_float32_products_ask_for_full_precision():
    # A TPU rounds float32 operands to bfloat16 unless asked not to; no CPU shows it.
    for dtype, precision in ((jnp.float32, jax.lax.Precision.HIGHEST), (jnp.bfloat16, jax.lax.Precision.DEFAULT)):
        k, q = jnp.zeros((1, 1, 2, 1, BLOCK, 128), dtype), jnp.zeros((2, 1, 1, 128), dtype)
        schedule = make_schedule(k, None, jnp.zeros((2, 1), jnp.int32), 1)
        found = kernel_precisions(lambda k, q, s=schedule: ragged_attend(k, k, jnp.int32(0), s, q, 1), k, q)
        assert found == [[(precision, precision)] * 2]

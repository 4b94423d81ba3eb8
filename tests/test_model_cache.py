import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.model_fixtures import FAMILIES, hidden_states, random_params, random_tokens, small_sizes, whole_row
from turnppo_jax.models import cache as cache_lib
from turnppo_jax.models.cache import Cache, init_cache
from turnppo_jax.models.decoder import bind, decoder_shapes

# Cache against whole rows in float32: the same numbers summed in another order, hidden states of order 1.
TOLERANCE = 2e-5


@functools.cache
def programs(sizes, dtype=jnp.float32):
    prefill = jax.jit(lambda params, *args: bind(params, sizes).prefill(*args, compute_dtype=dtype))
    decode = jax.jit(lambda params, *args: bind(params, sizes).decode(*args, compute_dtype=dtype))
    whole = jax.jit(lambda params, *args: bind(params, sizes).hidden_states(*args))
    return prefill, decode, whole


def ints(*values):
    return np.array(values, np.int32)


def padded(rows, width, fill=0):
    return np.array([list(row) + [fill] * (width - len(row)) for row in rows], np.int32)


def dirty(cache, seed=0):
    """An empty cache full of noise."""
    rng = np.random.default_rng(seed)
    k, v = (jnp.asarray(rng.normal(size=x.shape).astype(np.float32)) for x in (cache.k, cache.v))
    return dataclasses.replace(cache, k=k, v=v)


def by_position(cache):
    """(k, v) as [L, S, Nkv, positions, H], whatever the layout of blocks."""
    k, v = (np.moveaxis(np.asarray(x), 1, 3) for x in (cache.k, cache.v))  # [L, S, Nkv, blocks, ...]
    shape = (*v.shape[:3], -1, v.shape[-1])
    return np.swapaxes(k, -1, -2).reshape(shape), v.reshape(shape)


def written(before, after):
    """(slot, position) of every entry that differs, of keys and of values."""
    changed = [np.any(a != b, axis=(0, 2, 4)) for a, b in zip(by_position(after), by_position(before))]
    np.testing.assert_array_equal(*changed)
    return np.argwhere(changed[0]).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_three_turns_with_cache_equal_one_forward(family):
    sizes = small_sizes(family)
    params = random_params(sizes)
    prefill, decode, whole = programs(sizes)
    texts = [random_tokens(sizes, 31, seed=1), random_tokens(sizes, 23, seed=2)]
    # Turns of different lengths in slots 2 and 0; slot 1 stays empty. Each turn: prompt by prefill, then decode.
    plan = [[(5, 4), (7, 2)], [(3, 6), (2, 3)], [(1, 12), (6, 3)]]
    cache, at = dirty(init_cache(sizes, 3, 40)), [0, 0]
    expected = [whole(params, jnp.array(t)[None], *whole_row(len(t)))[0] for t in texts]
    for turn in plan:
        prompts = [texts[row][at[row] : at[row] + turn[row][0]] for row in range(2)]
        cache = prefill(params, cache, ints(2, 0), padded(prompts, 8), ints(turn[0][0], turn[1][0]))
        at = [at[row] + turn[row][0] for row in range(2)]
        np.testing.assert_array_equal(cache.lengths, [at[1], 0, at[0]])
        for step in range(max(count for _, count in turn)):
            going = [step < turn[row][1] for row in range(2)]
            tokens = [texts[row][at[row]] if going[row] else 0 for row in range(2)]
            hidden, cache = decode(params, cache, ints(tokens[1], 9, tokens[0]), np.array([going[1], False, going[0]]))
            for row, slot in ((0, 2), (1, 0)):
                if going[row]:
                    np.testing.assert_allclose(hidden[slot], expected[row][at[row]], rtol=0, atol=TOLERANCE)
                    at[row] += 1
    np.testing.assert_array_equal(cache.lengths, [23, 0, 31])


@pytest.mark.parametrize("piece", [1, 3, 7])
def test_prefill_in_pieces_equals_unchunked(piece):
    sizes = small_sizes()
    params, tokens = random_params(sizes), random_tokens(sizes, 1, 14)
    prefill, decode, _ = programs(sizes)
    whole = prefill(params, init_cache(sizes, 2, 16), ints(1), tokens, ints(14))
    cache = init_cache(sizes, 2, 16)
    for start in range(0, 14, piece):
        part = tokens[:, start : start + piece]
        cache = prefill(params, cache, ints(1), padded(part, piece), ints(part.shape[1]))
    np.testing.assert_array_equal(cache.lengths, [0, 14])
    np.testing.assert_allclose(cache.k, whole.k, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(cache.v, whole.v, rtol=0, atol=TOLERANCE)
    active = jnp.array([False, True])
    one, _ = decode(params, whole, ints(0, 5), active)
    two, _ = decode(params, cache, ints(0, 5), active)
    np.testing.assert_allclose(two[1], one[1], rtol=0, atol=TOLERANCE)


def test_padding_and_dummy_rows_write_nothing_even_at_the_end():
    sizes = small_sizes()
    params = random_params(sizes)
    prefill, _, _ = programs(sizes)
    start = dirty(init_cache(sizes, 3, 8))
    start = prefill(params, start, ints(0, 1), random_tokens(sizes, 2, 6), ints(6, 6))
    # Slot 0 has two places left: 1 token and 5 of padding. Row 1 is a dummy row, row 2 has nothing to add.
    after = prefill(params, start, ints(0, -1, 1), random_tokens(sizes, 3, 6), ints(1, 6, 0))
    np.testing.assert_array_equal(after.lengths, [7, 6, 0])
    assert written(start, after) == [[0, 6]]


def test_tokens_past_the_end_of_a_slot_are_dropped_not_moved():
    sizes = small_sizes()
    params, tokens = random_params(sizes), random_tokens(sizes, 1, 6)
    prefill, decode, _ = programs(sizes)
    whole = prefill(params, init_cache(sizes, 1, 4), ints(0), tokens, ints(6))
    fitting = prefill(params, init_cache(sizes, 1, 4), ints(0), tokens, ints(4))
    jax.tree.map(np.testing.assert_array_equal, whole, fitting)
    _, after = decode(params, whole, ints(1), jnp.array([True]))
    jax.tree.map(np.testing.assert_array_equal, after, whole)


def test_inactive_slots_keep_every_bit():
    sizes = small_sizes()
    params = random_params(sizes)
    prefill, decode, _ = programs(sizes)
    cache = prefill(params, dirty(init_cache(sizes, 2, 8)), ints(0, 1), random_tokens(sizes, 2, 5), ints(5, 3))
    _, after = decode(params, cache, ints(1, 2), jnp.array([False, True]))
    np.testing.assert_array_equal(after.lengths, [5, 4])
    assert written(cache, after) == [[1, 3]]


def sampled(sizes, params, slots, prompts, others, num_slots, capacity, seed):
    """Hidden states of 6 decode steps after a prefill, for the rows in `slots`, other slots holding `others`."""
    prefill, decode, _ = programs(sizes)
    cache = dirty(init_cache(sizes, num_slots, capacity), seed)
    rest = [slot for slot in range(num_slots) if slot not in slots]
    for slot, row in [*zip(rest, others), *zip(slots, prompts)]:
        cache = prefill(params, cache, ints(slot, -1), padded([row, row], 8), ints(len(row), 0))
    out, rng = [], np.random.default_rng(seed)
    for step in range(6):
        tokens = rng.integers(0, sizes.num_token_ids, num_slots)
        active = rng.integers(0, 2, num_slots).astype(bool)
        for row, slot in enumerate(slots):
            tokens[slot], active[slot] = (7 * step + row) % sizes.num_token_ids, True
        hidden, cache = decode(params, cache, tokens.astype(np.int32), active)
        out.append(np.asarray(hidden)[list(slots)])
    return np.stack(out, axis=1)


@pytest.mark.parametrize(("num_slots", "capacity"), [(5, 70), (16, 256)])
def test_a_row_keeps_its_bits_whatever_else_the_cache_holds(num_slots, capacity):
    sizes = small_sizes("qwen3")
    params = random_params(sizes)
    prompts = [list(random_tokens(sizes, 6, seed=3)), list(random_tokens(sizes, 4, seed=4))]
    base = sampled(sizes, params, (1, 3), prompts, [], num_slots, capacity, seed=0)
    for seed in (1, 2):
        others = [list(random_tokens(sizes, 1 + (3 * i) % 8, seed=10 * seed + i)) for i in range(num_slots - 2)]
        again = sampled(sizes, params, (1, 3), prompts, others, num_slots, capacity, seed)
        np.testing.assert_array_equal(again, base)
    moved = sampled(sizes, params, (num_slots - 1, 0), prompts, [], num_slots, capacity, seed=5)
    np.testing.assert_array_equal(moved, base)


def test_more_capacity_keeps_every_bit():
    sizes = small_sizes("qwen3")
    params = random_params(sizes)
    prompts = [list(random_tokens(sizes, 6, seed=3)), list(random_tokens(sizes, 4, seed=4))]
    small = sampled(sizes, params, (1, 3), prompts, [], 4, 64, seed=0)
    large = sampled(sizes, params, (1, 3), prompts, [], 4, 512, seed=0)
    np.testing.assert_array_equal(small, large)


def test_copy_prefix_forks_a_slot():
    sizes = small_sizes()
    params, tokens = random_params(sizes), random_tokens(sizes, 1, 9)
    prefill, decode, _ = programs(sizes)
    cache = prefill(params, dirty(init_cache(sizes, 3, 12)), ints(2), tokens, ints(9))
    copy_prefix = jax.jit(cache_lib.copy_prefix)
    cache = copy_prefix(cache, 2, 0, 6)
    np.testing.assert_array_equal(cache.lengths, [6, 0, 9])
    cache = cache_lib.truncate(cache, ints(12, 12, 6))
    np.testing.assert_array_equal(cache.lengths, [6, 0, 6])
    hidden, _ = decode(params, cache, ints(5, 0, 5), jnp.array([True, False, True]))
    np.testing.assert_array_equal(hidden[0], hidden[2])
    more = copy_prefix(cache, 2, 1, 100)
    np.testing.assert_array_equal(more.lengths, [6, 6, 6])


def test_truncate_takes_back_and_never_lengthens():
    sizes = small_sizes()
    params, tokens = random_params(sizes), random_tokens(sizes, 1, 8)
    prefill, decode, whole = programs(sizes)
    cache = prefill(params, init_cache(sizes, 1, 12), ints(0), tokens, ints(8))
    # KNOWN_FAULTS 32: 0 empties, a number below 0 too, a larger one changes nothing.
    for given, kept in ((0, 0), (-5, 0), (3, 3), (20, 8)):
        np.testing.assert_array_equal(cache_lib.truncate(cache, ints(given)).lengths, [kept])
    back = cache_lib.truncate(cache, ints(5))
    other = random_tokens(sizes, 1, 4, seed=9)
    hidden, _ = decode(params, prefill(params, back, ints(0), other[:, :3], ints(3)), other[0, 3:], ints(1) > 0)
    line = np.concatenate([tokens[:, :5], other], axis=1)
    np.testing.assert_allclose(hidden[0], whole(params, line, *whole_row(9))[0, -1], rtol=0, atol=TOLERANCE)


def test_bfloat16_cache_and_compute():
    sizes = small_sizes()
    params, tokens = random_params(sizes), random_tokens(sizes, 1, 6)
    cache = init_cache(sizes, 2, 8, jnp.bfloat16)
    prefill, decode, _ = programs(sizes, jnp.bfloat16)
    cache = prefill(params, cache, ints(1), tokens[:, :5], ints(5))
    hidden, cache = decode(params, cache, ints(0, tokens[0, 5]), np.array([False, True]))
    assert hidden.dtype == cache.k.dtype == jnp.bfloat16
    whole = hidden_states(params, sizes, tokens, *whole_row(6), compute_dtype=jnp.bfloat16)
    # bfloat16 keeps 8 bits; values of order 1, two layers
    np.testing.assert_allclose(hidden[1].astype(jnp.float32), whole[0, 5].astype(jnp.float32), rtol=0, atol=0.1)


def test_the_cache_is_updated_in_place():
    # A donated cache comes back in its own memory, and the program holds no second copy of it: its temporary
    # memory stays far below one cache (2 * L * S * Nkv * C * H * 4 bytes).
    sizes = small_sizes(num_layers=4)
    shapes = jax.eval_shape(lambda: init_cache(sizes, 8, 512))
    slots, flags = jax.ShapeDtypeStruct((8,), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.bool_)

    def steps(params, cache, tokens, active):
        def step(carry, _):
            cache, tokens = carry
            _, cache = bind(params, sizes).decode(cache, tokens, active)
            return (cache, tokens), None

        return jax.lax.scan(step, (cache, tokens), None, length=4)[0][0]

    compiled = jax.jit(steps, donate_argnums=1).lower(decoder_shapes(sizes), shapes, slots, flags).compile()
    size = sum(x.size * x.dtype.itemsize for x in (shapes.k, shapes.v))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < 0.4 * size
    whole = ",".join(map(str, shapes.k.shape))
    assert f"f32[{whole}]" in compiled.as_text() and not re.search(rf"f32\[{whole}\]\S* copy\(", compiled.as_text())


def test_cache_is_a_pytree_with_names():
    cache = init_cache(small_sizes(), 3, 7)
    assert isinstance(jax.tree.map(lambda x: x, cache), Cache)
    assert (cache.num_slots, cache.capacity) == (3, 7)
    assert init_cache(small_sizes(), 3, 65).capacity == 65
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(cache)]
    assert paths == [".k", ".v", ".lengths"]

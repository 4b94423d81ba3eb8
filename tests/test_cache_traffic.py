"""Bytes of a decode step by formula: against counts by hand, and below 1.3 times what must be read."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from tests.model_fixtures import small_sizes
from turnppo_jax.models.cache import init_cache
from turnppo_jax.models.cache_traffic import decode_traffic
from turnppo_jax.models.sizes import SIZES


def shapes(sizes, num_slots, capacity, attention="ragged"):
    return jax.eval_shape(lambda: init_cache(sizes, num_slots, capacity, jnp.bfloat16, attention=attention))


def test_counts_by_hand():
    # 2 layers, 2 key/value heads of 8 as one stack of 128 lanes, bfloat16: 2 * 2 * 128 * 2 bytes a position.
    sizes = small_sizes("llama")
    traffic = decode_traffic(sizes, shapes(sizes, 3, 300), [1, 129, 0])
    assert traffic.fetched_cache == (1 + 2) * 128 * 1024
    assert traffic.rewritten_cache == 2 * 16 * 1024
    assert traffic.live_cache == 130 * 2 * 2 * 2 * 8 * 2
    # The untied embedding, 50 * 32, is not read whole.
    assert traffic.weights == 2 * (sizes.num_parameters - 1600)
    assert traffic.read == traffic.weights + 384 * 1024 + 32 * 1024
    tied = dataclasses.replace(sizes, tie_word_embeddings=True)
    assert decode_traffic(tied, shapes(sizes, 3, 300), [1, 129, 0]).weights == 2 * tied.num_parameters


def test_plain_blocks_are_read_up_to_the_longest_for_every_slot():
    sizes = small_sizes()
    traffic = decode_traffic(sizes, shapes(sizes, 3, 300, "blocks"), [1, 129, 0])
    assert traffic.fetched_cache == 3 * 3 * 64 * (2 * 2 * 2 * 8 * 2)


@pytest.mark.parametrize("model", ["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "qwen3-1.7b"])
@pytest.mark.parametrize(("num_slots", "capacity"), [(32, 1024), (64, 4096), (256, 4096), (64, 15360)])
def test_half_full_slots_cost_at_most_1_3_times_weights_and_live_cache(model, num_slots, capacity):
    sizes = SIZES[model]
    cache = shapes(sizes, num_slots, capacity)
    same = [capacity // 2] * num_slots
    spread = [1 + slot * (capacity - 1) // (num_slots - 1) for slot in range(num_slots)]
    half_rest = [capacity if slot % 2 else 0 for slot in range(num_slots)]
    for lengths in (same, spread, half_rest):
        assert 1 <= decode_traffic(sizes, cache, lengths).ratio <= 1.3


def test_lengths_are_checked():
    sizes = small_sizes()
    with pytest.raises(ValueError, match="lengths of 2 slots; allowed: those of all 3"):
        decode_traffic(sizes, shapes(sizes, 3, 300), [1, 2])
    with pytest.raises(ValueError, match="lengths from 1 to 301; allowed: 0 to capacity=300"):
        decode_traffic(sizes, shapes(sizes, 3, 300), [1, 2, 301])

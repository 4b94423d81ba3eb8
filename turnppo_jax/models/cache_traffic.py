"""Bytes that decoding one token for every slot reads from memory: the weights once, and the cache as far as it is live.

Pallas kernels report no bytes of their own to the compiler, so this is counted from what they fetch:

    read    = weights + L * (2 * fetched blocks * P + tiles) * Nkv' * H' * bytes
    ideal   = weights + L *  2 * sum of lengths              * Nkv  * H  * bytes

with `fetched blocks` = sum over slots of ceil(length / P) for "ragged", and Nkv', H' the key/value heads and head size
that the cache holds: repeated where tensor has more parts than heads, filled up to whole lanes.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp

from turnppo_jax.models.cache import Cache
from turnppo_jax.models.cache_attention import cache_attention_by_name
from turnppo_jax.models.sizes import ModelSizes


@dataclasses.dataclass(frozen=True)
class DecodeTraffic:
    """Bytes of one decode step on all devices together.

    Attributes:
      weights: every weight that is used whole, once.
      live_cache: keys and values of the positions that the queries see, once.
      fetched_cache: keys and values that are fetched for them.
      rewritten_cache: what is fetched because new positions share its tiles of memory.
    """

    weights: int
    live_cache: int
    fetched_cache: int
    rewritten_cache: int

    @property
    def read(self) -> int:
        """All that is read."""
        return self.weights + self.fetched_cache + self.rewritten_cache

    @property
    def ratio(self) -> float:
        """What is read over what must be."""
        return self.read / (self.weights + self.live_cache)


def decode_traffic(
    sizes: ModelSizes, cache: Cache, lengths: Sequence[int], weights_dtype: jnp.dtype = jnp.bfloat16
) -> DecodeTraffic:
    """Bytes that a decode step reads.

    Args:
      sizes: of the model.
      cache: its arrays or their shapes.
      lengths: [S] positions that each slot's query sees, the new one included; 0: the slot rests.
      weights_dtype: of the weights that sample.

    Raises:
      ValueError: another number of lengths than the cache has slots, or a length beyond its capacity.
    """
    if len(lengths) != cache.num_slots:
        raise ValueError(f"lengths of {len(lengths)} slots; allowed: those of all {cache.num_slots}")
    if max(lengths) > cache.capacity or min(lengths) < 0:
        raise ValueError(f"lengths from {min(lengths)} to {max(lengths)}; allowed: 0 to capacity={cache.capacity}")
    attention = cache_attention_by_name(cache.attention)
    # Of an untied embedding a row a slot is read; of a tied one all, as the head.
    unread = 0 if sizes.tie_word_embeddings else sizes.vocab_size * sizes.hidden_size
    itemsize = jnp.dtype(cache.k.dtype).itemsize
    layers, _, _, kv_heads = cache.k.shape[:4]
    position = 2 * layers * kv_heads * math.prod(cache.k.shape[4:]) // cache.block * itemsize  # keys and values
    return DecodeTraffic(
        weights=(sizes.num_parameters - unread) * jnp.dtype(weights_dtype).itemsize,
        live_cache=sum(lengths) * 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim * itemsize,
        fetched_cache=attention.blocks_read(lengths, cache.block) * cache.block * position,
        rewritten_cache=sum(length > 0 for length in lengths) * attention.rewritten(cache.k.dtype) * position,
    )

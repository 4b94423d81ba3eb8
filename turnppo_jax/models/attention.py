"""Attention over whole rows: one signature, several implementations looked up by name.

An implementation is `attention(q, k, v, segment_ids) -> out` with

    out[b, t, n] = sum_s softmax_s(q[b, t, n] . k[b, s, n // (N / Nkv)] / sqrt(H)) v[b, s, n // (N / Nkv)]

over the columns `s <= t` of the same segment. Segment 0 is padding: its output is finite and means nothing.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from turnppo_jax.models.blocked_attention import blocked_attention
from turnppo_jax.models.precision import matmul_precision

AttentionFn = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def einsum_attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Reference implementation: dense scores, softmax in float32, key/value heads never repeated.

    Args:
      q: [B, T, N, H].
      k: [B, T, Nkv, H]; `Nkv` divides `N`, and head n reads key/value head n // (N / Nkv).
      v: [B, T, Nkv, H].
      segment_ids: [B, T] int32.

    Returns:
      [B, T, N, H] in the dtype of q.
    """
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    precision = matmul_precision(q.dtype)
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, precision=precision, preferred_element_type=jnp.float32)
    causal = jnp.arange(length)[:, None] >= jnp.arange(length)[None, :]
    visible = causal & (segment_ids[:, :, None] == segment_ids[:, None, :])  # [B, T, T]; t always sees itself
    scores = jnp.where(visible[:, None, None], scores * head_dim**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v, precision=precision, preferred_element_type=jnp.float32)
    return out.reshape(batch, length, heads, head_dim).astype(q.dtype)


ATTENTION: dict[str, AttentionFn] = {"blocked": blocked_attention, "einsum": einsum_attention}


def attention_by_name(name: str) -> AttentionFn:
    """Entry of `ATTENTION`.

    Raises:
      ValueError: unknown name; the known ones are listed.
    """
    if name not in ATTENTION:
        raise ValueError(f"unknown attention {name!r}; known: {', '.join(ATTENTION)}")
    return ATTENTION[name]

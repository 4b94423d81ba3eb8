"""Causal attention in blocks of queries, in plain JAX: what the CPU runs, and any device without a kernel.

A block of queries multiplies only the keys up to its own end, so half of the dense scores are never made,
and nothing of size [T, T] is kept: the backward pass makes the scores of a block again from the log of its
softmax's denominator (Dao et al. 2022, arXiv 2205.14135, algorithms 1 and 4 in one level of blocks).
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from turnppo_jax.models.own_heads import on_own_heads
from turnppo_jax.models.precision import matmul_precision

# Unrolled at most so often: more blocks save more products and compile longer.
_MOST_BLOCKS = 8
_SMALLEST_BLOCK = 64


def blocked_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, mesh: Mesh | None = None
) -> jax.Array:
    """Same function as `attention.einsum_attention`, to rounding.

    Args:
      q: [B, T, N, H].
      k: [B, T, Nkv, H]; head n of q reads key/value head n // (N / Nkv).
      v: [B, T, Nkv, H].
      segment_ids: [B, T] int32.
      mesh: where it runs; see `own_heads`.

    Returns:
      [B, T, N, H] in the dtype of q.
    """
    return on_own_heads(_blocked, q, k, v, segment_ids, mesh)


def _blocked(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    # [B, Nkv, G, T, H] and [B, Nkv, T, H]: products then run over contiguous matrices.
    q = jnp.moveaxis(q.reshape(batch, length, kv_heads, heads // kv_heads, head_dim), 1, 3)
    # The barrier makes each transpose once, not anew in every block that reads it.
    q, k, v = jax.lax.optimization_barrier((q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)))
    out = _attention(q, k, v, segment_ids)
    return jnp.moveaxis(out, 3, 1).reshape(batch, length, heads, head_dim)


def _blocks(length: int) -> Iterator[tuple[int, int]]:
    """(first, end) of each block of queries; equal lengths but for the last."""
    size = max(_SMALLEST_BLOCK, -(-length // _MOST_BLOCKS))
    for first in range(0, length, size):
        yield first, min(first + size, length)


def _dot(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(spec, x, y, precision=matmul_precision(x.dtype), preferred_element_type=jnp.float32)


def _queries(x, first, end):
    """Rows first..end of [B, Nkv, G, T, H] for all heads of a group together: [B, Nkv, G * C, H]."""
    block = x[..., first:end, :]
    return block.reshape(*block.shape[:2], -1, block.shape[-1])


def _scores(q, k, segment_ids, first, end):
    """Scaled scores [B, Nkv, G * C, end] float32 of the queries first..end, -inf where a query may not look."""
    batch, kv_heads, group, _, head_dim = q.shape
    query, key = jnp.arange(first, end)[:, None], jnp.arange(end)[None, :]
    visible = (query >= key) & (segment_ids[:, first:end, None] == segment_ids[:, None, :end])
    scores = _dot("bkqh,bksh->bkqs", _queries(q, first, end), k[..., :end, :]) * head_dim**-0.5
    by_head = scores.reshape(batch, kv_heads, group, end - first, end)
    return jnp.where(visible[:, None, None], by_head, -jnp.inf).reshape(scores.shape)


def _join(blocks, q):
    """Blocks [B, Nkv, G * C, n] -> [B, Nkv, G, T, n]."""
    batch, kv_heads, group = q.shape[:3]
    return jnp.concatenate([x.reshape(batch, kv_heads, group, -1, x.shape[-1]) for x in blocks], axis=3)


@jax.custom_vjp
def _attention(q, k, v, segment_ids):
    return _forward(q, k, v, segment_ids)[0]


def _forward(q, k, v, segment_ids):
    outs, log_sums = [], []
    for first, end in _blocks(q.shape[3]):
        scores = _scores(q, k, segment_ids, first, end)
        peak = jnp.max(scores, axis=-1, keepdims=True)  # finite: a query sees itself
        weights = jnp.exp(scores - peak)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        outs.append(_dot("bkqs,bksh->bkqh", weights.astype(v.dtype), v[..., :end, :]) / total)
        log_sums.append(peak + jnp.log(total))
    out = _join(outs, q).astype(q.dtype)
    return out, (q, k, v, segment_ids, out, _join(log_sums, q))


def _backward(saved, d_out):
    """With P the weights: dV = Pᵀ dO, dS = P ∘ (dO Vᵀ − Σ dO ∘ O), dQ = dS K / √H, dK = dSᵀ Q / √H."""
    q, k, v, segment_ids, out, log_sums = saved
    scale = q.shape[-1] ** -0.5
    offset = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
    d_q = []
    d_k, d_v = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for first, end in _blocks(q.shape[3]):
        block = functools.partial(_queries, first=first, end=end)
        weights = jnp.exp(_scores(q, k, segment_ids, first, end) - block(log_sums))
        d_weights = _dot("bkqh,bksh->bkqs", block(d_out), v[..., :end, :])
        d_scores = (weights * (d_weights - block(offset)) * scale).astype(q.dtype)
        d_q.append(_dot("bkqs,bksh->bkqh", d_scores, k[..., :end, :]))
        d_k = d_k.at[..., :end, :].add(_dot("bkqs,bkqh->bksh", d_scores, block(q)))
        d_v = d_v.at[..., :end, :].add(_dot("bkqs,bkqh->bksh", weights.astype(v.dtype), block(d_out)))
    return _join(d_q, q).astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


_attention.defvjp(_forward, _backward)

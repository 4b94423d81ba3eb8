"""Attention over whole rows: one signature, several implementations looked up by name.

An implementation is `attention(q, k, v, segment_ids, mesh=None) -> out` with

    out[b, t, n] = sum_s softmax_s(q[b, t, n] . k[b, s, n // (N / Nkv)] / sqrt(H)) v[b, s, n // (N / Nkv)]

over the columns `s <= t` of the same segment. Segment 0 is padding: its output is finite and means nothing.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from turnppo_jax.models.blocked_attention import blocked_attention
from turnppo_jax.models.own_heads import on_own_heads
from turnppo_jax.models.precision import matmul_precision
from turnppo_jax.models.splash_attention import LANES, splash_attention
from turnppo_jax.parallel.mesh import platform
from turnppo_jax.parallel.sharding import say_once

AttentionFn = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, Mesh | None], jax.Array]


def einsum_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, mesh: Mesh | None = None
) -> jax.Array:
    """Reference implementation: dense scores, softmax in float32, key/value heads never repeated.

    Args:
      q: [B, T, N, H].
      k: [B, T, Nkv, H]; `Nkv` divides `N`, and head n reads key/value head n // (N / Nkv).
      v: [B, T, Nkv, H].
      segment_ids: [B, T] int32.
      mesh: where it runs; see `own_heads`.

    Returns:
      [B, T, N, H] in the dtype of q.
    """
    return on_own_heads(_einsum, q, k, v, segment_ids, mesh)


def _einsum(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
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


ATTENTION: dict[str, AttentionFn] = {
    "blocked": blocked_attention,  # any device
    "einsum": einsum_attention,  # the reference: [T, T] scores in memory
    "splash": splash_attention,  # TPU
}


def check_attention(name: str) -> None:
    """Whether a config may say so.

    Raises:
      ValueError: neither "auto" nor a key of `ATTENTION`; the known ones are listed.
    """
    if name != "auto":
        attention_by_name(name)


def choose_attention(name: str, mesh: Mesh | None, length: int) -> str:
    """The key of `ATTENTION` for rows of `length` tokens on the devices of a mesh.

    "auto" is "splash" on TPUs, where rows are a multiple of 128 tokens (where not, a line says so once), else
    "blocked"; other names are themselves.

    Raises:
      ValueError: "splash" on devices that are no TPUs.
    """
    on_tpu = mesh is not None and platform(mesh) == "tpu"
    if name == "splash" and mesh is not None and not on_tpu:
        raise ValueError(f"attention='splash' on {platform(mesh)} devices; allowed there: auto, blocked, einsum")
    if name != "auto":
        return name
    if on_tpu and length % LANES:
        say_once(
            f"attention: rows of {length} tokens (config.rows.tokens) are no multiple of {LANES}, so that they run "
            "without the TPU's kernels"
        )
    return "splash" if on_tpu and length % LANES == 0 else "blocked"


def attention_by_name(name: str) -> AttentionFn:
    """Entry of `ATTENTION`.

    Raises:
      ValueError: unknown name; the known ones are listed.
    """
    if name not in ATTENTION:
        raise ValueError(f"unknown attention {name!r}; known: auto, {', '.join(ATTENTION)}")
    return ATTENTION[name]

"""Causal attention of packed rows on TPU: jax's splash attention kernels, spread over a mesh by hand.

The kernels skip the blocks above the diagonal, keep the softmax in float32, and read each key/value head in place
for all query heads of its group. A Pallas call is opaque to the compiler's partitioner, so `shard_map` says what
each device computes: its own rows (mesh axes data and fsdp) and its own query heads (tensor).
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jax.sharding import Mesh

from turnppo_jax.parallel.sharding import manual_spec, mesh_axes, parts_of

LANES = 128
# Queries and keys of one step of the kernels. At 512 a step's matrices fill the multiplier many times over and its
# float32 scores take 1 MiB of the 16 MiB of VMEM that every TPU since v4 grants; the blocks on the diagonal, half of
# which is masked, cost 512 / T of the whole.
_LARGEST_BLOCK = 512
# For remat policies that keep named values.
RESIDUAL_NAME = "attention"


def splash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    mesh: Mesh | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Same function as `attention.einsum_attention`, to rounding; TPU only.

    Where the mesh axis `tensor` divides the query heads but not the key/value heads, every device picks from all
    key/value heads those that its query heads read. Where it does not divide the query heads, every device along it
    computes all of them.

    Args:
      q: [B, T, N, H]; T a multiple of 128.
      k: [B, T, Nkv, H]; head n of q reads key/value head n // (N / Nkv).
      v: [B, T, Nkv, H].
      segment_ids: [B, T] int32.
      mesh: where it runs; None: one device.
      interpret: emulate the kernels, slowly, on any device.

    Returns:
      [B, T, N, H] in the dtype of q.

    Raises:
      ValueError: T is no multiple of 128.
    """
    _, length, heads, head_dim = q.shape
    if length % LANES:
        raise ValueError(
            f"attention='splash' with rows of T={length} tokens (config.rows.tokens); allowed: a multiple of {LANES}"
        )
    q, k, v = (_pad_heads(x) for x in (q * jnp.asarray(head_dim**-0.5, q.dtype), k, v))
    attend = functools.partial(_local_attention, interpret=interpret)
    if mesh is None or mesh.size == 1:
        return attend(q, k, v, segment_ids)[..., :head_dim]
    queries = manual_spec(mesh, ("rows", "columns", "heads"), q.shape)
    keys = manual_spec(mesh, ("rows", "columns", "kv_heads"), k.shape)
    rows = manual_spec(mesh, ("rows", "columns"), segment_ids.shape)
    split, kv_split = mesh_axes(mesh, "heads", heads), mesh_axes(mesh, "kv_heads", k.shape[2])
    local_heads = heads // parts_of(mesh, "heads", heads)

    def on_device(q, k, v, segment_ids):
        if split != kv_split:
            k, v = (_heads_read(x, jax.lax.axis_index(split) * local_heads, local_heads, heads) for x in (k, v))
        return attend(q, k, v, segment_ids)

    out = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(queries, keys, keys, rows),
        out_specs=queries,
        check_vma=False,  # the kernels do not say along which axes their results vary
    )(q, k, v, segment_ids)
    return out[..., :head_dim]


def block_size(length: int) -> int:
    """Side of the kernels' blocks for rows of `length` tokens: its largest divisor among 128, 256, 384, 512."""
    return max(size for size in range(LANES, _LARGEST_BLOCK + 1, LANES) if length % size == 0)


def _pad_heads(x: jax.Array) -> jax.Array:
    """Zeros behind the last axis up to a head size of the kernels: 64, or a multiple of 128. They change no product."""
    head_dim = x.shape[-1]
    wanted = 64 if head_dim <= 64 else -(-head_dim // LANES) * LANES
    return x if wanted == head_dim else jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, wanted - head_dim)])


def _heads_read(x: jax.Array, first: jax.Array, count: int, heads: int) -> jax.Array:
    """Of all key/value heads [B, T, Nkv, H], those that the query heads first..first + count of `heads` read.

    One for each run of query heads that share one wherever the shard begins: [B, T, count / run, H].
    """
    group = heads // x.shape[2]
    run = math.gcd(count, group)
    picks = [jax.lax.dynamic_slice_in_dim(x, (first + at) // group, 1, axis=2) for at in range(0, count, run)]
    return jnp.concatenate(picks, axis=2)


def _local_attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, *, interpret: bool) -> jax.Array:
    """Attention of the rows and heads of one device; q already scaled."""
    length, heads = q.shape[1:3]
    side = block_size(length)
    sides = {f"block_{name}": side for name in ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")}
    with jax.ensure_compile_time_eval():  # the tables of blocks are constants of the program, not part of its trace
        kernel = splash.make_splash_mha(
            splash_mask.MultiHeadMask([splash_mask.CausalMask((length, length))] * heads),
            block_sizes=splash.BlockSizes(**sides),
            head_shards=1,
            q_seq_shards=1,
            residual_checkpoint_name=RESIDUAL_NAME,
            interpret=interpret,
        )
    run = jax.vmap(lambda q, k, v, ids: kernel(q, k, v, splash.SegmentIds(ids, ids)))
    if q.dtype == jnp.float32:
        run = _in_full_float32(run)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    return jnp.swapaxes(run(q, k, v, segment_ids), 1, 2)


def _in_full_float32(run: Callable) -> Callable:
    """`run(q, k, v, segment_ids)` whose products, those of its gradient too, round no operand to bfloat16."""
    full = functools.partial(jax.default_matmul_precision, "highest")  # the kernels ask for no precision themselves

    @jax.custom_vjp
    def exact(q, k, v, segment_ids):
        with full():
            return run(q, k, v, segment_ids)

    def forward(q, k, v, segment_ids):
        with full():
            return jax.vjp(lambda q, k, v: run(q, k, v, segment_ids), q, k, v)

    def backward(pull_back, d_out):
        with full():
            return (*pull_back(d_out), None)

    exact.defvjp(forward, backward)
    return exact

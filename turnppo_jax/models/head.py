"""Log-probabilities of given tokens without the whole logits in memory.

On a mesh (`jax.shard_map`) the kernel is gathered over fsdp once, in the dtype of hidden, and each device multiplies
its own rows with its own part of the vocabulary. Over tensor go a maximum, a sum and the target's logit of each
token, never logits; the gradient of the kernel is reduced once, straight to the part that a device holds.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from turnppo_jax.models.decoder import Decoder, head_product
from turnppo_jax.models.precision import matmul_precision
from turnppo_jax.parallel.collectives import first_index, gather, max_over, sum_over, sum_to_parts
from turnppo_jax.parallel.sharding import constrain, mesh_axes


def token_logprobs(
    model: Decoder,
    hidden: jax.Array,
    targets: jax.Array,
    temperature: jax.Array | float,
    *,
    chunk: int = 128,
    with_entropy: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Log-probability of each target under `softmax(logits / temperature)`.

        z = logits(hidden[b, a]) / temperature
        logprob[b, a] = z[targets[b, a]] - logsumexp(z)
        entropy[b, a] = -sum_v p_v log p_v,  p = softmax(z)

    The head runs over `chunk` columns at a time and again in the backward pass, so that [B, A, V] never exists
    whole. The gradient of the head's kernel is summed in float32 whatever the dtype of hidden.

    Args:
      model: its head is used.
      hidden: [B, A, D] after the final norm, at the positions before the targets.
      targets: [B, A] int32; below 0 is padding: result 0, gradient 0, whatever hidden holds there.
      temperature: scalar, above 0; no gradient.
      chunk: columns at a time.
      with_entropy: also return the entropy.

    Returns:
      [B, A] float32 log-probabilities, or (log-probabilities, entropies).

    Raises:
      ValueError: shapes that do not fit, chunk below 1.
    """
    if hidden.ndim != 3 or hidden.shape[:2] != targets.shape:
        raise ValueError(f"hidden {hidden.shape} and targets {targets.shape}: allowed: [B, A, D] and [B, A]")
    if chunk < 1:
        raise ValueError(f"chunk={chunk}; allowed: at least 1")
    count = targets.shape[1]
    chunk = max(1, min(chunk, count))
    padding = -count % chunk
    hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0)))
    targets = jnp.pad(targets, ((0, 0), (0, padding)), constant_values=-1)
    # Select before the products: what stands under padding may be anything.
    hidden = jnp.where((targets >= 0)[..., None], hidden, 0)
    temperature = jax.lax.stop_gradient(jnp.asarray(temperature, jnp.float32))
    kernel = model.head_kernel()
    logprobs, entropies = _logprobs(
        kernel,
        _to_chunks(hidden, chunk),
        _to_chunks(targets, chunk),
        temperature,
        _Places.of(model.mesh, kernel.shape, targets.shape[0]),
        model.sizes.num_token_ids,
        with_entropy,
    )
    logprobs = _from_chunks(logprobs)[:, :count]
    return (logprobs, _from_chunks(entropies)[:, :count]) if with_entropy else logprobs


def _to_chunks(x: jax.Array, chunk: int) -> jax.Array:
    """[B, A, ...] -> [A / chunk, B, chunk, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)


def _from_chunks(x: jax.Array) -> jax.Array:
    """[A / chunk, B, chunk] -> [B, A]."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)


@dataclasses.dataclass(frozen=True)
class _Places:
    """Where the arrays lie: mesh axes of the kernel's two axes and of the rows; all empty on one device."""

    mesh: Mesh | None
    vocab: tuple[str, ...]
    embed: tuple[str, ...]
    rows: tuple[str, ...]

    @classmethod
    def of(cls, mesh: Mesh | None, kernel_shape: tuple[int, int], rows: int) -> "_Places":
        if mesh is None or mesh.size == 1:
            return cls(None, (), (), ())
        vocab, embed = (mesh_axes(mesh, axis, size) for axis, size in zip(("vocab", "embed"), kernel_shape))
        return cls(mesh, vocab, embed, mesh_axes(mesh, "rows", rows))

    def operand(self, kernel: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """The kernel cast where it lies, so that what crosses devices has the width of `dtype`."""
        return constrain(kernel.astype(dtype), ("vocab", "embed"), self.mesh)

    def run(self, local: Callable, arguments: str, results: str) -> Callable:
        """`local` on the parts of each device; a letter says what an array is.

        k: kernel; c: chunks [n, B, c, ...], split by rows; r: whole on every device.
        """
        if self.mesh is None:
            return local
        specs = {
            "k": PartitionSpec(self.vocab or None, self.embed or None),
            "c": PartitionSpec(None, self.rows or None),
            "r": PartitionSpec(),
        }
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=tuple(specs[letter] for letter in arguments),
            out_specs=tuple(specs[letter] for letter in results),
            check_vma=False,
        )


class _Chunk:
    """The head on one chunk, hidden [B, c, D] against a device's part [V', D] of the vocabulary.

    Attributes:
      logp: [B, c, V'] float32, log-softmax over the whole vocabulary.
      p: exp of it.
      targets: [B, c] int32 as rows of the part; below 0 or V' and up: elsewhere.
    """

    def __init__(self, kernel, hidden, targets, temperature, places: _Places, num_token_ids: int):
        self._vocab = places.vocab
        first = first_index(kernel.shape[0], places.vocab)
        ids = first + jnp.arange(kernel.shape[0])
        z = jnp.where(ids < num_token_ids, head_product(hidden, kernel), -jnp.inf) / temperature
        z = z - max_over(jnp.max(z, axis=-1, keepdims=True), self._vocab)
        self.logp = z - jnp.log(sum_over(jnp.sum(jnp.exp(z), axis=-1, keepdims=True), self._vocab))
        self.p = jnp.exp(self.logp)
        self.targets = targets - first

    def target_logprobs(self):
        """[B, c], meaningless at padding."""
        size = self.logp.shape[-1]
        at = jnp.clip(self.targets, 0, size - 1)[..., None]
        picked = jnp.take_along_axis(self.logp, at, axis=-1)[..., 0]
        here = (self.targets >= 0) & (self.targets < size)
        return sum_over(jnp.where(here, picked, 0), self._vocab)

    def is_target(self):
        """[B, c, V'] bool."""
        return jnp.arange(self.logp.shape[-1]) == self.targets[..., None]

    def entropies(self):
        """[B, c]; 0 log 0 = 0 at the ids that no token has."""
        return sum_over(-jnp.sum(jnp.where(self.p > 0, self.p * self.logp, 0), axis=-1), self._vocab)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _logprobs(kernel, hidden, targets, temperature, places: _Places, num_token_ids: int, with_entropy: bool):
    """Chunked log-probabilities [n, B, c] and entropies (zeros unless asked for)."""

    def local(kernel, hidden, targets, temperature):
        kernel = gather(kernel, 1, places.embed)

        def body(carry, inputs):
            hidden, targets = inputs
            chunk = _Chunk(kernel, hidden, targets, temperature, places, num_token_ids)
            logprobs = jnp.where(targets >= 0, chunk.target_logprobs(), 0)
            entropies = jnp.where(targets >= 0, chunk.entropies(), 0) if with_entropy else jnp.zeros_like(logprobs)
            return carry, (logprobs, entropies)

        return jax.lax.scan(body, (), (hidden, targets))[1]

    operand = places.operand(kernel, hidden.dtype)
    return places.run(local, "kccr", "cc")(operand, hidden, targets, temperature)


def _logprobs_forward(kernel, hidden, targets, temperature, places, num_token_ids, with_entropy):
    out = _logprobs(kernel, hidden, targets, temperature, places, num_token_ids, with_entropy)
    return out, (kernel, hidden, targets, temperature)


def _logprobs_backward(places, num_token_ids, with_entropy, saved, cotangents):
    """With z = logits / temperature: d logprob / dz_v = [v = y] - p_v, d entropy / dz_v = -p_v (log p_v + entropy)."""
    kernel, hidden, targets, temperature = saved
    dtype = hidden.dtype
    precision = matmul_precision(dtype)

    def local(kernel, hidden, targets, temperature, d_logprobs, d_entropies):
        kernel = gather(kernel, 1, places.embed)

        def body(kernel_gradient, inputs):
            hidden, targets, d_logprobs, d_entropies = inputs
            chunk = _Chunk(kernel, hidden, targets, temperature, places, num_token_ids)
            d_logprobs = jnp.where(targets >= 0, d_logprobs, 0)[..., None]
            d_logits = jnp.where(chunk.is_target(), d_logprobs, 0) - chunk.p * d_logprobs
            if with_entropy:
                entropies = chunk.entropies()[..., None]
                d_entropies = jnp.where(targets >= 0, d_entropies, 0)[..., None]
                d_logits -= jnp.where(chunk.p > 0, chunk.p * (chunk.logp + entropies), 0) * d_entropies
            d_logits = (d_logits / temperature).astype(dtype)
            d_hidden = jnp.einsum("bcv,vd->bcd", d_logits, kernel, precision=precision)
            kernel_gradient += jnp.einsum(
                "bcv,bcd->vd", d_logits, hidden, precision=precision, preferred_element_type=jnp.float32
            )
            return kernel_gradient, sum_over(d_hidden, places.vocab)

        start = jnp.zeros(kernel.shape, jnp.float32)
        inputs = (hidden, targets, d_logprobs, d_entropies)
        kernel_gradient, d_hidden = jax.lax.scan(body, start, inputs)
        kernel_gradient = kernel_gradient.astype(dtype if places.rows else jnp.float32)
        kernel_gradient = sum_to_parts(kernel_gradient, places.rows, ((), places.embed))
        if places.rows:
            # Without the barrier XLA's TPU compiler tries to move the sum over devices out of the loop that adds up
            # micro-batches, and fails in its pass while_loop_all_reduce_code_motion.
            kernel_gradient = jax.lax.optimization_barrier(kernel_gradient)
        return kernel_gradient.astype(jnp.float32), d_hidden

    operand = places.operand(kernel, dtype)
    kernel_gradient, d_hidden = places.run(local, "kccrcc", "kc")(operand, hidden, targets, temperature, *cotangents)
    return kernel_gradient.astype(kernel.dtype), d_hidden, None, jnp.zeros_like(temperature)


_logprobs.defvjp(_logprobs_forward, _logprobs_backward)

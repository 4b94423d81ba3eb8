"""Log-probabilities of given tokens without the whole logits in memory."""

import functools

import jax
import jax.numpy as jnp

from turnppo_jax.models.decoder import Decoder, head_product, mask_logits
from turnppo_jax.models.precision import matmul_precision
from turnppo_jax.models.sizes import ModelSizes


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
    logprobs, entropies = _logprobs(
        model.head_kernel(),
        _to_chunks(hidden, chunk),
        _to_chunks(targets, chunk),
        temperature,
        model.sizes,
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


def _chunk_terms(kernel, hidden, targets, temperature, sizes):
    """log-softmax [B, c, V] of one chunk, probabilities, entropies [B, c]."""
    logp = jax.nn.log_softmax(mask_logits(head_product(hidden, kernel), sizes) / temperature, axis=-1)
    p = jnp.exp(logp)
    # 0 log 0 = 0 at the ids that no token has.
    entropies = -jnp.sum(jnp.where(p > 0, p * logp, 0), axis=-1)
    return logp, p, jnp.where(targets >= 0, entropies, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _logprobs(kernel, hidden, targets, temperature, sizes: ModelSizes, with_entropy: bool):
    """Chunked log-probabilities [n, B, c] and entropies (zeros unless asked for)."""
    operand = kernel.astype(hidden.dtype)

    def body(carry, inputs):
        hidden, targets = inputs
        logp, _, entropies = _chunk_terms(operand, hidden, targets, temperature, sizes)
        logprobs = jnp.take_along_axis(logp, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
        return carry, (jnp.where(targets >= 0, logprobs, 0), entropies if with_entropy else jnp.zeros_like(logprobs))

    return jax.lax.scan(body, (), (hidden, targets))[1]


def _logprobs_forward(kernel, hidden, targets, temperature, sizes, with_entropy):
    return _logprobs(kernel, hidden, targets, temperature, sizes, with_entropy), (kernel, hidden, targets, temperature)


def _logprobs_backward(sizes, with_entropy, saved, cotangents):
    """With z = logits / temperature: d logprob / dz_v = [v = y] - p_v, d entropy / dz_v = -p_v (log p_v + entropy)."""
    kernel, hidden, targets, temperature = saved
    operand = kernel.astype(hidden.dtype)
    precision = matmul_precision(hidden.dtype)
    ids = jnp.arange(kernel.shape[0])

    def body(kernel_gradient, inputs):
        hidden, targets, d_logprobs, d_entropies = inputs
        logp, p, entropies = _chunk_terms(operand, hidden, targets, temperature, sizes)
        d_logprobs = jnp.where(targets >= 0, d_logprobs, 0)[..., None]
        d_logits = jnp.where(ids == targets[..., None], d_logprobs, 0) - p * d_logprobs
        if with_entropy:
            d_entropies = jnp.where(targets >= 0, d_entropies, 0)[..., None]
            d_logits = d_logits - jnp.where(p > 0, p * (logp + entropies[..., None]), 0) * d_entropies
        d_logits = (d_logits / temperature).astype(hidden.dtype)
        d_hidden = jnp.einsum("bcv,vd->bcd", d_logits, operand, precision=precision)
        kernel_gradient += jnp.einsum(
            "bcv,bcd->vd", d_logits, hidden, precision=precision, preferred_element_type=jnp.float32
        )
        return kernel_gradient, d_hidden

    start = jnp.zeros(kernel.shape, jnp.float32)
    kernel_gradient, d_hidden = jax.lax.scan(body, start, (hidden, targets, *cotangents))
    return kernel_gradient.astype(kernel.dtype), d_hidden, None, jnp.zeros_like(temperature)


_logprobs.defvjp(_logprobs_forward, _logprobs_backward)

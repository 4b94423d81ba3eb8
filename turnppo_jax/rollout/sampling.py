"""Drawing the next token from logits: temperature, top-k, top-p, one uniform number a token.

Everything is traced (temperature, top_p, top_k too), so one compiled program serves every setting.
"""

import jax
import jax.numpy as jnp

_BLOCK = 128  # width of the inner level of the cumulative sums; a TPU lane count, and small enough for a CPU cache


def sample_tokens(logits, uniforms, *, temperature, top_p, top_k):
    """Draws one token a row and reports its log-probability.

    With w_v = exp(logits_v / temperature), a token is drawn from w restricted to the kept set by
    inverting the cumulative sum at `uniforms`. The reported log-probability is that of the whole
    vocabulary, log(w_v / sum w), whatever top-k and top-p keep, which is what the learner computes.

    Kept set: the `top_k` most probable tokens, renormalised, then of these each token for which the
    mass of the more probable ones is below `top_p`. Ties go by index, so the set is exactly that of a
    stable sort; the most probable token always survives.

    Args:
      logits: [S, V] float32; -inf where an id does not exist.
      uniforms: [S] float32 in [0, 1).
      temperature: scalar; 0 means the most probable token (its log-probability is then at temperature 1).
      top_p: scalar in (0, 1]; 1 keeps all.
      top_k: scalar int; 0 keeps all.

    Returns:
      tokens [S] int32 and logprobs [S] float32.
    """
    if logits.ndim != 2 or uniforms.shape != logits.shape[:1]:
        raise ValueError(f"logits must be [S, V] and uniforms [S], got {logits.shape} and {uniforms.shape}")
    scaled = logits.astype(jnp.float32) / jnp.where(temperature > 0, temperature, 1.0)
    peak = jnp.max(scaled, axis=-1, keepdims=True)
    weights = jnp.exp(scaled - peak)
    total = jnp.sum(weights, axis=-1)
    kept = jax.lax.cond((top_p < 1.0) | (top_k > 0), lambda w: _restrict(w, top_p, top_k), lambda w: w, weights)
    drawn = _invert_cumulative(kept, uniforms)
    # The first of the most probable. XLA's argmax on a CPU costs more than all the rest of this function.
    index = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    greedy = jnp.min(jnp.where(scaled == peak, index, index[-1]), axis=-1)
    tokens = jnp.where(temperature > 0, drawn, greedy)
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen - peak[:, 0] - jnp.log(total)


def _restrict(weights, top_p, top_k):
    """Zeroes the weights [S, V] outside the kept set."""
    size = weights.shape[-1]
    limit = jnp.where(top_k > 0, jnp.minimum(top_k, size), size)

    def by_rank(w):
        # A token is kept when fewer than `limit` tokens stand before it.
        return _keep_smallest_prefix(w, jnp.ones_like(w), jnp.full(w.shape[:1], limit, jnp.float32))

    def by_mass(w):
        return _keep_smallest_prefix(w, w, top_p * jnp.sum(w, axis=-1))

    weights = jax.lax.cond(top_k > 0, by_rank, lambda w: w, weights)
    return jax.lax.cond(top_p < 1.0, by_mass, lambda w: w, weights)


def _keep_smallest_prefix(weights, measure, bound):
    """Keeps each token for which the measure of the tokens before it, by falling weight, is below `bound`.

    No sort: bisects the threshold over the bit patterns of non-negative floats, which are ordered like
    the floats, with one masked sum over the vocabulary a round; then cuts ties by index.

    Args:
      weights: [S, V] float32, non-negative, largest 1.
      measure: [S, V] float32, what a token adds for those after it; equal for equal weights.
      bound: [S] float32.
    """

    def before(threshold_bits):
        threshold = jax.lax.bitcast_convert_type(threshold_bits, jnp.float32)
        return jnp.sum(jnp.where(weights > threshold[:, None], measure, 0.0), axis=-1)

    def halve(interval):
        low, high = interval  # before(high) < bound, and not before(low) unless low is -1
        middle = low + (high - low) // 2
        fits = before(middle) < bound
        return jnp.where(fits, low, middle), jnp.where(fits, middle, high)

    rows = weights.shape[:1]
    one = jax.lax.bitcast_convert_type(jnp.float32(1.0), jnp.int32)
    _, high = jax.lax.while_loop(
        lambda interval: jnp.any(interval[1] - interval[0] > 1), halve, (jnp.full(rows, -1), jnp.full(rows, one))
    )
    threshold = jax.lax.bitcast_convert_type(high, jnp.float32)[:, None]
    tied = weights == threshold
    each = jnp.max(jnp.where(tied, measure, 0.0), axis=-1)
    room = jnp.ceil((bound - before(high)) / jnp.where(each > 0, each, 1.0))
    rank = _cumulative(tied.astype(jnp.float32))
    # The first of the tied always stays: what stands before it is below the bound.
    keep = (weights > threshold) | (tied & (rank <= jnp.maximum(room, 1.0)[:, None]))
    return jnp.where(keep, weights, 0.0)


def _blocks(x):
    """[S, V] -> [S, V / block, block], padded with zeros."""
    rows, size = x.shape
    padded = jnp.pad(x, ((0, 0), (0, -size % _BLOCK)))
    return padded.reshape(rows, -1, _BLOCK)


def _cumulative(x):
    """Inclusive cumulative sum over the last axis of [S, V], in two levels."""
    blocks = _blocks(x)
    ends = jnp.cumsum(jnp.sum(blocks, axis=-1), axis=-1)
    starts = jnp.pad(ends[:, :-1], ((0, 0), (1, 0)))
    return (jnp.cumsum(blocks, axis=-1) + starts[..., None]).reshape(x.shape[0], -1)[:, : x.shape[1]]


def _invert_cumulative(weights, uniforms):
    """The first index whose cumulative weight exceeds uniform * total: [S, V], [S] -> [S] int32.

    Two levels: the block first, then the index in it, so that only one block a row is summed finely
    and the rounding of a sum over 150,000 weights does not decide. Never an index of zero weight.
    """
    blocks = _blocks(weights)
    masses = jnp.sum(blocks, axis=-1)
    ends = jnp.cumsum(masses, axis=-1)
    target = uniforms * ends[:, -1]
    block = _first_above(ends, masses, target)
    rest = target - jnp.take_along_axis(ends - masses, block[:, None], axis=-1)[:, 0]
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * _BLOCK + _first_above(jnp.cumsum(inside, axis=-1), inside, rest)


def _first_above(ends, weights, target):
    """First index with positive weight and cumulative end above target, else the last positive one."""
    index = jnp.arange(weights.shape[-1], dtype=jnp.int32)
    positive = weights > 0
    first = jnp.min(jnp.where(positive & (ends > target[:, None]), index, weights.shape[-1]), axis=-1)
    last = jnp.max(jnp.where(positive, index, 0), axis=-1)
    return jnp.minimum(first, last)

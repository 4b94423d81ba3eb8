"""One decoder for Qwen2.5, Qwen3 and Llama: pre-norm blocks of rotary attention and a gated feed-forward layer.

    x <- x + O . attention(rope(q), rope(k), v)        q, k, v = projections of rms_norm(x)
    x <- x + down(silu(gate(h)) * up(h))               h = rms_norm(x)

Parameters are a plain nested dict; those of the layers are stacked on a leading axis L and scanned, so that
compile time does not grow with depth. `bind` wraps them in NNX modules, inside jit too.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from turnppo_jax.models import cache as cache_lib
from turnppo_jax.models.attention import attention_by_name, choose_attention
from turnppo_jax.models.cache import Cache
from turnppo_jax.models.embedding import embed_tokens
from turnppo_jax.models.linear import PRODUCT, Linear, project
from turnppo_jax.models.logical_axes import axes_of
from turnppo_jax.models.parameters import cast_weights, decoder_shapes, init_decoder
from turnppo_jax.models.precision import matmul_precision
from turnppo_jax.models.sizes import ModelSizes
from turnppo_jax.parallel.sharding import constrain

__all__ = ["REMAT_POLICIES", "Decoder", "bind", "decoder_shapes", "init_decoder"]

# What is kept from a layer's forward pass for its backward pass; the rest is computed again.
REMAT_POLICIES: dict[str, Callable | None] = {
    "none": None,  # keep everything
    "dots": jax.checkpoint_policies.save_from_both_policies(  # keep the results of weight products
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(PRODUCT),
    ),
    "full": jax.checkpoint_policies.nothing_saveable,  # keep a layer's input only
}

# Attention of one layer as the layer sees it: (state, q, k, v) -> (output like q, state).
Mix = Callable[[Any, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


class Norm(nnx.Module):
    """RMS norm over the last axis in float32; the learned scale stays float32."""

    def __init__(self, params: Mapping[str, Any], eps: float):
        self.scale = nnx.Param(params["scale"])
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., n] -> [..., n] in the dtype of x."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class Layer(nnx.Module):
    """One block; its leaves carry a leading axis L outside the scan and none inside."""

    def __init__(self, sizes: ModelSizes, params: Mapping[str, Any], mesh: Mesh | None = None):
        eps = sizes.rms_norm_eps
        attention = params["attention"]

        def linear(group: str, name: str, inputs: int = 1) -> Linear:
            _, *axes = axes_of(f"layers/{group}/{name}/kernel", params[group][name]["kernel"].ndim)
            return Linear(params[group][name], tuple(axes), inputs)

        self.mesh = mesh
        self.attention_norm = Norm(params["attention_norm"], eps)
        self.q = linear("attention", "q")
        self.k = linear("attention", "k")
        self.v = linear("attention", "v")
        self.o = linear("attention", "o", inputs=2)
        self.q_norm = Norm(attention["q_norm"], eps) if sizes.qk_norm else None
        self.k_norm = Norm(attention["k_norm"], eps) if sizes.qk_norm else None
        self.mlp_norm = Norm(params["mlp_norm"], eps)
        self.gate = linear("mlp", "gate")
        self.up = linear("mlp", "up")
        self.down = linear("mlp", "down")

    def placed(self, stacked: Any) -> Any:
        """The leaves of all layers (an nnx state), each kernel and bias constrained to where the table puts it."""

        def place(path, leaf):
            module, name = getattr(self, path[0].key), path[1].key
            if not isinstance(module, Linear):
                return leaf
            axes = module.axes if name == "kernel" else module.axes[module.inputs :]
            return constrain(leaf, ("layers", *axes), self.mesh)

        return jax.tree.map_with_path(place, stacked)

    def __call__(self, x: jax.Array, rotary: tuple[jax.Array, jax.Array], state: Any, mix: Mix):
        """(x [B, T, D], state) -> the same, after the block; `mix` is its attention."""
        h = self.attention_norm(x)
        q, k, v = project(h, (self.q, self.k, self.v), self.mesh)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out, state = mix(state, rotate(q, rotary), rotate(k, rotary), v)
        x = x + project(out, (self.o,), self.mesh)[0]
        h = self.mlp_norm(x)
        gate, up = project(h, (self.gate, self.up), self.mesh)
        return x + project(jax.nn.silu(gate) * up, (self.down,), self.mesh)[0], state


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head over a tree of parameters (see `decoder_shapes`).

    With a mesh, what the layers compute is spread over its devices by the sharding rules; without one the compiler
    places everything by what the parameters' shardings say.
    """

    def __init__(self, sizes: ModelSizes, params: Mapping[str, Any], mesh: Mesh | None = None):
        self.sizes = sizes
        self.mesh = mesh
        self.embedding = nnx.Param(params["embed"]["embedding"])
        self.layers = Layer(sizes, params["layers"], mesh)
        self.final_norm = Norm(params["final_norm"], sizes.rms_norm_eps)
        self.lm_head = nnx.Param(params["lm_head"]["kernel"]) if "lm_head" in params else None

    def hidden_states(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array,
        *,
        compute_dtype: jnp.dtype = jnp.float32,
        remat: str = "none",
        attention: str = "auto",
    ) -> jax.Array:
        """Hidden states of whole rows.

        Args:
          tokens: [B, T] int32.
          positions: [B, T] int32, from 0 in each segment.
          segment_ids: [B, T] int32; a token sees the columns up to its own with the same id. 0 is padding.
          compute_dtype: float32 or bfloat16; norms, softmax and rotation are float32 in either.
          remat: key of `REMAT_POLICIES`.
          attention: key of `attention.ATTENTION`, or "auto", see `attention.choose_attention`.

        Returns:
          [B, T, D] after the final norm, in `compute_dtype`; finite and meaningless at padding.

        Raises:
          ValueError: unknown `remat` or `attention`, shapes that differ.
        """
        if not tokens.shape == positions.shape == segment_ids.shape or tokens.ndim != 2:
            raise ValueError(
                f"tokens {tokens.shape}, positions {positions.shape}, segment_ids {segment_ids.shape}: allowed: "
                "three arrays of one shape [B, T]"
            )
        attend = attention_by_name(choose_attention(attention, self.mesh, tokens.shape[1]))

        def mix(state, q, k, v):
            return attend(q, k, v, segment_ids, self.mesh), state

        x = self._embed(tokens, compute_dtype)
        x, _ = self._run_layers(x, positions, (), lambda index, state: mix, remat)
        return self.final_norm(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Next-token logits.

        Args:
          hidden: [..., D] after the final norm. Its dtype is the operands'; the sum is float32.

        Returns:
          [..., V] float32; -inf at ids that no token has (`sizes.num_token_ids` and up).

        Raises:
          ValueError: the decoder has no head (a critic's backbone).
        """
        # Cast where it lies, then gathered over fsdp in the dtype of the product; the vocabulary stays split.
        kernel = constrain(self.head_kernel().astype(hidden.dtype), ("vocab", "embed"), self.mesh)
        kernel = constrain(kernel, ("vocab",), self.mesh)
        logits = mask_logits(head_product(hidden, kernel), self.sizes)
        between = (None,) * (hidden.ndim - 2)
        return constrain(logits, ("rows", *between, "vocab"), self.mesh)

    def head_kernel(self) -> jax.Array:
        """[V, D], the embedding itself where it is tied, in the dtype of the state.

        Raises:
          ValueError: the decoder has no head (a critic's backbone).
        """
        if self.sizes.tie_word_embeddings:
            return self.embedding[...]
        if self.lm_head is None:
            raise ValueError("this decoder has no head: params hold no lm_head and the sizes are untied")
        return self.lm_head[...]

    def prefill(
        self, cache: Cache, slots: jax.Array, tokens: jax.Array, counts: jax.Array, *, compute_dtype=jnp.float32
    ) -> Cache:
        """Appends tokens to slots of the cache.

        Args:
          cache: the cache.
          slots: [R] int32, different from one another; -1 is a dummy row that writes nothing. On a mesh each row
            stands on the data shard of its slot (see `models/cache.py`).
          tokens: [R, P] int32; row r holds `counts[r]` tokens, then padding.
          counts: [R] int32, 0..P; tokens that would pass the end of a slot are not written.
          compute_dtype: float32 or bfloat16.

        Returns:
          The cache with `lengths[slots] += counts`, at most the capacity.
        """
        real = jnp.where(slots >= 0, counts, 0)
        start = cache.lengths[jnp.maximum(slots, 0)]
        real = jnp.minimum(real, cache.capacity - start)
        column = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        positions = jnp.where(column < real[:, None], start[:, None] + column, -1)
        rows = cache_lib.prepare(cache, slots, positions, self.sizes.num_heads, self.mesh)

        def mix_at(index, cache):
            def mix(cache, q, k, v):
                cache = cache_lib.write(cache, index, rows, k, v, self.mesh)
                return cache_lib.attend(cache, index, rows, q, self.mesh), cache

            return mix

        x = self._embed(tokens, compute_dtype)
        _, cache = self._run_layers(x, jnp.maximum(positions, 0), cache, mix_at)
        target = jnp.where(slots >= 0, slots, cache.num_slots)
        return dataclasses.replace(cache, lengths=cache.lengths.at[target].add(real, mode="drop"))

    def decode(
        self, cache: Cache, tokens: jax.Array, active: jax.Array, *, compute_dtype=jnp.float32
    ) -> tuple[jax.Array, Cache]:
        """One token for every active slot.

        Args:
          cache: the cache; an active slot must have room (`lengths < capacity`), a full one writes nothing.
          tokens: [S] int32, the token at position `lengths` of each slot.
          active: [S] bool.
          compute_dtype: float32 or bfloat16.

        Returns:
          (hidden [S, D] after the final norm, in `compute_dtype`, meaningless at inactive slots; the cache
          with `lengths += active`).
        """
        active = active & (cache.lengths < cache.capacity)
        positions = jnp.where(active, cache.lengths, -1)[:, None]
        rows = cache_lib.prepare(cache, None, positions, self.sizes.num_heads, self.mesh)

        def mix_at(index, cache):
            def mix(cache, q, k, v):
                cache = cache_lib.write(cache, index, rows, k, v, self.mesh)
                return cache_lib.attend(cache, index, rows, q, self.mesh), cache

            return mix

        x = self._embed(tokens[:, None], compute_dtype)
        x, cache = self._run_layers(x, jnp.maximum(positions, 0), cache, mix_at)
        cache = dataclasses.replace(cache, lengths=cache.lengths + active.astype(jnp.int32))
        return self.final_norm(x)[:, 0], cache

    def _embed(self, tokens: jax.Array, compute_dtype: jnp.dtype) -> jax.Array:
        return embed_tokens(self.embedding[...], tokens, compute_dtype, self.mesh)

    def _run_layers(
        self,
        x: jax.Array,
        positions: jax.Array,
        state: Any,
        mix_at: Callable[[jax.Array, Any], Mix],
        remat: str = "none",
    ) -> tuple[jax.Array, Any]:
        """Scans the layers over (x, state); `mix_at(layer, state)` gives the attention of a layer."""
        if remat not in REMAT_POLICIES:
            raise ValueError(f"unknown remat {remat!r}; known: {', '.join(REMAT_POLICIES)}")
        graph, stacked = nnx.split(self.layers)
        # Cast before anything is gathered: what crosses devices has the width of x.dtype.
        stacked = self.layers.placed(cast_weights(stacked, x.dtype))
        rotary = rotary_table(constrain(positions, ("rows", "columns"), self.mesh), self.sizes)

        def body(carry, inputs):
            x, state = carry
            index, weights = inputs
            return nnx.merge(graph, weights)(x, rotary, state, mix_at(index, state)), None

        if REMAT_POLICIES[remat] is not None:
            body = jax.checkpoint(body, policy=REMAT_POLICIES[remat], prevent_cse=False)
        layers = jnp.arange(self.sizes.num_layers, dtype=jnp.int32)
        (x, state), _ = jax.lax.scan(body, (x, state), (layers, stacked))
        return x, state


def rotary_table(positions: jax.Array, sizes: ModelSizes) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of `position * theta ** (-2 i / H)`, float32 [..., 1, H / 2].

    bfloat16 would round position 257 to 256; float32 holds every int32 position up to 2 ** 24.
    """
    exponents = np.arange(0, sizes.head_dim, 2) / sizes.head_dim
    # Rounded to float32 before the division, as the checkpoints were trained: at position 5,000 one unit in
    # the last place of a frequency turns the angle by 3e-4.
    frequencies = np.float32(1.0) / np.power(np.float64(sizes.rope_theta), exponents).astype(np.float32)
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the pairs (i, i + H/2) of the last axis of x [B, T, N, H], in float32."""
    cos, sin = rotary
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def head_product(hidden: jax.Array, kernel: jax.Array) -> jax.Array:
    """Product of hidden [..., D] and kernel [V, D] -> float32 [..., V]; operands keep their dtype."""
    precision = matmul_precision(hidden.dtype)
    return jnp.einsum("...d,vd->...v", hidden, kernel, precision=precision, preferred_element_type=jnp.float32)


def mask_logits(logits: jax.Array, sizes: ModelSizes) -> jax.Array:
    """-inf at ids that no token has."""
    if sizes.num_token_ids == sizes.vocab_size:
        return logits
    return jnp.where(jnp.arange(sizes.vocab_size) < sizes.num_token_ids, logits, -jnp.inf)


def bind(params: Mapping[str, Any], sizes: ModelSizes, mesh: Mesh | None = None) -> Decoder:
    """The module over `params` (arrays or tracers), without copying them; cheap, for use inside jit."""
    return Decoder(sizes, params, mesh)

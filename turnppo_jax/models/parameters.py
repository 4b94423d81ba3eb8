"""The parameter tree of a decoder: which leaves there are, their shapes, and fresh values."""

import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from turnppo_jax.models.sizes import ModelSizes


def decoder_shapes(sizes: ModelSizes, dtype: jnp.dtype = jnp.float32) -> dict:
    """The parameter tree as shapes: the one place that says which parameters there are."""
    d, f, h, v = sizes.hidden_size, sizes.intermediate_size, sizes.head_dim, sizes.vocab_size
    n, nkv, num_layers = sizes.num_heads, sizes.num_kv_heads, sizes.num_layers

    def leaf(*shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    def layer_leaf(*shape):
        return leaf(num_layers, *shape)

    def projection(heads):
        bias = {"bias": layer_leaf(heads, h)} if sizes.qkv_bias else {}
        return {"kernel": layer_leaf(d, heads, h)} | bias

    attention = {
        "q": projection(n),
        "k": projection(nkv),
        "v": projection(nkv),
        "o": {"kernel": layer_leaf(n, h, d)},
    }
    if sizes.qk_norm:
        attention |= {"q_norm": {"scale": layer_leaf(h)}, "k_norm": {"scale": layer_leaf(h)}}
    params = {
        "embed": {"embedding": leaf(v, d)},
        "layers": {
            "attention_norm": {"scale": layer_leaf(d)},
            "attention": attention,
            "mlp_norm": {"scale": layer_leaf(d)},
            "mlp": {
                "gate": {"kernel": layer_leaf(d, f)},
                "up": {"kernel": layer_leaf(d, f)},
                "down": {"kernel": layer_leaf(f, d)},
            },
        },
        "final_norm": {"scale": leaf(d)},
    }
    return params if sizes.tie_word_embeddings else params | {"lm_head": {"kernel": leaf(v, d)}}


def init_decoder(sizes: ModelSizes, key: jax.Array, dtype: jnp.dtype = jnp.float32, shardings: Any = None) -> dict:
    """Fresh parameters: norms 1, biases 0, embedding and head of standard deviation 0.02.

    Kernels have standard deviation `1 / sqrt(fan_in)`, the two that write to the residual stream
    `1 / sqrt(2 L fan_in)`, so that its variance does not grow with depth. Each leaf's key is folded from its
    path: adding a parameter changes no other.

    Args:
      sizes: of the decoder.
      key: of everything that is drawn.
      dtype: of the parameters.
      shardings: tree of `jax.sharding.Sharding` like the parameters, or None for the default device. Each device draws
        its own parts alone; the values do not depend on how they are spread.
    """
    fan_in = {
        "q": sizes.hidden_size, "k": sizes.hidden_size, "v": sizes.hidden_size, "gate": sizes.hidden_size,
        "up": sizes.hidden_size, "o": sizes.num_heads * sizes.head_dim, "down": sizes.intermediate_size,
    }  # fmt: skip

    def init(path, leaf, sharding):
        names = [entry.key for entry in path]
        if names[-1] == "scale":
            return jnp.ones(leaf.shape, dtype, device=sharding)
        if names[-1] == "bias":
            return jnp.zeros(leaf.shape, dtype, device=sharding)
        deviation = 0.02
        if names[-2] in fan_in:
            deviation = fan_in[names[-2]] ** -0.5
        if names[-2] in ("o", "down"):
            deviation *= (2 * sizes.num_layers) ** -0.5
        leaf_key = jax.random.fold_in(key, zlib.crc32("/".join(names).encode()))
        # Scaled by a second program: inside one the compiler rearranges the products, and the last bit changes.
        return (deviation * _normal(leaf.shape, sharding)(leaf_key)).astype(dtype)

    shapes = decoder_shapes(sizes, dtype)
    if shardings is None:
        shardings = jax.tree.map(lambda _: None, shapes)
    return jax.tree.map_with_path(init, shapes, shardings)


@functools.lru_cache(maxsize=256)
def _normal(shape: tuple[int, ...], sharding: Sharding | None) -> Callable[[jax.Array], jax.Array]:
    """The program that draws one leaf, float32."""
    return jax.jit(lambda key: jax.random.normal(key, shape, jnp.float32), out_shardings=sharding)


def cast_weights(params: Any, dtype: jnp.dtype) -> Any:
    """The copy that a model computes with: everything but norm scales in `dtype`."""

    def cast(path, leaf):
        return leaf if any(getattr(entry, "key", None) == "scale" for entry in path) else leaf.astype(dtype)

    return jax.tree.map_with_path(cast, params)

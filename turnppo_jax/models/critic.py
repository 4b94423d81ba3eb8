"""The critic: a decoder without head, and a scalar value head."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from turnppo_jax.models.decoder import Decoder, init_decoder
from turnppo_jax.models.sizes import ModelSizes


class ValueHead(nnx.Module):
    """`V = hidden . kernel + bias`, float32 whatever the dtype of hidden."""

    def __init__(self, params: Mapping[str, Any]):
        self.kernel = nnx.Param(params["kernel"])
        self.bias = nnx.Param(params["bias"])

    def __call__(self, hidden: jax.Array) -> jax.Array:
        """[..., D] -> [...] float32."""
        kernel = self.kernel[...].astype(jnp.float32)
        value = jnp.einsum("...d,d->...", hidden.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST)
        return value + self.bias[...].astype(jnp.float32)


class Critic(nnx.Module):
    """Backbone and value head; values come from `critic.values(critic.backbone.hidden_states(...))`."""

    def __init__(self, sizes: ModelSizes, params: Mapping[str, Any], mesh: Mesh | None = None):
        self.backbone = Decoder(sizes, params["backbone"], mesh)
        self.value_head = ValueHead(params["value_head"])

    def values(self, hidden: jax.Array) -> jax.Array:
        """[..., D] hidden states after the final norm -> [...] float32 values."""
        return self.value_head(hidden)


def init_critic(sizes: ModelSizes, key: jax.Array, dtype: jnp.dtype = jnp.float32, backbone: Any = None) -> dict:
    """Parameters of a critic whose values are exactly 0.

    Args:
      sizes: of the decoder.
      key: for a fresh backbone; unused where one is given.
      dtype: of the backbone; the value head is float32.
      backbone: parameters of a decoder, its head ignored. Copied, each part on the device where it lies, so that
        neither side loses its buffers when the other is donated.

    Returns:
      {"backbone": ..., "value_head": {"kernel": [D], "bias": []}}.
    """
    source = init_decoder(sizes, key, dtype) if backbone is None else backbone
    copied = jax.tree.map(lambda leaf: jnp.array(leaf, dtype=dtype, copy=True), without_head(source))
    head = {"kernel": jnp.zeros(sizes.hidden_size, jnp.float32), "bias": jnp.zeros((), jnp.float32)}
    return {"backbone": copied, "value_head": head}


def bind_critic(params: Mapping[str, Any], sizes: ModelSizes, mesh: Mesh | None = None) -> Critic:
    """The module over `params`; cheap, for use inside jit."""
    return Critic(sizes, params, mesh)


def without_head(params: Mapping[str, Any]) -> dict:
    """Decoder parameters without the untied head (tied models have none)."""
    return {name: tree for name, tree in params.items() if name != "lm_head"}

"""`rollout_params = f(params)`: the only way weights reach the sampler."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from turnppo_jax.models.parameters import cast_weights, decoder_shapes
from turnppo_jax.models.sizes import ModelSizes
from turnppo_jax.parallel.sharding import shardings


def make_resharding(sizes: ModelSizes, training_mesh: Mesh, rollout_mesh: Mesh, dtype: jnp.dtype | str) -> Callable:
    """Jitted `reshard(params) -> rollout_params`: the weights in the sampler's dtype, where the sampler wants them.

    Each part is cast where it lies and then gathered: what crosses devices has the width of `dtype`. Norm scales stay
    as they are.

    Args:
      sizes: of the decoder.
      training_mesh: where `params` lie, by the table of rules.
      rollout_mesh: the same devices in the same order in another shape (`mesh.rollout_mesh`).
      dtype: of the sampler's computation.

    Raises:
      ValueError: meshes of different devices, or of the same in another order.
    """
    if training_mesh.devices.flatten().tolist() != rollout_mesh.devices.flatten().tolist():
        raise ValueError(
            f"rollout mesh {dict(rollout_mesh.shape)}; allowed: the devices of the training mesh "
            f"{dict(training_mesh.shape)} in the same order"
        )

    def reshard(params):
        return jax.lax.with_sharding_constraint(
            cast_weights(params, jnp.dtype(dtype)), shardings(training_mesh, params)
        )

    return jax.jit(reshard, out_shardings=shardings(rollout_mesh, decoder_shapes(sizes)))


def make_weight_sync(
    sizes: ModelSizes, training_mesh: Mesh, rollout_mesh: Mesh, dtype: jnp.dtype | str
) -> Callable[[Any], Any]:
    """`rollout_params = f(params)` by `make_resharding`; let go of the weights of one call before the next.

    Where neither dtype nor place would change, as on one device in float32, the arrays that come in are given back and
    nothing is copied. They are then those of the state that trains, and its next update takes them over.
    """
    reshard = make_resharding(sizes, training_mesh, rollout_mesh, dtype)
    places = shardings(rollout_mesh, decoder_shapes(sizes))

    def stays(leaf, wanted, place):
        return leaf.dtype == wanted.dtype and leaf.sharding.is_equivalent_to(place, leaf.ndim)

    def rollout_weights(params: Any) -> Any:
        wanted = jax.eval_shape(functools.partial(cast_weights, dtype=jnp.dtype(dtype)), params)
        if all(jax.tree.leaves(jax.tree.map(stays, params, wanted, places))):
            return params
        return reshard(params)

    return rollout_weights

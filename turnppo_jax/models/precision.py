"""The one rule of contraction precision."""

import jax
import jax.numpy as jnp


def matmul_precision(dtype: jnp.dtype) -> jax.lax.Precision:
    """HIGHEST for float32 operands, which a TPU otherwise rounds to bfloat16; DEFAULT for narrower ones."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT

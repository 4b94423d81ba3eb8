"""Run as a program with four CPU devices: the emulated TPU kernels on meshes; prints the largest errors as JSON."""

import json

import jax
import numpy as np

from tests import ragged_cases
from tests.test_splash_attention import emulated, packed, values_and_gradients
from turnppo_jax.models.attention import einsum_attention
from turnppo_jax.parallel.mesh import make_mesh

# name: heads, key/value heads, data, fsdp, tensor
CASES = {
    "rows over data and fsdp": (2, 1, 2, 2, 1),
    "heads over tensor": (4, 2, 1, 2, 2),
    "fewer key/value heads than tensor": (4, 2, 1, 1, 4),
    "a shard of heads across two groups": (12, 6, 1, 1, 4),
    "heads that tensor does not divide": (3, 3, 1, 1, 4),
}


def splash(heads, kv_heads, *axes):
    """Of values and gradients, against the reference on one device."""
    case = packed(128, heads, kv_heads, 16, rows=4)
    ours = values_and_gradients(emulated, *case, make_mesh(*axes))
    reference = values_and_gradients(einsum_attention, *case)
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, reference))


def main():
    jax.config.update("jax_disable_most_optimizations", True)
    ragged_cases.emulate()
    print(json.dumps({
        "splash": {name: splash(*case) for name, case in CASES.items()},
        "ragged": {
            "slots over data, heads over tensor": ragged_cases.largest_error(make_mesh(2, 1, 2)),
            "fewer key/value heads than tensor": ragged_cases.largest_error(make_mesh(1, 1, 4)),
        },
    }))  # fmt: skip


if __name__ == "__main__":
    main()

"""Every mesh of up to 8 CPU devices against one device; prints a line each, exits with 1 where a bound is broken.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu python -m tests.mesh_sweep

Some six minutes of one core. `tests/test_mesh.py` runs a part of it.
"""

import sys

import jax
import numpy as np

from tests import mesh_cases as mc

# See the tests for where these come from; gradients in units of a leaf's largest entry.
_BOUNDS = {"gradient": 2e-5, "parameters": 1e-5, "logprobs": 2e-6, "loss": 1e-5}


def learner_line(title, got, one):
    """Prints a comparison of two results of `mesh_cases.learner_step`; whether it is within the bounds."""
    found = {name: mc.largest_difference(got[name], one[name]) for name in ("gradient", "parameters", "logprobs")}
    losses = [name for name in one["metrics"] if name.endswith("/loss")]
    assert len(losses) == 2
    found["loss"] = max(abs(got["metrics"][n] - one["metrics"][n]) / (1 + abs(one["metrics"][n])) for n in losses)
    good = all(found[name] < bound for name, bound in _BOUNDS.items())
    print(title, " ".join(f"{name} {x:.1e}" for name, x in found.items()), "ok" if good else "BROKEN", flush=True)
    return good


def main():
    jax.config.update("jax_disable_most_optimizations", True)
    good = True
    for title, sizes in (("untied", mc.SIZES), ("tied", mc.TIED)):
        one = mc.learner_step(mc.ONE, sizes=sizes)
        for shape in mc.MESHES[8]:
            good &= learner_line(f"learner {title} {shape}", mc.learner_step(shape, sizes=sizes), one)
        if sizes is not mc.SIZES:
            continue
        # Micro-batches and devices: the last row is empty, the others have 8 to 32 tokens.
        for count, shapes in mc.MESHES.items():
            for micro_rows in (8, 4, 2):
                shape = shapes[len(shapes) // 2]
                got = mc.learner_step(shape, micro_rows)
                assert got["batch"]["batch/micro_batches"] == 8 // micro_rows
                good &= learner_line(f"learner {count} devices {shape}, {8 // micro_rows} micro-batches", got, one)
        for remat in ("dots", "full"):
            good &= learner_line(f"learner remat {remat} (2, 2, 2)", mc.learner_step((2, 2, 2), remat=remat), one)
    one = mc.sampled_ids(mc.ONE)
    for count in (2, 4, 8):
        for shape in mc.MESHES[count]:
            got = mc.sampled_ids(shape)
            same = got["ids"] == one["ids"]
            gap = float(np.abs(got["logprobs"] - one["logprobs"]).max()) if same else float("inf")
            good &= gap < 1e-5
            print(f"sampler {shape} same ids: {same} log-probs {gap:.1e}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

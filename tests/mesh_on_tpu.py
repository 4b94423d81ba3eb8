"""Run as a program where libtpu is installed: an update compiled for four TPU chips; prints its collectives as JSON."""

import json

from jax.experimental import topologies

from tests import mesh_cases as mc
from tests.collectives import collectives, partitioned_text
from turnppo_jax.parallel.mesh import host_major, make_mesh


def main():
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    # With the compiler's whole effort: some of its passes run, and fail, only then.
    for fsdp, tensor in ((4, 1), (2, 2)):
        mesh = make_mesh(fsdp=fsdp, tensor=tensor, devices=host_major(topology.devices))
        text = partitioned_text(mc.update_program(mesh, compute_dtype="bfloat16", remat="full"))
    print(json.dumps([(c.kind, c.dtype, c.shape) for c in collectives(text)]))


if __name__ == "__main__":
    main()

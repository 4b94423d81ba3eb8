"""Run as a program with four CPU devices: a step on one device and on a mesh of two by two; prints the differences."""

import dataclasses
import json

import jax
import numpy as np

from tests import learner_cases as cases
from turnppo_jax.parallel.mesh import make_mesh
from turnppo_jax.training.algorithm import AlgorithmConfig
from turnppo_jax.training.forward import ForwardSettings, LearnerSettings
from turnppo_jax.training.learner import Learner


def main():
    jax.config.update("jax_disable_most_optimizations", True)
    shape = dataclasses.replace(cases.SHAPE, micro_rows=4)
    settings = LearnerSettings(shape, AlgorithmConfig(), ForwardSettings(head_chunk=8))
    results, counts = [], []
    for mesh in (make_mesh(devices=jax.devices()[:1]), make_mesh(data=2, fsdp=2)):
        learner = Learner(cases.SIZES, mesh, settings, cases.NO_CLIP, cases.NO_CLIP)
        states = learner.init_states(cases.actor_params(), cases.critic_params())
        for step in range(2):
            *states, result = learner.step(*states, cases.make_trajectories(), step=step)
        results.append((jax.device_get([state.params for state in states]), result.metrics))
        counts.append(learner.compile_counts())
    kernel = states[0].params["layers"]["mlp"]["up"]["kernel"]
    (params, metrics), (sharded_params, sharded_metrics) = results
    parameters = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), params, sharded_params)
    names = [name for name in metrics if not name.startswith("time/")]
    print(
        json.dumps({
            "parameters": max(jax.tree.leaves(parameters)),
            "metrics": max(abs(metrics[name] - sharded_metrics[name]) / (1 + abs(metrics[name])) for name in names),
            "sharded": kernel.addressable_shards[0].data.size * 2 == kernel.size,
            "compiled": max(count for run in counts for count in run.values()),
        })
    )  # fmt: skip


if __name__ == "__main__":
    main()

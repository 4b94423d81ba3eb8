"""A plan as JSON types: everything that the tables show, in bytes, FLOPs and seconds."""

import dataclasses
from typing import Any

from turnppo_jax.planning.compiling import versions
from turnppo_jax.planning.estimate import OVERLAPS
from turnppo_jax.planning.making import Plan, PlannedProgram
from turnppo_jax.planning.states import resident_bytes


def record(plan: Plan) -> dict[str, Any]:
    """The plan, for `plan.json`."""
    chip, work = plan.topology.chip, plan.workload
    return {
        "topology": plan.topology.name,
        "chips": plan.topology.num_devices,
        "hosts": plan.topology.num_hosts,
        "chip": {name: getattr(chip, name) for name in ("flops", "hbm_bytes", "hbm_bandwidth", "link_bandwidth")},
        "versions": versions(),
        "model": {"name": plan.settings.model.name, "parameters": plan.sizes.num_parameters},
        "mesh": dict(plan.named("actor update").program.mesh.shape),
        "rollout_mesh": dict(plan.named("decode").program.mesh.shape),
        "assumptions": {
            "turns": work.turns,
            "prompt_tokens": work.prompt_tokens,
            "sampled_tokens": float(work.episode_tokens.mean()),
            "environment_seconds": 0.0,
        },
        "minibatch": {"actor": dataclasses.asdict(work.actor), "critic": dataclasses.asdict(work.critic)},
        "rollout": dataclasses.asdict(plan.load),
        "further_rollouts": None if plan.further is None else dataclasses.asdict(plan.further),
        "lockstep": plan.settings.rollout.lockstep,
        "fits": plan.fits,
        "residents": [dataclasses.asdict(one) for one in plan.residents],
        "resident_bytes": {phase: resident_bytes(plan.residents, phase) for phase in ("rollout", "learn")},
        "programs": {one.program.name: _program(one) for one in plan.programs},
        "decode_bytes": dataclasses.asdict(plan.decode) | {"ratio": plan.decode.ratio},
        "step_seconds": {f"{overlap:g}": plan.phase_seconds(overlap) for overlap in OVERLAPS},
    }


def _program(planned: PlannedProgram) -> dict[str, Any]:
    compiled, one = planned.compiled, planned.estimate
    memory = ("fits", "arguments", "outputs", "aliased", "temporaries", "peak")
    work = ("flops", "recomputed", "repeated", "memory_bytes", "compute_s", "memory_s", "link_s", "needed_flops")
    return {
        "topology": planned.program.topology.name,
        "parameters": planned.program.parameters,
        "runs_a_step": planned.program.runs,
        "left_bytes": planned.left,
        "memory": {name: getattr(compiled, name) for name in memory},
        "largest_buffers": [dataclasses.asdict(buffer) for buffer in compiled.buffers],
        "compile_seconds": compiled.seconds,
        "work": {name: getattr(one, name) for name in work} | {"unneeded_flops": planned.unneeded},
        "bound": one.bound,
        "collectives": one.collectives,
        "largest_collectives": [dataclasses.asdict(collective) for collective in one.largest],
        "seconds": {f"{overlap:g}": one.seconds(overlap) for overlap in OVERLAPS},
        "mfu": {f"{overlap:g}": one.mfu(overlap) for overlap in OVERLAPS},
    }

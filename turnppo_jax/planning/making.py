"""A whole plan: every program of a config compiled for a topology under what the others leave, and what follows."""

import dataclasses
import pathlib
from collections.abc import Callable

from jax.sharding import Mesh

from turnppo_jax.command_line import UserError
from turnppo_jax.models.sizes import ModelSizes
from turnppo_jax.parallel.hosts import check_inside_hosts
from turnppo_jax.parallel.mesh import make_mesh
from turnppo_jax.planning import states as state_shapes
from turnppo_jax.planning.compiling import Compiled, compile_program
from turnppo_jax.planning.estimate import Estimate, estimate
from turnppo_jax.planning.learner_programs import learner_programs, weight_sync_program
from turnppo_jax.planning.programs import Program
from turnppo_jax.planning.rollout_load import RolloutLoad, further_load, rollout_load
from turnppo_jax.planning.rollout_programs import rollout_programs
from turnppo_jax.planning.rollout_time import DecodeBytes, decode_bytes, prefill_seconds
from turnppo_jax.planning.states import Resident
from turnppo_jax.planning.topology import Topology
from turnppo_jax.planning.workload import Workload, expected_workload, model_flops, unneeded_flops
from turnppo_jax.settings import RunSettings


@dataclasses.dataclass(frozen=True)
class PlannedProgram:
    """One program of the plan.

    Attributes:
      program: which.
      compiled: under `left`.
      estimate: of one run.
      left: bytes that the residents leave it on a chip; its own arguments are part of it.
      unneeded: of `estimate.needed_flops`, those of embedding and head that no program needs.
    """

    program: Program
    compiled: Compiled
    estimate: Estimate
    left: float
    unneeded: float = 0.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """A config on a topology.

    Attributes:
      topology: the slice.
      sizes: of the model.
      settings: of the run.
      residents: what stays in memory.
      programs: in the order of a step.
      workload: of a minibatch.
      load: of one host in the rollout; in lockstep of all hosts together.
      further: of the rollouts that the estimator asks for beside the step's own; None where it asks for none.
      decode: what a decode step reads at half-full slots.
    """

    topology: Topology
    sizes: ModelSizes
    settings: RunSettings
    residents: tuple[Resident, ...]
    programs: tuple[PlannedProgram, ...]
    workload: Workload
    load: RolloutLoad
    further: RolloutLoad | None
    decode: DecodeBytes

    @property
    def fits(self) -> bool:
        """Whether every program compiled under what the residents leave."""
        return all(planned.compiled.fits for planned in self.programs)

    def named(self, name: str) -> PlannedProgram:
        """The program of a name."""
        return next(planned for planned in self.programs if planned.program.name == name)

    def phase_seconds(self, overlap: float) -> dict[str, float]:
        """Seconds of a training step by what it does, with this share of the collectives hidden."""
        sampler, prefill, decode = self.settings.sampler, self.named("prefill"), self.named("decode")
        rows = sampler.prefill_rows * sampler.data_shards(prefill.program.mesh)

        def played(load: RolloutLoad, name: str) -> dict[str, float]:
            return {
                f"{name}prefill": prefill_seconds(load, sampler.prefill_chunk, rows, prefill.estimate, overlap),
                f"{name}decode": load.decode_steps / sampler.decode_chunk * decode.estimate.seconds(overlap),
            }

        out = played(self.load, "")
        if self.further is not None:
            out |= played(self.further, "further rollouts: ")
        for planned in self.programs:
            if planned.program.phase == "learn":
                out[planned.program.name] = planned.program.runs * planned.estimate.seconds(overlap)
        return out


def make_plan(
    settings: RunSettings,
    sizes: ModelSizes,
    topology: Topology,
    *,
    fast: bool,
    cache: pathlib.Path | None,
    say: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Compiles every program of a config for a topology.

    Args:
      settings: of the run.
      sizes: of the model.
      topology: the slice.
      fast: compile with less effort.
      cache: folder of earlier results; None keeps none.
      say: called with a line before and after each program.

    Raises:
      UserError, ValueError: the config does not go with the topology; names the field.
    """
    mesh = make_mesh(**dataclasses.asdict(settings.mesh), devices=topology.devices())
    whole_rollout = settings.rollout_mesh.make(mesh)
    # As in a run: each host samples on a slice of its own, or all together on the whole.
    if settings.rollout.lockstep:
        sampling, rollout_mesh, hosts = topology, whole_rollout, 1
    else:
        check_inside_hosts(mesh, "config.mesh")
        sampling, rollout_mesh, hosts = topology.host, _host_mesh(whole_rollout, topology), topology.num_hosts
    workload = expected_workload(
        settings.plan,
        settings.learner.shape,
        settings.learner.algorithm,
        max_turn_tokens=settings.rollout.max_turn_tokens,
        context_length=settings.sampler.context_length,
    )
    load = rollout_load(workload, settings.plan, settings.sampler, hosts)
    further = further_load(workload, settings.plan, settings.sampler, settings.learner.algorithm, hosts)
    states = state_shapes.make_states(settings, sizes, mesh, rollout_mesh)
    residents = tuple(state_shapes.residents(states))
    programs = rollout_programs(settings, sizes, sampling, rollout_mesh, states, load)
    programs += learner_programs(settings, sizes, topology, mesh, states, workload)
    programs.append(weight_sync_program(settings, sizes, topology, mesh, whole_rollout, states))
    planned = []
    for program in programs:
        left = topology.chip.hbm_bytes - state_shapes.resident_bytes(residents, program.phase, program.holds)
        say(f"compiling {program.name}")
        compiled = compile_program(
            program.function.trace(*program.arguments).lower(),
            limit=left,
            fast=fast,
            place=f"{program.topology.name} {[device.id for device in program.mesh.devices.flat]}",
            cache=cache,
        )
        needed, unneeded = _needed(program, sizes, workload)
        one = estimate(program, compiled, needed_flops=needed, live_tokens=load.mean_context)
        planned.append(PlannedProgram(program, compiled, one, left, unneeded / program.mesh.size))
    decode = next(one for one in planned if one.program.name == "decode")
    half = settings.sampler.context_length / 2
    at_half = estimate(decode.program, decode.compiled, live_tokens=half)
    read = decode_bytes(sizes, states, settings.sampler, at_half, half, chips=rollout_mesh.size)
    return Plan(topology, sizes, settings, residents, tuple(planned), workload, load, further, read)


def _host_mesh(whole: Mesh, topology: Topology) -> Mesh:
    """One host's part of the mesh that samples, on a slice of that host alone.

    Raises:
      UserError: a group of devices that shares one copy of the weights does not lie inside a host.
    """
    devices, tensor = topology.host.devices(), whole.shape["tensor"]
    if len(devices) % tensor:
        raise UserError(
            f"config.rollout_mesh.tensor={tensor} on {topology.name}; allowed: a divisor of {len(devices)}, the chips "
            "of a host, which samples alone, or rollout.lockstep=True"
        )
    return make_mesh(data=len(devices) // tensor, tensor=tensor, devices=devices)


def _needed(program: Program, sizes: ModelSizes, workload: Workload) -> tuple[float, float]:
    """(model FLOPs of one run over all chips, those of them that no program needs)."""
    passes = {"score": 1, "update": 3}.get(program.name.split()[-1])
    if passes is None:
        return 0.0, 0.0
    of_critic = program.name.startswith("critic")
    stats = workload.critic if of_critic else workload.actor
    segments = workload.critic_segments if of_critic else workload.segments
    tables = 1 if of_critic or sizes.tie_word_embeddings else 2
    needed = model_flops(sizes, program.parameters, stats.tokens, segments, passes=passes)
    return needed, unneeded_flops(sizes, tables, stats.tokens, 0 if of_critic else stats.sampled, passes=passes)

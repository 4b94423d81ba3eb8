"""A plan as tables for a person."""

from collections.abc import Sequence

from turnppo_jax.planning.compiling import versions
from turnppo_jax.planning.estimate import OVERLAPS
from turnppo_jax.planning.making import Plan, PlannedProgram
from turnppo_jax.planning.rollout_load import RolloutLoad
from turnppo_jax.planning.states import resident_bytes
from turnppo_jax.planning.topology import GIB

# What makes the memory of a program smaller, by phase.
_FIELDS = {
    "learn": "rows.micro_rows, rows.tokens, forward.remat='full', forward.head_chunk, mesh.fsdp, mesh.tensor",
    "rollout": "sampler.prefill_rows, sampler.prefill_chunk, sampler.num_slots, rollout_mesh.tensor",
}


def text(plan: Plan) -> str:
    """The plan as tables, the verdict last."""
    parts = (
        _head(plan),
        _residents(plan),
        _memory(plan),
        _work(plan),
        _collectives(plan),
        _times(plan),
        _decode(plan),
        _step(plan),
        verdict(plan),
    )
    return "\n\n".join(parts) + "\n"


def verdict(plan: Plan) -> str:
    """One line where everything fits; where not, what is largest and which fields to change."""
    if plan.fits:
        return f"FITS: every program compiles under what the others leave of {plan.topology.name}'s memory."
    return "\n".join(_shortage(plan, planned) for planned in plan.programs if not planned.compiled.fits)


def align(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as columns: the first to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _head(plan: Plan) -> str:
    chip, settings, work = plan.topology.chip, plan.settings, plan.workload
    mesh = ", ".join(f"{name}={size}" for name, size in plan.named("actor update").program.mesh.shape.items())
    host = plan.named("decode").program
    where = "all hosts in lockstep" if settings.rollout.lockstep else "each host"
    rollout = ", ".join(f"{name}={size}" for name, size in host.mesh.shape.items() if name in ("data", "tensor"))
    stats = work.actor
    used = ", ".join(f"{name} {version}" for name, version in versions().items())
    return "\n".join(
        (
            f"{settings.model.name} ({plan.sizes.num_parameters / 1e9:.2f}B parameters) on {plan.topology.name}: "
            f"{plan.topology.num_devices} chips, hosts: {plan.topology.num_hosts} ({used})",
            f"chip: {chip.hbm_bytes / GIB:.2f} GiB at {chip.hbm_bandwidth / 1e9:.0f} GB/s, {chip.flops / 1e12:.0f} "
            f"TFLOP/s in bfloat16, links of {chip.link_bandwidth / 1e9:.0f} GB/s each way",
            f"mesh: {mesh}; rollout on {where} ({host.topology.name}): {rollout}",
            f"assumed: episodes of {work.turns} turns, {work.prompt_tokens} prompt tokens and "
            f"{work.episode_tokens.mean():.0f} sampled ones in the average; environments answer at once",
            f"minibatch: {stats.tokens} tokens in {stats.rows} rows of {settings.learner.shape.tokens}, "
            f"{stats.num_micro} micro-batches of {settings.learner.shape.micro_rows} rows, "
            f"{stats.tokens / plan.topology.num_devices:.0f} tokens a chip, {100 * stats.padding_share:.0f} % padding",
        )
    )


def _residents(plan: Plan) -> str:
    rows = [("resident in memory, GiB a chip", "rollout", "learn")]
    for one in plan.residents:
        if one.phases:
            sizes = [_gib(one.bytes) if phase in one.phases else "-" for phase in ("rollout", "learn")]
        else:
            sizes = ["-", f"({_gib(one.bytes)})"]
        rows.append((one.name, *sizes))
        rows += [(f"  {name}", _gib(size), "") for name, size in one.parts]
    rows.append(("sum", *(_gib(resident_bytes(plan.residents, phase)) for phase in ("rollout", "learn"))))
    rows.append(("of", *(_gib(plan.topology.chip.hbm_bytes) for _ in range(2))))
    note = "in parentheses: float32 sums inside an update program, among its temporaries, and not in the sum here"
    return align(rows) + "\n" + note


def _memory(plan: Plan) -> str:
    rows = [("memory, GiB a chip", "left by others", "arguments", "temporaries", "peak", "fits", "compiled in")]
    for planned in plan.programs:
        compiled = planned.compiled
        sizes = [_gib(compiled.arguments), _gib(compiled.temporaries), _gib(compiled.peak)]
        took = f"{compiled.seconds:.0f} s" + " (kept)" * compiled.cached
        rows.append((planned.program.name, _gib(planned.left), *sizes, "yes" if compiled.fits else "NO", took))
    return align(rows)


def _work(plan: Plan) -> str:
    rows = [("a run, a chip", "parameters", "TFLOP", "recomputed", "repeated", "memory GB", "link GB", "runs a step")]
    for planned in plan.programs:
        one = planned.estimate
        received = sum(kind["received_bytes"] for kind in one.collectives.values())
        cells = [f"{planned.program.parameters / 1e9:.3f}B" if planned.program.parameters else "-"]
        cells += [f"{x / 1e12:.2f}" for x in (one.flops, one.recomputed, one.repeated)]
        cells += [f"{x / 1e9:.2f}" for x in (one.memory_bytes, received)]
        rows.append((planned.program.name, *cells, f"{planned.program.runs:g}" if planned.program.runs else "-"))
    return align(rows)


def _collectives(plan: Plan) -> str:
    rows = [("collectives of a run", "kind", "places", "runs", "payload GB", "received GB")]
    for planned in plan.programs:
        name = planned.program.name
        for kind, total in planned.estimate.collectives.items():
            sizes = [f"{total[key] / 1e9:.3f}" for key in ("payload_bytes", "received_bytes")]
            rows.append((name, kind, f"{total['sites']}", f"{total['runs']:.0f}", *sizes))
            name = ""
    return align(rows)


def _times(plan: Plan) -> str:
    shares = [f"{100 * overlap:.0f} %" for overlap in OVERLAPS]
    rows = [("milliseconds of a run", "compute", "memory", "links", *shares, *(f"MFU {s}" for s in shares), "needed")]
    for planned in plan.programs:
        one = planned.estimate
        cells = [f"{1e3 * x:.1f}" for x in (one.compute_s, one.memory_s, one.link_s)]
        cells += [f"{1e3 * one.seconds(overlap):.1f}" for overlap in OVERLAPS]
        mfu = ["-"] * (len(OVERLAPS) + 1)
        if one.needed_flops:
            mfu = [f"{100 * one.mfu(overlap):.1f} %" for overlap in OVERLAPS]
            # At 50 % overlap, without what embedding and head do not need.
            mfu.append(f"{100 * one.mfu(0.5) * (1 - planned.unneeded / one.needed_flops):.1f} %")
        rows.append((planned.program.name, *cells, *mfu))
    notes = (
        "time = max(compute, memory) + links not hidden, for 0, 50 and 100 % of the collectives hidden",
        "MFU = (6 · parameters · real tokens + causal attention) / (peak · time); 2 in place of 6 for scoring",
        "needed: MFU at 50 %, embedding and head counted only where they are multiplied (the head: sampled tokens)",
    )
    return align(rows) + "\n" + "\n".join(notes)


def _decode(plan: Plan) -> str:
    read, sampler = plan.decode, plan.settings.sampler
    moved, weights, live = (f"{x / 1e9:.3f} GB" for x in (read.moved, read.weights, read.live_cache))
    return (
        f"decode, a step, a chip, slots half full ({sampler.context_length // 2} tokens): moves {moved} = "
        f"{read.ratio:.2f} x (weights {weights} + live cache {live})"
    )


def _step(plan: Plan) -> str:
    shares = [f"{100 * overlap:.0f} %" for overlap in OVERLAPS]
    columns = [plan.phase_seconds(overlap) for overlap in OVERLAPS]
    rows = [("seconds of a training step, collectives hidden", *shares)]
    rows += [(name, *(f"{column[name]:.2f}" for column in columns)) for name in columns[0]]
    rows.append(("sum", *(f"{sum(column.values()):.2f}" for column in columns)))
    who = "all hosts together play" if plan.settings.rollout.lockstep else "a host plays"
    notes = [f"{who} {_played(plan.load, plan.settings.sampler.num_slots)}"]
    if plan.further is not None:
        estimator = plan.settings.learner.algorithm.estimator
        notes.append(f"estimator={estimator!r}: {who} further {_played(plan.further, plan.settings.sampler.num_slots)}")
    return "\n".join((align(rows), *notes))


def _played(load: RolloutLoad, slots: int) -> str:
    prefills = ", ".join(f"{count:g} prefills of {bucket}" for bucket, count in load.prefills)
    return (
        f"{load.episodes} episodes in {slots} slots: {load.decode_steps} decode steps at {load.mean_context:.0f} "
        f"tokens of context; {prefills} an episode"
    )


def _shortage(plan: Plan, planned: PlannedProgram) -> str:
    program, compiled = planned.program, planned.compiled
    there = [one for one in plan.residents if program.phase in one.phases]
    lines = [
        f"DOES NOT FIT: {program.name} needs {_gib(compiled.peak)} GiB a chip, its arguments included; the others "
        f"leave {_gib(planned.left)} of {_gib(plan.topology.chip.hbm_bytes)} GiB."
    ]
    lines += [f"  buffer of {_gib(buffer.bytes)} GiB: {buffer.shape[:100]}" for buffer in compiled.buffers[:3]]
    lines.append(f"  change config fields: {_FIELDS[program.phase]}")
    for one in sorted(there, key=lambda one: -one.bytes)[:3]:
        lines.append(f"  resident {one.name}, {_gib(one.bytes)} GiB: {one.fields}")
    return "\n".join(lines)


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"

"""The plan command, and the compiler's answers for a TPU slice where libtpu is installed."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from turnppo_jax.parallel.mesh import make_mesh
from turnppo_jax.planning import hlo, topology
from turnppo_jax.planning.collectives import by_kind, collectives
from turnppo_jax.planning.compiling import Buffer, Compiled, compile_program, largest_buffers, needed_bytes
from turnppo_jax.planning.flops import partitioned_flops, traced_flops
from turnppo_jax.planning.making import Plan, PlannedProgram
from turnppo_jax.planning.programs import Program
from turnppo_jax.planning.report import verdict
from turnppo_jax.planning.states import Resident
from turnppo_jax.planning.topology import GIB
from turnppo_jax.planning.traffic import memory_bytes

ROOT = pathlib.Path(__file__).resolve().parents[1]
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="the TPU compiler (package libtpu) is not installed: nothing is compiled for a TPU slice",
)


def run_plan(*arguments):
    command = [sys.executable, "-m", "turnppo_jax.plan", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_mistakes_end_in_one_line():
    config = "--config=tests/tiny_config.py"
    for arguments, message in (
        ((config,), "--topology=TYPE:XxY is missing"),
        ((config, "--topology=v5e-16"), "topology='v5e-16'; allowed: TYPE:XxY"),
    ):
        done = run_plan(*arguments)
        if importlib.util.find_spec("libtpu") is None and "missing" not in message:
            message = "package libtpu, which is not installed"
        assert done.returncode == 2 and done.stderr.startswith("error: ") and message in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1 and not done.stdout


def test_reading_the_compiler_s_refusals():
    told = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (19.02G) exceeds "
        "available HBM (15.75G)."
    )
    assert needed_bytes(told) == 19.02 * 2**30
    assert needed_bytes("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 177.82M of 128.00M") is None
    assert needed_bytes("INTERNAL: hbm") is None
    report = (
        "Memory Space: default (color=0)\nTotal bytes: 6\n  cumulative_size; size; offset; used_by_n_values; shapes\n"
        "    1.50MiB(100%);    1.50MiB;            0;                7; f32[6,32,2048], pred[]\n"
        "    2.00KiB(100%);    512B;               0;                7; s32[]\n"
        "    9.00GiB(100%);    9.00GiB;            0;                1; bf16[9]\n"
        "Memory Space: other (color=1)\n    99.0GiB(100%);    99.0GiB;            0;                1; bf16[1]\n"
    )
    assert [(one.bytes, one.shape) for one in largest_buffers(report)] == [
        (9 * 2**30, "bf16[9]"),
        (1.5 * 2**20, "f32[6,32,2048], pred[]"),
        (512, "s32[]"),
    ]


def planned(name, phase, peak, left, buffers=()):
    """A program as the compiler answers for it: it fits if its peak, GiB, is within what is left."""
    sizes = {"arguments": 0.0, "outputs": 0.0, "aliased": 0.0, "temporaries": 0.0, "peak": peak * GIB}
    compiled = Compiled(peak <= left, left * GIB, **sizes, seconds=1.0, buffers=buffers, text="", partitioned="")
    program = Program(name, phase, topology.parse("v5e:2x2"), None, None, (), (), 1.0)
    return PlannedProgram(program, compiled, None, left * GIB)


def plan_of(*programs):
    always = "rollout", "learn"
    residents = (
        Resident("critic", 3 * GIB, always, (), "critic_optimizer.moment_dtype"),
        Resident("actor", 4 * GIB, always, (), "actor_optimizer.moment_dtype"),
        Resident("gradients of one model", 2 * GIB, ()),
        Resident("cache", 9 * GIB, ("rollout",), (), "sampler.num_slots"),
    )
    return Plan(topology.parse("v5e:2x2"), None, None, residents, programs, None, None, None, None)


def test_a_verdict_names_what_is_largest_and_the_fields_to_change():
    fitting = planned("decode", "rollout", 8.0, 8.0)
    update = planned("actor update", "learn", 9.5, 8.75, (Buffer(6.0 * GIB, "f32[4,2048,151936]"),))
    assert verdict(plan_of(fitting)) == "FITS: every program compiles under what the others leave of v5e:2x2's memory."
    assert verdict(plan_of(fitting, update)).splitlines() == [
        "DOES NOT FIT: actor update needs 9.50 GiB a chip, its arguments included; the others leave 8.75 of 15.75 GiB.",
        "  buffer of 6.00 GiB: f32[4,2048,151936]",
        "  change config fields: rows.micro_rows, rows.tokens, forward.remat='full', forward.head_chunk, mesh.fsdp, "
        "mesh.tensor",
        "  resident actor, 4.00 GiB: actor_optimizer.moment_dtype",
        "  resident critic, 3.00 GiB: critic_optimizer.moment_dtype",
    ]
    # In the rollout the cache is there, and largest.
    lines = verdict(plan_of(planned("prefill", "rollout", 1.0, 0.5))).splitlines()
    assert lines[2] == "  resident cache, 9.00 GiB: sampler.num_slots"


@pytest.mark.parametrize("fits", [True, False])
def test_the_command_ends_with_1_where_something_does_not_fit(fits):
    code = (
        "import types\n"
        "from turnppo_jax import command_line, plan\n"
        "plan.environment.prepare = lambda: None  # it would ask for the compiler\n"
        f"plan.make_plan = lambda *_, **__: types.SimpleNamespace(fits={fits})\n"
        "plan.record.record, plan.report.text = (lambda _: {}), (lambda made: f'fits: {made.fits}')\n"
        "command_line.run(plan.main)\n"
    )
    flags = ["--config=tests/tiny_config.py", "--topology=v5e:2x2,v6e:2x2"]
    done = subprocess.run([sys.executable, "-c", code, *flags], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count(f"fits: {fits}")) == (0 if fits else 1, 2), done.stderr


@needs_compiler
def test_a_small_program_compiles_for_a_slice(tmp_path):
    """Scanned layers, weights split over four chips, a number of passes that the program does not hold."""
    slice_ = topology.parse("v5e:2x2")
    mesh = make_mesh(fsdp=4, devices=slice_.devices())
    layers, rows, width = 6, 4096, 2048

    def place(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    def f(stack, x, number):
        def layer(x, w):
            return jax.nn.relu(jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("fsdp")))), None

        return jax.lax.fori_loop(0, number, lambda _, x: jax.lax.scan(layer, x, stack)[0], x)

    stack, x = place((layers, width, width), jnp.bfloat16, None, "fsdp"), place((rows, width), jnp.bfloat16, "fsdp")
    traced = jax.jit(f).trace(stack, x, jnp.int32(0))
    options = {"fast": True, "place": slice_.name, "cache": tmp_path}
    compiled = compile_program(traced.lower(), limit=slice_.chip.hbm_bytes, **options)
    assert compiled.fits and not compiled.cached
    stack_bytes, x_bytes = layers * width * width * 2 // 4, rows * width * 2 // 4
    assert stack_bytes + x_bytes <= compiled.arguments < stack_bytes + x_bytes + 2**16
    flops = 3 * layers * 2 * rows * width * width
    assert traced_flops(traced.jaxpr, [3]).total == flops
    assert partitioned_flops(hlo.parse(compiled.partitioned), [3]) == flops / 4
    found = by_kind(collectives(hlo.parse(compiled.text), [3]))
    received = sum(kind["received_bytes"] for kind in found.values())
    # Every pass gathers every layer's weights, of which a chip has a quarter.
    assert received == pytest.approx(3 * layers * width * width * 2 * 3 / 4, rel=0.01), found
    # Weights come and go once a pass at least; nothing like the whole stack for every layer.
    gathered = 3 * layers * width * width * 2
    assert gathered < memory_bytes(hlo.parse(compiled.text), [3]) < 5 * gathered

    again = compile_program(jax.jit(f).lower(stack, x, jnp.int32(0)), limit=slice_.chip.hbm_bytes, **options)
    assert again.cached and again.text == compiled.text and again.peak == compiled.peak

    refused = compile_program(traced.lower(), limit=8 * 2**20, **options)
    assert not refused.fits and refused.peak > 8 * 2**20 and refused.buffers
    assert partitioned_flops(hlo.parse(refused.partitioned), [3]) == flops / 4


@needs_compiler
def test_a_config_that_does_not_fit_says_what_to_change(tmp_path):
    config = tmp_path / "huge_cache.py"
    config.write_text(
        "from tests.tiny_config import get_config as tiny\n"
        "def get_config(argument=''):\n"
        "    config = tiny('algo=grpo')\n"
        "    config.model.name = 'tiny-qwen2'\n"
        "    config.algorithm.kl_coef = 0.0\n"
        "    config.plan = {'first_prompt_tokens': 16, 'next_prompt_tokens': 8}\n"
        "    config.sampler.num_slots = 2**19\n"
        "    config.sampler.context_length = 128\n"
        "    return config\n"
    )
    done = run_plan(f"--config={config}", "--topology=v5e:1x1", "--effort=fast", f"--output={tmp_path}", "--cache=none")
    assert done.returncode == 1, done.stderr
    assert "DOES NOT FIT: prefill needs" in done.stdout
    assert "resident cache" in done.stdout and "sampler.num_slots" in done.stdout
    assert done.stdout.endswith((tmp_path / "plan.txt").read_text() + "\n")
    (record,) = json.loads((tmp_path / "plan.json").read_text())
    # The learner's programs fit: the sampler lets go of its cache before they run.
    assert {name: one["memory"]["fits"] for name, one in record["programs"].items()} == {
        "prefill": False, "decode": False, "actor score": True, "advantages": True, "actor update": True,
        "weight sync": True,
    }  # fmt: skip
    assert not record["fits"]
    cache = next(one for one in record["residents"] if one["name"] == "cache")
    assert cache["bytes"] > record["chip"]["hbm_bytes"]


@needs_compiler
def test_a_model_over_several_hosts_is_planned_in_lockstep_and_refused_without(tmp_path):
    """As a run would: outside lockstep each host samples alone. VinePPO's branches are a part of the step."""
    config = tmp_path / "over_hosts.py"
    config.write_text(
        "from tests.tiny_config import get_config as tiny\n"
        "def get_config(argument=''):\n"
        "    config = tiny('algo=vine_ppo')\n"
        "    config.model.name = 'tiny-qwen2'\n"
        "    config.mesh.fsdp, config.mesh.tensor = 2, 8\n"
        "    config.rollout.lockstep = True\n"
        "    config.plan = {'first_prompt_tokens': 16, 'next_prompt_tokens': 8}\n"
        "    config.sampler.num_slots = 8\n"
        "    return config\n"
    )
    flags = [f"--config={config}", "--topology=v5e:4x4", "--effort=fast", f"--output={tmp_path}", "--cache=none"]
    alone = run_plan(*flags, "--config.rollout.lockstep=False")
    assert alone.returncode == 2 and alone.stderr.count("\n") == 1
    assert "config.mesh.tensor=8 reaches across hosts, which have 4 devices each; allowed: an axis" in alone.stderr
    done = run_plan(*flags)
    assert done.returncode == 0, done.stderr
    assert "rollout on all hosts in lockstep (v5e:4x4): data=2, tensor=8" in done.stdout
    (record,) = json.loads((tmp_path / "plan.json").read_text())
    # Eight episodes for all hosts together, and four branches from before each of three turns of each.
    assert (record["rollout"]["episodes"], record["further_rollouts"]["episodes"]) == (8, 8 * 3 * 4)
    assert record["programs"]["decode"]["topology"] == "v5e:4x4"
    step = record["step_seconds"]["0.5"]
    assert step["further rollouts: decode"] > step["decode"] > 0

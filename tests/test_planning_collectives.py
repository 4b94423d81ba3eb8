"""Collectives: groups in every form, asynchronous ones once, bytes and seconds by hand; real programs on 8 devices."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.tiny_config import get_config
from turnppo_jax.command_line import finalise
from turnppo_jax.models.decoder import bind, decoder_shapes
from turnppo_jax.models.sizes import SIZES
from turnppo_jax.parallel.mesh import make_mesh
from turnppo_jax.planning import hlo, topology
from turnppo_jax.planning.collectives import Collective, by_kind, collectives, groups, seconds
from turnppo_jax.planning.flops import traced_flops
from turnppo_jax.planning.states import make_states, residents
from turnppo_jax.settings import run_settings


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("replica_groups={{0,2},{1,3}}, dimensions={0}", [(0, 2), (1, 3)]),
        ("replica_groups=[2,2]<=[4], channel_id=1", [(0, 1), (2, 3)]),
        ("replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}", [(0, 2), (1, 3)]),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1), x={}", [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}, x={}", [(0, 2), (1, 3)]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}, x={}", [(0, 1), (2, 3)]),
        ("replica_groups=mesh['a'=2,'b'=1,'c'=2] {'a','c'}, x={}", [(0, 1, 2, 3)]),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}, x={}", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", [(0, 4), (1, 5), (2, 6), (3, 7)]),
    ],
)
def test_groups(text, expected):
    assert groups(f"channel_id=6, {text}") == expected


def test_groups_in_another_form_are_refused():
    with pytest.raises(ValueError, match=r"replica_groups=.*; allowed"):
        groups("replica_groups=everyone")


ASYNC = """HloModule jit_f, num_partitions=4

%begin (p.0: bf16[8,128]) -> (bf16[8,128], bf16[32,128]) {
  %p.0 = bf16[8,128]{1,0} parameter(0)
  %all-gather.1 = bf16[32,128]{1,0} all-gather(%p.0), channel_id=6, replica_groups=[1,4]<=[4], dimensions={0}
  ROOT %start = (bf16[8,128], bf16[32,128]) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%finish (p.1: bf16[8,128]) -> bf16[32,128] {
  %p.1 = bf16[8,128]{1,0} parameter(0)
  %all-gather.2 = bf16[32,128]{1,0} all-gather(%p.1), channel_id=6, replica_groups=[1,4]<=[4], dimensions={0}
  ROOT %done = bf16[32,128]{1,0} custom-call(%all-gather.2), custom_call_target="AsyncCollectiveDone"
}

%async_collective_fusion.3 (p.2: bf16[8,128]) -> bf16[32,128] {
  %p.2 = bf16[8,128]{1,0} parameter(0)
  ROOT %all-gather.3 = bf16[32,128]{1,0} all-gather(%p.2), channel_id=6, replica_groups=[1,4]<=[4], dimensions={0}
}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (x: bf16[8,128], y: f32[100]) -> bf16[32,128] {
  %x = bf16[8,128]{1,0} parameter(0)
  %y = f32[100]{0} parameter(1)
  %half = (bf16[8,128]{1,0}, bf16[32,128]{1,0}) fusion(%x), kind=kCustom, calls=%begin
  %ar = f32[100]{0} all-reduce(%y), channel_id=6, replica_groups={{0,1},{2,3}}, metadata={op_name="a/sum"}
  %rs = f32[25]{0} reduce-scatter(%ar), channel_id=6, replica_groups=[1,4]<=[4], to_apply=%sum
  %cps = (f32[25]{0}, f32[25]{0}) collective-permute-start(%rs), channel_id=6, source_target_pairs={{0,1},{1,0}}
  %cpd = f32[25]{0} collective-permute-done(%cps)
  %meanwhile = bf16[32,128]{1,0} fusion(%x), kind=kCustom, calls=%async_collective_fusion.3
  ROOT %whole = bf16[32,128]{1,0} fusion(%x), kind=kCustom, calls=%finish
}
"""


def test_an_asynchronous_collective_counts_once_and_bytes_are_right():
    found = {one.kind: one for one in collectives(hlo.parse(ASYNC))}
    assert len(collectives(hlo.parse(ASYNC))) == 4
    gathered = 32 * 128 * 2
    assert found["all-gather"] == Collective("all-gather", 1, gathered, gathered * 3 / 4, (0, 1, 2, 3), "")
    # All-reduce: scattered, then gathered again, half of it each way between two.
    assert found["all-reduce"] == Collective("all-reduce", 1, 400, 400, (0, 1), "a/sum")
    assert found["reduce-scatter"] == Collective("reduce-scatter", 1, 400, 300, (0, 1, 2, 3), "")
    assert found["collective-permute"] == Collective("collective-permute", 1, 100, 100, (0, 1), "")
    assert by_kind(list(found.values()))["all-gather"]["received_bytes"] == gathered * 3 / 4


def grid(topology):
    x, y = topology.shape
    return [(i, j, 0) for j in range(y) for i in range(x)]


@pytest.mark.parametrize(
    ("name", "group", "links"),
    [
        ("v5e:4x4", range(16), 2),  # a corner has one neighbour along each axis
        ("v5e:4x4", range(4), 1),
        ("v5e:4x4", (0, 2), 2 / 3),  # chips 1 and 3 use the links between them too
        ("v6e:16x16", range(256), 4),  # the rings close
        ("v6e:16x16", range(8), 1),  # half a ring does not
    ],
)
def test_seconds_over_links(name, group, links):
    slice_ = topology.parse(name)
    one = Collective("all-gather", 3.0, 2e9, 1e9, tuple(group), "")
    bandwidth = {"v5e": 45e9, "v6e": 90e9}[slice_.kind]
    assert seconds(one, slice_, grid(slice_)) == pytest.approx(3 * 1e9 / (links * bandwidth))


def test_seconds_of_permutes_and_exchanges():
    slice_ = topology.parse("v5e:4x4")
    far = Collective("collective-permute", 1.0, 45e9, 45e9, (0, 5), "")  # one step along each axis
    assert seconds(far, slice_, grid(slice_)) == pytest.approx(2.0)
    # Each of 4 chips sends half of its 4 x 45 GB / 4 to the other half: over the middle link go 2 x 22.5 GB.
    swap = Collective("all-to-all", 1.0, 45e9, 45e9, (0, 1, 2, 3), "")
    assert seconds(swap, slice_, grid(slice_)) == pytest.approx(1.0)
    alone = Collective("all-gather", 1.0, 0.0, 0.0, (0,), "")
    assert seconds(alone, slice_, grid(slice_)) == 0.0


def run_on_eight_devices():
    """Body of the test below, in a process that sees 8 devices; the names of its checks are printed."""
    mesh = make_mesh(data=2, fsdp=4)
    layers, width, rows = 3, 64, 16

    def place(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    def f(x, stack, number):
        def layer(x, w):
            return jnp.sin(x @ w), None

        def pass_(index, x):
            return jax.lax.scan(layer, x, stack)[0]

        return jnp.sum(jax.lax.fori_loop(0, number, pass_, x))

    arguments = place((rows, width), ("data", "fsdp")), place((layers, width, width), None, "fsdp"), jnp.int32(1)
    text = jax.jit(f).lower(*arguments).compile().as_text()
    found = by_kind(collectives(hlo.parse(text), [5]))
    # Each layer's weights come from the 4 shards of fsdp in each of 5 passes; the sum at the end is over all 8.
    gathered = layers * 5 * width * width * 4
    assert found["all-gather"]["payload_bytes"] == gathered, found
    assert found["all-gather"]["received_bytes"] == gathered * 3 / 4
    assert found["all-reduce"] == {"sites": 1, "runs": 1, "payload_bytes": 4, "received_bytes": 2 * 4 * 7 / 8}
    print("collectives of a compiled program")

    config = get_config("algo=turn_ppo")
    config.sampler.num_slots = 8
    config.actor_optimizer.moment_dtype = "bfloat16"
    settings = run_settings(finalise(config))
    sizes = SIZES["tiny-qwen2"]
    states = make_states(settings, sizes, mesh, make_mesh(data=4, tensor=2))
    table = {one.name: one for one in residents(states)}
    # By hand: embeddings are split over fsdp, so are all kernels; norms and the 1-D leaves are whole everywhere.
    d, f_, h, n, kv, layers, v = 64, 128, 16, 4, 2, 2, 512
    split = v * d + layers * (2 * d * n * h + 2 * d * kv * h + 3 * d * f_)
    whole = layers * ((n + 2 * kv) * h + 2 * d) + d
    parameters = split / 4 + whole
    parts = dict(table["actor"].parts)
    assert parts["float32 parameters"] == 4 * parameters
    assert parts["optimizer moments"] == (4 + 2) * parameters + 4 * 4, parts  # and four counters
    assert table["critic"].bytes == 12 * (parameters + d + 1) + 4 * 4
    over_tensor = v * d + layers * (2 * d * n * h + 2 * d * kv * h + 3 * d * f_ + (n + 2 * kv) * h)
    assert table["rollout weights"].bytes == 4 * (over_tensor / 2 + layers * 2 * d + d)
    slots, length = 8, 64
    assert table["cache"].bytes == 2 * 4 * layers * (slots / 4) * length * (kv / 2) * h + 4 * slots / 4
    print("residents")

    # What a policy keeps is not computed again, inside shard_map either.
    tokens = jnp.zeros((8, 32), jnp.int32)
    products = 2 * tokens.size * (2 * d * n * h + 2 * d * kv * h + 3 * d * f_)
    down, scores = 2 * tokens.size * d * f_, 2 * 2 * 8 * 32 * 32 * n * h
    for where in (None, mesh):
        counts = {}
        for remat in ("none", "dots", "full"):

            def loss(params, where=where, remat=remat):
                model = bind(params, sizes, where)
                return jnp.sum(model.hidden_states(tokens, tokens, tokens + 1, remat=remat, attention="einsum"))

            counts[remat] = traced_flops(jax.make_jaxpr(jax.grad(loss))(decoder_shapes(sizes))).total
        assert counts["none"] == 3 * layers * (products + scores)
        assert counts["dots"] - counts["none"] == layers * scores
        assert counts["full"] - counts["dots"] == layers * (products - down)
    print("recomputation")


def test_on_eight_devices():
    # The number of devices is fixed at the first use of jax, hence a process of its own.
    code = "from tests.test_planning_collectives import run_on_eight_devices; run_on_eight_devices()"
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["collectives of a compiled program", "residents", "recomputation"]

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from tests.model_fixtures import FAMILIES, random_params, random_tokens, small_sizes, whole_row
from turnppo_jax.models.cache import init_cache
from turnppo_jax.models.critic import init_critic
from turnppo_jax.models.decoder import bind, decoder_shapes
from turnppo_jax.models.logical_axes import LOGICAL_AXES, axes_of, logical_axes, path_name
from turnppo_jax.models.sizes import SIZES
from turnppo_jax.parallel.mesh import MESH_AXES, make_mesh
from turnppo_jax.parallel.sharding import RULES, shard, shardings

EIGHT = "--xla_force_host_platform_device_count=8"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_an_entry_and_every_axis_a_rule(family):
    sizes = small_sizes(family, tie_word_embeddings=family == "qwen2")
    trees = (
        decoder_shapes(sizes),
        jax.eval_shape(lambda: init_critic(sizes, jax.random.key(0))),
        {"cache": jax.eval_shape(lambda: init_cache(sizes, 4, 16))},
    )
    for tree in trees:
        leaves = jax.tree.leaves(tree)
        names = jax.tree.leaves(logical_axes(tree), is_leaf=lambda x: isinstance(x, tuple))
        assert [len(n) for n in names] == [leaf.ndim for leaf in leaves]
        assert {axis for axes in names for axis in axes} <= set(RULES)


def test_paths_match_wherever_the_tree_stands():
    assert axes_of("layers/attention/q/kernel", 4) == ("layers", "embed", "heads", "head_dim")
    assert axes_of("opt_state/1/0/mu/backbone/layers/attention/q/kernel", 4) == ("layers", "embed", "heads", "head_dim")
    assert axes_of("opt_state/1/0/count", 0) == ()
    with pytest.raises(ValueError, match="layers/attention/w/kernel has no entry in LOGICAL_AXES"):
        axes_of("layers/attention/w/kernel", 3)
    with pytest.raises(ValueError, match="has 3 axes, its entry in LOGICAL_AXES 4"):
        axes_of("layers/attention/q/kernel", 3)
    assert len({pattern for pattern, _ in LOGICAL_AXES}) == len(LOGICAL_AXES)


def test_optimizer_state_shards_like_its_parameters():
    sizes = small_sizes("qwen2")
    mesh = make_mesh()
    params = decoder_shapes(sizes)
    state = jax.eval_shape(optax.adamw(1e-3).init, params)
    placed = shardings(mesh, state)
    assert placed[0].mu == shardings(mesh, params) == placed[0].nu
    assert placed[0].count.spec == PartitionSpec()


def test_one_device_mesh():
    mesh = make_mesh()
    assert mesh.axis_names == MESH_AXES == ("data", "fsdp", "tensor", "sequence")
    assert set(mesh.axis_types) == {AxisType.Auto} and mesh.size == 1
    sizes = small_sizes()
    params = random_params(sizes)
    placed = shard(mesh, params)
    jax.tree.map(np.testing.assert_array_equal, placed, params)
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(placed)} == {PartitionSpec()}
    tokens = random_tokens(sizes, 1, 5)

    def run(params):
        return bind(params, sizes).hidden_states(tokens, *whole_row(5))

    np.testing.assert_array_equal(jax.jit(run)(placed), jax.jit(run)(params))


def test_mesh_errors_name_axis_and_numbers():
    with pytest.raises(ValueError, match="mesh axis tensor=0; allowed: at least 1"):
        make_mesh(tensor=0)
    with pytest.raises(ValueError, match=r"data=2 .* fsdp=999.* needs 1998 devices, there are"):
        make_mesh(data=2, fsdp=999)
    with pytest.raises(ValueError, match="needs 1 devices, there are 2"):
        make_mesh(devices=jax.devices()[:1] * 2)


def run_on_eight_devices():
    """Body of the test below, in a process that sees 8 devices; the names of its checks are printed."""
    assert len(jax.devices()) == 8
    for family in ("qwen2", "llama"):
        sizes = small_sizes(family, hidden_size=32, intermediate_size=48)
        params = random_params(sizes)
        tokens, (positions, segment_ids) = random_tokens(sizes, 4, 6), whole_row(6)
        row = [jnp.asarray(x) for x in (tokens, jnp.tile(positions, (4, 1)), jnp.tile(segment_ids, (4, 1)))]

        def loss(params, tokens, positions, segment_ids, sizes=sizes):
            model = bind(params, sizes)
            return jnp.sum(jnp.sin(model.logits(model.hidden_states(tokens, positions, segment_ids))[..., :40]))

        step = jax.jit(jax.value_and_grad(loss))
        expected = step(params, *row)
        mesh = make_mesh(data=2, fsdp=2, tensor=2)
        placed = shard(mesh, params)
        q = placed["layers"]["attention"]["q"]["kernel"]
        assert q.sharding.spec == PartitionSpec(None, "fsdp", "tensor")
        assert q.addressable_shards[0].data.shape == (2, 16, 2, 8)
        rows = jax.sharding.NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
        sharded = step(placed, *(jax.device_put(x, rows) for x in row))
        # Sums over shards in another order, gradients up to 20: 1e-4 is 50 units in their last place.
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), sharded, expected)
        print("sharded = unsharded", family)
    # 0.5B has 14 query and 2 key/value heads: tensor=4 divides neither.
    odd = shardings(make_mesh(tensor=4), decoder_shapes(SIZES["qwen2.5-0.5b"]))
    attention = odd["layers"]["attention"]
    assert (
        attention["q"]["kernel"].spec == attention["o"]["kernel"].spec == attention["k"]["bias"].spec == PartitionSpec()
    )
    assert odd["layers"]["mlp"]["up"]["kernel"].spec == PartitionSpec(None, None, "tensor")
    # 1.5B has 12 query and 2 key/value heads: the queries are split, the keys replicated.
    attention = shardings(make_mesh(tensor=4), decoder_shapes(SIZES["qwen2.5-1.5b"]))["layers"]["attention"]
    assert attention["q"]["kernel"].spec == PartitionSpec(None, None, "tensor")
    assert attention["k"]["kernel"].spec == PartitionSpec()
    cache = jax.eval_shape(lambda: init_cache(SIZES["qwen2.5-1.5b"], 8, 256))
    placed = shardings(make_mesh(data=2, fsdp=2, tensor=2), {"cache": cache})["cache"]
    assert placed.k.spec == PartitionSpec(None, None, ("data", "fsdp"), "tensor")
    assert placed.lengths.spec == PartitionSpec(("data", "fsdp"))
    again = shardings(make_mesh(data=1, fsdp=4), decoder_shapes(SIZES["qwen2.5-0.5b"]))
    assert again["embed"]["embedding"].spec == PartitionSpec(None, "fsdp")
    print("tables")


def test_sharded_equals_unsharded_on_eight_devices():
    # The number of devices is fixed at the first use of jax, hence a process of its own.
    code = "from tests.test_parallel import run_on_eight_devices; run_on_eight_devices()"
    environment = os.environ | {"XLA_FLAGS": EIGHT, "JAX_PLATFORMS": "cpu"}
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert [line for line in lines if not line.startswith("sharding:")] == [
        "sharded = unsharded qwen2",
        "sharded = unsharded llama",
        "tables",
    ]
    # Each fallback is told once, with the reason.
    told = [line for line in lines if line.startswith("sharding:")]
    assert len(told) == len(set(told))
    odd = "attention is not split over it and runs on the data axes alone"
    assert f"sharding: tensor=4 does not divide heads=14: {odd}" in told
    assert "sharding: tensor=4 does not divide kv_heads=2: key/value heads are replicated over it" in told


def test_path_names():
    tree = {"a": [1, {"b": 2}]}
    assert [path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(tree)] == ["a/0", "a/1/b"]

import types

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
from turnppo_jax.parallel.mesh import (
    MESH_AXES,
    MeshSettings,
    RolloutMeshSettings,
    host_major,
    make_mesh,
    rollout_mesh,
)
from turnppo_jax.parallel.sharding import (
    RULES,
    kv_head_copies,
    mesh_axes,
    partition_spec,
    shard,
    shardings,
)
from turnppo_jax.parallel.weight_sync import make_weight_sync


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
    with pytest.raises(ValueError, match=r"mesh axis sequence=2; allowed: 1 \(a row is not split\)"):
        make_mesh(sequence=2)
    with pytest.raises(ValueError, match=r"mesh.fsdp=0; allowed: at least 1"):
        MeshSettings(fsdp=0)


def test_rollout_mesh_is_a_reshape_of_the_same_devices():
    training = make_mesh(devices=jax.devices()[:1])
    assert dict(rollout_mesh(training).shape) == dict(training.shape)
    with pytest.raises(ValueError, match=r"rollout_mesh.data=2 \* rollout_mesh.tensor=1; allowed: a product of 1"):
        rollout_mesh(training, data=2, tensor=1)
    with pytest.raises(ValueError, match=r"rollout_mesh\.tensor=-1; allowed: at least 1, or 0 to choose"):
        RolloutMeshSettings(tensor=-1)


def test_weights_on_one_device_are_given_or_cast():
    sizes, mesh = small_sizes("qwen2"), make_mesh(devices=jax.devices()[:1])
    params = shard(mesh, random_params(sizes))
    assert make_weight_sync(sizes, mesh, rollout_mesh(mesh), "float32")(params) is params
    cast = make_weight_sync(sizes, mesh, rollout_mesh(mesh), "bfloat16")(params)
    # Norm scales stay float32, and what comes out does not die with the state that trains.
    assert cast["final_norm"]["scale"].dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(cast["layers"]["mlp"])} == {jnp.dtype(jnp.bfloat16)}
    want = params["embed"]["embedding"].astype(jnp.bfloat16)
    jax.tree.map(lambda leaf: leaf.delete(), params)
    np.testing.assert_array_equal(cast["embed"]["embedding"], want)
    assert np.isfinite(cast["final_norm"]["scale"]).all()


def test_devices_stand_host_after_host():
    def device(slice_index, process_index, id):
        return types.SimpleNamespace(slice_index=slice_index, process_index=process_index, id=id)

    # As on a torus of two hosts with two by two chips each: ids go through the rows of the torus.
    given = [device(0, (i // 2) % 2, i) for i in range(8)] + [device(1, 2, 8)]
    order = [d.id for d in host_major(reversed(given))]
    assert order == [0, 1, 4, 5, 2, 3, 6, 7, 8]
    assert [d.id for d in host_major(jax.devices())] == [d.id for d in jax.devices()]  # no slices on a CPU


def test_an_axis_is_split_by_what_divides_it(capsys):
    mesh = jax.sharding.AbstractMesh((2, 4, 2, 1), MESH_AXES)
    assert mesh_axes(mesh, "rows", 16) == ("data", "fsdp")
    assert mesh_axes(mesh, "rows", 6) == ("data",)
    assert mesh_axes(mesh, "rows", 3) == ()
    assert partition_spec(mesh, ("rows", None, "heads"), (8, 5, 6)) == PartitionSpec(("data", "fsdp"), None, "tensor")
    told = capsys.readouterr().out.splitlines()
    assert "sharding: data*fsdp=8 does not divide rows=6: that axis is split over data alone" in told
    assert "sharding: data*fsdp=8 does not divide rows=3: that axis is replicated over it" in told
    with pytest.raises(ValueError, match="logical axis 'columm' has no rule; known: vocab"):
        mesh_axes(mesh, "columm", 4)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tensor", "copies"),
    [(16, 2, 1, 1), (16, 2, 2, 1), (16, 2, 4, 2), (16, 2, 8, 4), (28, 4, 8, 1), (12, 4, 6, 3), (8, 8, 4, 1)],
)
def test_copies_of_key_value_heads(heads, kv_heads, tensor, copies):
    """Every part of the query heads finds its key/value heads beside it, in order; 28 heads are not split by 8."""
    mesh = jax.sharding.AbstractMesh((1, 1, tensor, 1), MESH_AXES)
    assert kv_head_copies(mesh, heads, kv_heads) == copies
    parts = tensor if heads % tensor == 0 else 1
    stored = np.repeat(np.arange(kv_heads), copies).reshape(parts, -1)
    asked = (np.arange(heads) // (heads // kv_heads)).reshape(parts, -1)
    for part in range(parts):
        group = asked.shape[1] // stored.shape[1]
        np.testing.assert_array_equal(np.repeat(stored[part], group), asked[part])
    assert kv_head_copies(None, heads, kv_heads) == 1


def test_path_names():
    tree = {"a": [1, {"b": 2}]}
    assert [path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(tree)] == ["a/0", "a/1/b"]

"""Run as a program with eight CPU devices: weights onto meshes and back; prints the name of each check that held.

python -m tests.weights_on_mesh DIRECTORY
"""

import itertools
import pathlib
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from tests.checkpoint_fixtures import expected_parameters, source_tensors, write_sharded
from tests.model_fixtures import FAMILIES, small_sizes
from turnppo_jax import export
from turnppo_jax import policy as policy_module
from turnppo_jax.models.checkpoint_files import load_weights
from turnppo_jax.models.critic import init_critic
from turnppo_jax.models.parameters import _normal, decoder_shapes, init_decoder
from turnppo_jax.models.tensor_files import TensorFiles
from turnppo_jax.models.tensor_layout import paths_of
from turnppo_jax.models.weight_saving import save_weights
from turnppo_jax.parallel.mesh import make_mesh
from turnppo_jax.parallel.sharding import shardings
from turnppo_jax.policy import load_policy
from turnppo_jax.training.checkpoint import Checkpoints
from turnppo_jax.training.optimizer import OptimizerConfig, fresh_state, make_optimizer

MESHES = [(data, fsdp, tensor) for data, fsdp, tensor in itertools.product((1, 2, 4, 8), repeat=3)
          if data * fsdp * tensor in (1, 2, 8)]  # fmt: skip


class Reads:
    """Counts what is read of each tensor while it is in effect."""

    def __enter__(self):
        self.elements, self.original = {}, TensorFiles.read

        def read(files, name, slices):
            piece = self.original(files, name, slices)
            self.elements[name] = self.elements.get(name, 0) + piece.size
            return piece

        TensorFiles.read = read
        return self

    def __exit__(self, *exception):
        TensorFiles.read = self.original


def check_parts(params, expected, places):
    """Every shard holds its part of the expected arrays, in their order of bits."""
    params, places = paths_of(params), paths_of(places)
    assert params.keys() == expected.keys()
    for path, leaf in params.items():
        assert leaf.sharding == places[path] and leaf.committed, path
        whole = expected[path].astype(leaf.dtype)
        for part in leaf.addressable_shards:
            np.testing.assert_array_equal(np.asarray(part.data), whole[part.index], err_msg=path)


def meshes_of_the_rules(directory):
    """Each family on meshes of every shape, sizes that an axis does not divide among them."""
    for number, family in enumerate(FAMILIES):
        # 12 heads: not divided by 8; 3 key/value heads and a feed-forward layer of 36: neither by 2 nor by 8.
        changes = {"num_heads": 12, "num_kv_heads": 3, "intermediate_size": 36, "vocab_size": 56, "hidden_size": 16}
        sizes = small_sizes(family, **changes)
        dtype = (np.float32, ml_dtypes.bfloat16)[number % 2]
        tensors = source_tensors(sizes, dtype)
        source = directory / family
        source.mkdir()
        write_sharded(source, tensors)
        expected = expected_parameters(tensors, sizes)
        for data, fsdp, tensor in MESHES:
            mesh = make_mesh(data, fsdp, tensor)
            places = shardings(mesh, decoder_shapes(sizes))
            with Reads() as reads:
                params = load_weights(source, sizes, (jnp.float32, jnp.bfloat16)[(data + fsdp) % 2], places)
            check_parts(params, expected, places)
            # Eight devices, and each element is read once however many of them hold it.
            assert reads.elements == {name: tensor.size for name, tensor in tensors.items()}, (data, fsdp, tensor)
        written = directory / f"{family}-written"
        params = load_weights(source, sizes, jnp.float32, shardings(make_mesh(2, 2, 2), decoder_shapes(sizes)))
        save_weights(params, sizes, written, np.dtype(dtype).name)
        for name, tensor in load_file(written / "model.safetensors").items():
            np.testing.assert_array_equal(tensor, tensors[name], err_msg=name)
        print("rules", family, flush=True)


def any_axes(directory):
    """Shardings that the rules would never choose: any axis over any axes of the mesh, split heads and layers too."""
    sizes = small_sizes("qwen3", hidden_size=16, num_heads=4, num_layers=4, vocab_size=48, intermediate_size=24)
    tensors = source_tensors(sizes)
    directory = directory / "any"
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    expected = expected_parameters(tensors, sizes)
    mesh, rng = make_mesh(2, 2, 2), np.random.default_rng(0)

    def place(leaf):
        names = list(rng.permutation(["data", "fsdp", "tensor"]))
        entries = [None] * len(leaf.shape)
        for axis in rng.permutation(len(leaf.shape)):
            taken = names[: rng.integers(0, len(names) + 1)]
            if taken and leaf.shape[axis] % 2 ** len(taken) == 0:
                names = names[len(taken) :]
                entries[axis] = tuple(str(name) for name in taken)
        return NamedSharding(mesh, PartitionSpec(*entries))

    seen = set()
    for _ in range(6):
        places = jax.tree.map(place, decoder_shapes(sizes))
        check_parts(load_weights(directory, sizes, jnp.float32, places), expected, places)
        seen |= {(path, axis) for path, leaf in paths_of(places).items() for axis, x in enumerate(leaf.spec) if x}
    # Layers, width, heads and inside of a head were all split at some time.
    assert {("layers/attention/q/kernel", axis) for axis in range(4)} <= seen
    print("any axes", flush=True)


def fresh_weights():
    """Drawn in parts, the same numbers as on one device; copies and moments lie where the parameters lie."""
    sizes = small_sizes("qwen2", vocab_size=56, num_layers=3, tie_word_embeddings=False)
    # The first with all optimisations, which are what could change the last bit.
    for axes, dtype in (((2, 2, 2), jnp.float32), ((1, 8, 1), jnp.bfloat16)):
        places = shardings(make_mesh(*axes), decoder_shapes(sizes))
        params = init_decoder(sizes, jax.random.key(1), dtype, places)
        whole = init_decoder(sizes, jax.random.key(1), dtype)
        check_parts(params, {path: np.asarray(leaf) for path, leaf in paths_of(whole).items()}, places)
        jax.config.update("jax_disable_most_optimizations", True)
    # No device draws more than its part, 1 MB of 8 here; the bits and their two counters take as much each.
    place = NamedSharding(make_mesh(1, 8, 1), PartitionSpec(None, "fsdp"))
    memory = _normal((1024, 2048), place).lower(jax.random.key(0)).compile().memory_analysis()
    assert memory.output_size_in_bytes == 2**20 and memory.temp_size_in_bytes < 4 * 2**20, memory

    mesh = make_mesh(2, 2, 2)
    params = init_decoder(sizes, jax.random.key(1), shardings=shardings(mesh, decoder_shapes(sizes)))
    # What lies on the mesh is copied in place: no part of it moves from device to device on the way.
    with jax.transfer_guard_device_to_device("disallow"):
        critic = init_critic(sizes, jax.random.key(2), backbone=params)
    places = shardings(mesh, decoder_shapes(sizes))
    del places["lm_head"]
    assert jax.tree.map(lambda leaf: leaf.sharding, critic["backbone"]) == places
    for tree in (params, critic):
        state = fresh_state(make_optimizer(OptimizerConfig(moment_dtype="bfloat16")), tree, mesh)
        assert jax.tree.map(lambda leaf: leaf.sharding, state) == shardings(mesh, state)
        jax.tree.map(np.testing.assert_array_equal, state.params, tree)
        # A copy: the state can be donated and the parameters stay.
        jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(state)
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(tree))
    print("fresh weights", flush=True)


def policies(directory):
    """A policy on a mesh: made, kept as a checkpoint, exported from there, and loaded again, in parts throughout."""
    mesh = make_mesh(2, 2, 2)
    policy = load_policy("tiny-llama", seed=3, mesh=mesh)
    places = shardings(mesh, decoder_shapes(policy.sizes))
    whole = load_policy("tiny-llama", seed=3)
    assert all(len(leaf.sharding.device_set) == 1 for leaf in jax.tree.leaves(whole.params))
    expected = {path: np.asarray(leaf) for path, leaf in paths_of(whole.params).items()}
    check_parts(policy.params, expected, places)

    config = {"model": {"name": "tiny-llama"}}
    with Checkpoints(directory / "run", config=config, sizes=policy.sizes) as checkpoints:
        checkpoints.save(1, {"actor": fresh_state(make_optimizer(OptimizerConfig()), policy.params, mesh)})
    exported = []

    def export_model(params, *arguments, **options):
        exported.append(params)
        return policy_module.export_model(params, *arguments, **options)

    export.export_model = export_model
    export.export_workdir(directory / "run", directory / "exported")
    check_parts(exported[0], expected, shardings(make_mesh(fsdp=8), decoder_shapes(policy.sizes)))
    again = load_policy(str(directory / "exported"), seed=0, mesh=mesh)
    assert again.sizes == policy.sizes
    check_parts(again.params, expected, places)
    print("policies", flush=True)


def main():
    assert len(jax.devices()) == 8
    directory = pathlib.Path(sys.argv[1])
    meshes_of_the_rules(directory)
    any_axes(directory)
    fresh_weights()
    policies(directory)


if __name__ == "__main__":
    main()

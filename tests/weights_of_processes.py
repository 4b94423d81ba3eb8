"""Run as a program, twice at once, with two CPU devices each: weights of several processes, in and out.

python -m tests.weights_of_processes DIRECTORY PORT PROCESS_ID
"""

import contextlib
import errno
import pathlib
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from tests.checkpoint_fixtures import expected_parameters, source_tensors, write_sharded
from tests.model_fixtures import small_sizes
from tests.weights_on_mesh import Reads, check_parts
from turnppo_jax.models import weight_saving
from turnppo_jax.models.checkpoint_files import load_weights
from turnppo_jax.models.critic import init_critic
from turnppo_jax.models.parameters import decoder_shapes, init_decoder
from turnppo_jax.models.tensor_layout import paths_of
from turnppo_jax.parallel.agreement import HostError
from turnppo_jax.parallel.mesh import make_mesh
from turnppo_jax.parallel.sharding import shardings
from turnppo_jax.policy import export_model
from turnppo_jax.training.optimizer import OptimizerConfig, fresh_state, make_optimizer


def full_disk(path, dtype, shapes, blocks):
    """Writes as far as the first block."""
    next(blocks)
    raise OSError(errno.ENOSPC, "no space left", str(path))


def main():
    directory, port, process = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
    assert jax.process_count() == 2 and len(jax.devices()) == 4 and len(jax.local_devices()) == 2

    sizes = small_sizes("qwen2", vocab_size=56, tie_word_embeddings=False)
    tensors = source_tensors(sizes)
    source = directory / f"source-{process}"
    source.mkdir()
    write_sharded(source, tensors)
    expected = expected_parameters(tensors, sizes)
    mesh = make_mesh(fsdp=2, tensor=2)  # fsdp over the processes, tensor inside each
    places = shardings(mesh, decoder_shapes(sizes))
    with Reads() as reads:
        params = load_weights(source, sizes, jnp.float32, places)
    check_parts(params, expected, places)
    split = {name for name, tensor in tensors.items() if tensor.ndim == 2}
    assert reads.elements == {name: t.size // (2 if name in split else 1) for name, t in tensors.items()}
    print("each process reads its own half", flush=True)

    # Both get the directory when it is whole, and process 0 alone writes it.
    if process != 0:
        weight_saving.write_tensors = weight_saving.write_text = None
    out = export_model(params, sizes, directory / "out", max_shard_bytes=8000)
    written = {}
    for path in out.glob("*.safetensors"):
        written |= load_file(path)
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(written[name], tensor, err_msg=name)
    assert (out / "config.json").is_file() and not list(out.glob("*.partial"))
    print("one directory of both", flush=True)

    # What goes wrong for the process that writes is known to the other, wherever it happens.
    (directory / "file").touch()
    limited = mock.patch.object(weight_saving, "write_tensors", full_disk if process == 0 else None)
    for output, broken in ((directory / "file" / "out", contextlib.nullcontext()), (directory / "full", limited)):
        try:
            with broken:
                export_model(params, sizes, output, max_shard_bytes=8000)
        except (OSError, HostError) as error:
            assert isinstance(error, OSError) == (process == 0), error
        else:
            raise AssertionError(f"{output} was written")
    print("errors of the first are those of both", flush=True)

    fresh = init_decoder(sizes, jax.random.key(1), shardings=places)
    check_parts(fresh, {k: np.asarray(v) for k, v in paths_of(init_decoder(sizes, jax.random.key(1))).items()}, places)
    critic = init_critic(sizes, jax.random.key(2), backbone=params)
    del expected["lm_head/kernel"], places["lm_head"]
    check_parts(critic["backbone"], expected, places)
    state = fresh_state(make_optimizer(OptimizerConfig()), critic, mesh)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == shardings(mesh, state)
    check_parts(state.params["backbone"], expected, places)
    print("fresh weights", flush=True)


if __name__ == "__main__":
    main()

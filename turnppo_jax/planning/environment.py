"""The process environment that compiling for TPUs without a TPU needs, set before libtpu is loaded."""

import importlib.util
import os

import jax

from turnppo_jax.command_line import UserError

_VARIABLES = {
    # Without it jax looks for TPUs of this machine first.
    "JAX_PLATFORMS": "cpu",
    # No query of the cloud's metadata server, which hangs where the network swallows packets.
    "TPU_SKIP_MDS_QUERY": "1",
    # libtpu's lock is meant for processes that use the chips; compiling uses none, and tests run side by side.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # These two only silence warnings; every topology can be compiled for whatever they say.
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    # Otherwise a folder of logs is left behind in the temporary directory.
    "TPU_LOG_DIR": "disabled",
}


def prepare() -> None:
    """Sets the variables, those that are set already excepted; call it before the first topology.

    Raises:
      UserError: libtpu is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "plan compiles with the TPU compiler of the package libtpu, which is not installed: "
            "pip install 'jax[tpu]' (it needs no TPU)"
        )
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    # jax has read JAX_PLATFORMS when it was imported.
    if jax.config.jax_platforms is None:
        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])

"""Flags of the commands that can run on several hosts.

    --multihost                                                   TPU pod slices, GKE, Slurm: the machine knows the rest
    --coordinator=HOST:PORT --num_processes=N --process_id=I      anywhere else

They say how this process was started, not what is computed, so they are no part of the config.
"""

import contextlib
from collections.abc import Iterator

from absl import flags

from turnppo_jax.parallel import hosts
from turnppo_jax.parallel.agreement import failing_fast

_MULTIHOST = flags.DEFINE_bool("multihost", False, "Join the other hosts of this TPU slice or cluster.")
_COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, where nothing finds it by itself.")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "With --coordinator: processes in all.")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "With --coordinator: which of them this one is, from 0.")


@contextlib.contextmanager
def joined_hosts() -> Iterator[None]:
    """Joins the hosts that the flags name, before anything uses a device; see `hosts.start` and `failing_fast`.

    Raises:
      ValueError: one line about the flag that is wrong.
    """
    hosts.start(
        _MULTIHOST.value,
        coordinator=_COORDINATOR.value,
        num_processes=_NUM_PROCESSES.value,
        process_id=_PROCESS_ID.value,
    )
    with failing_fast():
        yield

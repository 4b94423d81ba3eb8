"""Environments of all hosts behind one sampler that spans them: every host sees every reply, in the same order.

A model too large for one host's devices is sampled by programs of all hosts, so all must make the same calls with the
same arguments. All schedule all slots; what an environment says is the only thing that they do not compute alike, and
it is exchanged in every round.
"""

import dataclasses
import json
from collections.abc import Callable

from turnppo_jax.parallel.agreement import agree
from turnppo_jax.parallel.hosts import own_share
from turnppo_jax.rollout.pool import EnvPool, EnvReply

# How long a host waits for its own environments in a round: the others have replies to hand out, or wait for it.
_LONGEST_WAIT_S = 0.02


class LockstepPool:
    """A pool of `num_envs` environments, each of them run by one host; has the methods of `EnvPool` that players use.

    An error on one host (`EnvStartError`, whatever `defer` is given) is kept until the next `poll` or `settle`, where
    every host raises.

    Args:
      make_pool: makes the pool of this host's environments from their number.
      num_envs: of all hosts.
    """

    def __init__(self, make_pool: Callable[[int], EnvPool], num_envs: int):
        self._own = own_share(num_envs)
        self._pool = make_pool(len(self._own)) if self._own else None
        self._error: Exception | None = None
        self.num_envs = num_envs

    def reset(self, index: int, seed: int) -> None:
        """Begins an episode in an environment; see `EnvPool.reset`."""
        if index in self._own:
            self._pool.reset(index - self._own.start, seed)

    def step(self, index: int, text: str) -> None:
        """Plays a turn in an environment; see `EnvPool.step`."""
        if index in self._own:
            self._pool.step(index - self._own.start, text)

    def poll(self, timeout_s: float) -> list[EnvReply]:
        """The replies that have arrived on any host, the same list on every host, which must all call it.

        Args:
          timeout_s: how long to wait for a first one, at most; the hosts' rounds are shorter.

        Raises:
          HostError, StopRequested: see `parallel.agreement.agree`.
        """
        replies: list[EnvReply] = []
        try:
            if self._pool is not None and self._error is None:
                replies = self._pool.poll(min(timeout_s, _LONGEST_WAIT_S))
        except Exception as error:
            self._error = error
        rows = [{**dataclasses.asdict(reply), "index": reply.index + self._own.start} for reply in replies]
        everyone = agree(self._take_error(), payload=json.dumps(rows).encode("ascii"))
        return [EnvReply(**row) for payload in everyone for row in json.loads(payload)]

    def defer(self, error: Exception) -> None:
        """Keeps an error of this host alone until all can raise."""
        self._error = self._error or error

    def settle(self) -> None:
        """Raises on every host what is still kept on any; all must call it after their last `poll`."""
        agree(self._take_error())

    def close(self) -> None:
        """Ends this host's environments."""
        if self._pool is not None:
            self._pool.close()

    def _take_error(self) -> Exception | None:
        error, self._error = self._error, None
        return error

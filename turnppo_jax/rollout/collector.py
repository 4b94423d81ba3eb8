"""Everything that plays episodes, built once a run: sampler, environments, chat.

Which episodes are played is a pure function of (seed, step, index): `training_episodes` and
`evaluation_episodes` say which.
"""

import dataclasses
import hashlib
from collections.abc import Callable

import jax
import numpy as np

from turnppo_jax.rollout.chat import Chat
from turnppo_jax.rollout.divided import play_divided
from turnppo_jax.rollout.episodes import Episode, PlayLimits, play_episodes
from turnppo_jax.rollout.lockstep import LockstepPool
from turnppo_jax.rollout.pool import EnvPool
from turnppo_jax.rollout.sampler import Sampler, Sampling, episode_keys
from turnppo_jax.rollout.scheduler import Scheduler
from turnppo_jax.types import Trajectory

# Streams of random numbers: training and evaluation never share one.
_TRAIN_STREAM, _EVAL_STREAM = 0, 1


@dataclasses.dataclass(frozen=True)
class EnvSettings:
    """Which environment is played, and how its processes are run.

    Attributes:
      id: registered id or "module:Class".
      kwargs: its arguments, as sorted (name, value) pairs.
      num_workers: worker processes of a host; 0 runs the environments inside this process.
      reset_timeout_s, step_timeout_s: seconds after which a worker counts as hung.
    """

    id: str
    kwargs: tuple[tuple[str, object], ...] = ()
    num_workers: int = 2
    reset_timeout_s: float = 60.0
    step_timeout_s: float = 60.0

    def with_kwargs(self, **kwargs) -> "EnvSettings":
        """The same environment with some arguments replaced."""
        return dataclasses.replace(self, kwargs=tuple(sorted({**dict(self.kwargs), **kwargs}.items())))


class Collector:
    """Plays episodes of one environment with a sampler that it may share with other collectors.

    With several hosts, each runs environments of its own. Either it has a sampler of its own and plays its share of
    the episodes, or, in lockstep, all hosts have one sampler in common and play every episode together.

    Args:
      sampler: who samples: on this host's devices, or in lockstep on those of all hosts.
      chat: who translates.
      env: what is played.
      limits: of an episode.
      stop_strings: a response ends with the token that completes one of them.
      lockstep: the sampler is that of all hosts.
    """

    def __init__(
        self,
        sampler: Sampler,
        chat: Chat,
        env: EnvSettings,
        limits: PlayLimits,
        *,
        stop_strings: tuple[str, ...] = (),
        lockstep: bool = False,
    ):
        self._sampler, self._chat, self._limits = sampler, chat, limits
        self._stop_strings = stop_strings

        def make_pool(num_envs: int) -> EnvPool:
            return EnvPool(
                env.id,
                dict(env.kwargs),
                num_envs,
                env.num_workers,
                reset_timeout_s=env.reset_timeout_s,
                step_timeout_s=env.step_timeout_s,
            )

        num_slots = sampler.settings.num_slots
        self._lockstep = lockstep and jax.process_count() > 1
        self._pool = LockstepPool(make_pool, num_slots) if self._lockstep else make_pool(num_slots)

    def play(
        self,
        params,
        episodes: list[Episode],
        sampling: Sampling,
        *,
        policy_step: int,
        on_round: Callable[[int, int], None] | None = None,
    ) -> tuple[list[Trajectory], dict[str, float]]:
        """Plays the episodes with these weights; see play_episodes and play_divided.

        Every host calls it with the same episodes and gets all trajectories. What `on_round` raises on one host
        ends the rollout on all.
        """
        self._sampler.set_params(params)

        def play(episodes, on_round=on_round):
            scheduler = Scheduler(self._sampler, sampling, self._chat.decode, self._stop_strings)
            return play_episodes(
                episodes, scheduler, self._pool, self._chat, self._limits, policy_step=policy_step,
                on_round=on_round,
            )  # fmt: skip

        if not self._lockstep:
            return play_divided(play, episodes)

        def defer_errors(finished, total):
            try:
                on_round(finished, total)
            except Exception as error:
                self._pool.defer(error)

        trajectories, counts = play(episodes, on_round and defer_errors)
        self._pool.settle()
        return trajectories, {**counts, "exchange_s": 0.0}

    def close(self) -> None:
        """Ends the worker processes."""
        self._pool.close()

    def __enter__(self) -> "Collector":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def training_episodes(seed: int, step: int, num_prompts: int, group_size: int) -> list[Episode]:
    """The episodes of a training step: `num_prompts` environment seeds, each played `group_size` times."""
    keys = episode_keys(seed, _TRAIN_STREAM, step, num_prompts * group_size)
    seeds = [_environment_seed(seed, step, group) for group in range(num_prompts)]
    return [
        Episode(index=i, seed=seeds[i // group_size], group=i // group_size, key=keys[i])
        for i in range(num_prompts * group_size)
    ]


def evaluation_episodes(seed: int, num_seeds: int, samples: int) -> list[Episode]:
    """Environment seeds 0..num_seeds-1, each played `samples` times; the same at every step of a run."""
    keys = episode_keys(seed, _EVAL_STREAM, 0, num_seeds * samples)
    return [Episode(index=i, seed=i // samples, group=i // samples, key=keys[i]) for i in range(num_seeds * samples)]


def _environment_seed(seed: int, step: int, group: int) -> int:
    """A 31-bit seed, a pure function of its arguments and the same on every machine."""
    digest = hashlib.blake2b(np.asarray([seed, step, group], "<i8").tobytes(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1

"""One rollout played by several hosts: each plays its share of the episodes, and all get all trajectories."""

import time
from collections.abc import Callable, Sequence

import jax

from turnppo_jax.parallel.agreement import agree
from turnppo_jax.parallel.hosts import own_share
from turnppo_jax.parallel.trajectory_bytes import decode_trajectories, encode_trajectories
from turnppo_jax.rollout.episodes import Episode
from turnppo_jax.types import Trajectory

Played = tuple[list[Trajectory], dict[str, float]]


def play_divided(play: Callable[[Sequence[Episode]], Played], episodes: Sequence[Episode]) -> Played:
    """Plays the episodes, this host those of its share.

    What an episode draws depends on its own key alone, so the trajectories are those of one host. Hosts need no
    collective while they play; each waits for the others at the end.

    Args:
      play: plays episodes on this host's environments and devices; returns trajectories by rising index and counts.
      episodes: of all hosts, the same list on each.

    Returns:
      What `play` would return for all of them: counts are summed, but `rollout_s`, the longest, and `exchange_s`, this
      host's time from its last episode to having those of the others.

    Raises:
      HostError: `play` raised on another host; where it raised here, what it raised. No host returns then.
      StopRequested: it raised that on any host.
    """
    if jax.process_count() == 1:
        trajectories, counts = play(episodes)
        return trajectories, {**counts, "exchange_s": 0.0}
    error, message = None, b""
    try:
        message = encode_trajectories(*play([episodes[i] for i in own_share(len(episodes))]))
    except Exception as caught:
        error = caught
    finished = time.perf_counter()
    parts = [decode_trajectories(payload) for payload in agree(error, payload=message)]
    counts = {name: sum(part.get(name, 0) for _, part in parts) for _, some in parts for name in some}
    counts["rollout_s"] = max(part["rollout_s"] for _, part in parts)
    counts["exchange_s"] = time.perf_counter() - finished
    trajectories = [trajectory for some, _ in parts for trajectory in some]
    return sorted(trajectories, key=lambda trajectory: trajectory.episode), counts

"""Rollouts that are not trained on but say what a state is worth: greedy ones (ReMax) and branches (VinePPO).

Both play with the weights that sampled the trajectories, in the training environment, with keys of their own streams.
Every host calls them with the same trajectories and gets the same numbers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from turnppo_jax.rollout.collector import Collector
from turnppo_jax.rollout.episodes import Episode
from turnppo_jax.rollout.prefix import Prefix
from turnppo_jax.rollout.sampler import Sampling, folded_keys
from turnppo_jax.types import Trajectory

# Streams of random numbers beside those of training and evaluation (see rollout.collector).
_GREEDY_STREAM, _BRANCH_STREAM = 2, 3
_COUNTS = ("env_errors", "env_timeouts", "dropped_episodes", "context_overflows", "prefill_tokens", "sampled_tokens")


def environment_rewards(trajectory: Trajectory) -> np.ndarray:
    """[K] float32, the environment's reward of each turn."""
    return np.asarray([turn.reward for turn in trajectory.turns], np.float32)


def greedy_scores(
    collector: Collector,
    params: Any,
    trajectories: Sequence[Trajectory],
    *,
    seed: int,
    step: int,
    rewards: Callable[[Trajectory], np.ndarray] = environment_rewards,
    on_round: Callable[[int, int], None] | None = None,
) -> tuple[np.ndarray, dict[str, float]]:
    """The baseline of ReMax: the undiscounted return of the greedy episode that answers the same prompt.

        b_m = Σ_k r_k of the episode with temperature 0 in the environment of trajectory m's seed

    One greedy episode is played for each distinct seed, whatever the group size. Source: ReMax, arXiv 2310.10505.

    Args:
      collector: who plays.
      params: weights of the sampler that sampled the trajectories.
      trajectories: `M` of them.
      seed: of the run.
      step: of the run, from 1; recorded with the turns.
      rewards: [K] of a trajectory, what the learner trains on; the environment's by default.
      on_round: see play_episodes.

    Returns:
      [M] float32, NaN where the greedy episode was dropped because its environment failed; and the metrics
      `rollout/greedy_*` and `time/greedy_s`.
    """
    seeds = list(dict.fromkeys(trajectory.seed for trajectory in trajectories))
    keys = folded_keys(seed, (_GREEDY_STREAM, step), len(seeds))
    episodes = [Episode(index=i, seed=seeds[i], group=i, key=keys[i]) for i in range(len(seeds))]
    played, counts = collector.play(params, episodes, Sampling(temperature=0.0), policy_step=step, on_round=on_round)
    score_of = {trajectory.seed: float(np.sum(rewards(trajectory))) for trajectory in played}
    scores = np.asarray([score_of.get(trajectory.seed, np.nan) for trajectory in trajectories], np.float32)
    return scores, _metrics("greedy", len(episodes), counts) | {
        "rollout/greedy_missing_scores": float(np.sum(np.isnan(scores))),
        "rollout/greedy_score_mean": float(np.mean(list(score_of.values()))) if score_of else 0.0,
        "rollout/greedy_success_rate": sum(t.success for t in played) / max(1, len(episodes)),
    }


def branch_values(
    collector: Collector,
    params: Any,
    trajectories: Sequence[Trajectory],
    *,
    num_branches: int,
    gamma: float,
    sampling: Sampling,
    seed: int,
    step: int,
    rewards: Callable[[Trajectory], np.ndarray] = environment_rewards,
    on_round: Callable[[int, int], None] | None = None,
) -> tuple[np.ndarray, dict[str, float]]:
    """Monte-Carlo values of VinePPO: the mean return of fresh rollouts from the state before each turn.

        V_mk = 1/N Σ_n Σ_{j≥k} γ^{j−k} r_j   of N episodes that begin with turns 0..k−1 of trajectory m

    The environment enters the state again by replaying the turns' texts from the same seed; the context is made of
    their very tokens. Branches keep the limits that the trajectory had left. The key of a branch is folded from (seed,
    step, episode, turn, branch), so a value depends neither on timing nor on the other states. Source: VinePPO, arXiv
    2410.01679, with a turn for its reasoning step.

    Args:
      collector: who plays.
      params: weights of the sampler that sampled the trajectories.
      trajectories: `M` of them, at most `K` turns each.
      num_branches: N.
      gamma: discount a turn.
      sampling: of the branches; that of the trajectories where V shall be the policy's own value.
      seed: of the run.
      step: of the run, from 1; recorded with the turns.
      rewards: [K] of a trajectory, what the learner trains on; the environment's by default. It is given whole
        trajectories, the turns before the branch included.
      on_round: see play_episodes.

    Returns:
      [M, K] float32: 0 where a trajectory has no such turn, NaN where every branch was dropped (a dropped one alone is
      left out of the mean); and the metrics `rollout/branch_*` and `time/branch_s`. The state after the last turn has
      no value here: the limit that cut it cuts its branches too.

    Raises:
      ValueError: `num_branches` below 1, or trajectories whose context does not only grow.
    """
    if num_branches < 1:
        raise ValueError(f"num_branches={num_branches}; allowed: at least 1")
    states = [(m, k) for m, trajectory in enumerate(trajectories) for k in range(len(trajectory.turns))]
    episodes = []
    for m, k in states:
        trajectory = trajectories[m]
        prefix = Prefix.before_turn(trajectory, k)
        for key in folded_keys(seed, (_BRANCH_STREAM, step, trajectory.episode, k), num_branches):
            episodes.append(Episode(len(episodes), trajectory.seed, trajectory.group, key, prefix))
    played, counts = collector.play(params, episodes, sampling, policy_step=step, on_round=on_round)
    shape = len(trajectories), max((len(trajectory.turns) for trajectory in trajectories), default=0)
    sums, nums = np.zeros(shape), np.zeros(shape, int)
    for branch in played:
        m, k = states[branch.episode // num_branches]
        new = np.asarray(rewards(branch)[k:], np.float64)
        sums[m, k] += new @ gamma ** np.arange(len(new))
        nums[m, k] += 1
    exists = np.zeros(shape, bool)
    exists[tuple(np.asarray(states, int).reshape(-1, 2).T)] = True
    values = np.where(exists & (nums == 0), np.nan, sums / np.maximum(nums, 1))
    return values.astype(np.float32), _metrics("branch", len(episodes), counts) | {
        "rollout/branch_missing_values": float(np.sum(exists & (nums == 0))),
    }


def _metrics(kind: str, num_episodes: int, counts: dict[str, float]) -> dict[str, float]:
    """Of the extra rollouts alone; those of the training rollout stay as they are."""
    return {
        f"rollout/{kind}_episodes": float(num_episodes),
        **{f"rollout/{kind}_{name}": float(counts.get(name, 0)) for name in _COUNTS},
        f"time/{kind}_s": counts["rollout_s"] + counts["exchange_s"],
    }

"""What a set of trajectories says about the policy: the `episode/` metrics."""

from collections.abc import Sequence

import numpy as np

from turnppo_jax.types import StopReason, Trajectory


def episode_metrics(trajectories: Sequence[Trajectory], *, num_dropped: int = 0) -> dict[str, float]:
    """Means over episodes, or over turns where the name says so.

    A dropped episode (its environment failed for good) counts as a failure in `episode/success_rate`:
    3 successes of 8 with 2 dropped are .375. It has no return, so it stays out of the other means.
    Rates and means of nothing are 0.

    Args:
      trajectories: the played episodes, in any order.
      num_dropped: episodes that are missing from them.

    Returns:
      The metrics; `episode/score_mean` only where the environment gives scores.
    """
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    returns = [trajectory.total_reward for trajectory in trajectories]
    tokens = [sum(len(turn.response_ids) for turn in trajectory.turns) for trajectory in trajectories]
    contexts = [
        sum(len(turn.prompt_ids) + len(turn.response_ids) for turn in trajectory.turns) for trajectory in trajectories
    ]
    successes = sum(trajectory.success for trajectory in trajectories)
    scores = [trajectory.score for trajectory in trajectories if trajectory.score is not None]
    return ({"episode/score_mean": _mean(scores)} if scores else {}) | {
        "episode/return_mean": _mean(returns),
        "episode/return_std": float(np.std(returns)) if returns else 0.0,
        "episode/success_rate": successes / max(1, len(trajectories) + num_dropped),
        "episode/turns_mean": _mean([len(trajectory.turns) for trajectory in trajectories]),
        "episode/context_tokens_mean": _mean(contexts),
        "episode/sampled_tokens_mean": _mean(tokens),
        "episode/turn_tokens_mean": _mean([len(turn.response_ids) for turn in turns]),
        "episode/truncated_rate": _mean([t.truncated and not t.terminated for t in trajectories]),
        "episode/invalid_action_rate": _mean([bool(turn.info.get("invalid_action", False)) for turn in turns]),
        "episode/cut_turn_rate": _mean(
            [turn.stop in (StopReason.TURN_LIMIT, StopReason.CONTEXT_LIMIT) for turn in turns]
        ),
        "episode/num_dropped": float(num_dropped),
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0

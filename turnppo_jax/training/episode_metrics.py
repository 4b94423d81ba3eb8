"""What a set of trajectories says about the policy: the `episode/` metrics."""

import bisect
import collections
from collections.abc import Callable, Sequence

import numpy as np

from turnppo_jax.types import StopReason, Trajectory

_THINKING_ENDS = "</think>"


def episode_metrics(trajectories: Sequence[Trajectory], *, num_dropped: int = 0) -> dict[str, float]:
    """Means over episodes, or over turns where the name says so.

    A dropped episode (its environment failed for good) counts as a failure in `episode/success_rate`:
    3 successes of 8 with 2 dropped are .375. It has no return, so it stays out of the other means.
    Rates and means of nothing are 0.

    Args:
      trajectories: the played episodes, in any order.
      num_dropped: episodes that are missing from them.

    Returns:
      The metrics; `episode/score_mean` only where the environment gives scores, `episode/group_return_std_mean` (sample
      standard deviation of the returns of a group, n − 1) only where a group has two members.
    """
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    returns = [trajectory.total_reward for trajectory in trajectories]
    tokens = [sum(len(turn.response_ids) for turn in trajectory.turns) for trajectory in trajectories]
    contexts = [
        sum(len(turn.prompt_ids) + len(turn.response_ids) for turn in trajectory.turns) for trajectory in trajectories
    ]
    successes = sum(trajectory.success for trajectory in trajectories)
    scores = [trajectory.score for trajectory in trajectories if trajectory.score is not None]
    groups = collections.defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.group].append(trajectory.total_reward)
    spreads = [float(np.std(group, ddof=1)) for group in groups.values() if len(group) > 1]
    optional = {"episode/score_mean": _mean(scores)} if scores else {}
    if spreads:
        optional["episode/group_return_std_mean"] = _mean(spreads)
    return optional | {
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
        "episode/repeated_tokens_share": repeated_share([turn.response_ids for turn in turns]),
        "episode/num_dropped": float(num_dropped),
    }


def repeated_share(responses: Sequence[Sequence[int]], size: int = 4) -> float:
    """The share of n-grams that stood before in the same response, over all n-grams of all responses.

        Σ_i (n-grams of i − different ones of i) / Σ_i n-grams of i

    Args:
      responses: token ids; one shorter than `size` has no n-gram.
      size: n.

    Returns:
      From 0 to below 1; 0 where there is no n-gram.
    """
    total = different = 0
    for response in responses:
        ids = np.asarray(response).tolist()
        grams = list(zip(*(ids[start:] for start in range(size)), strict=False))
        total += len(grams)
        different += len(set(grams))
    return (total - different) / total if total else 0.0


def thinking_metrics(trajectories: Sequence[Trajectory], decode: Callable[[np.ndarray], str]) -> dict[str, float]:
    """How long the policy thinks and how long it answers: `episode/thinking_tokens_mean`, `episode/answer_tokens_mean`.

    Means over the turns that close a thinking block. The tokens up to the one that completes the first "</think>" are
    of thinking, the rest of the response is the answer. `episode/thinking_rate` is the share of such turns; without one
    there is no metric.

    Args:
      trajectories: the played episodes.
      decode: token ids to text.
    """
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    thought = []
    for turn in turns:
        if _THINKING_ENDS in turn.action:
            ids = turn.response_ids
            # Once a beginning of the response holds the tag every longer one does.
            closed = bisect.bisect_left(range(len(ids)), True, key=lambda n: _THINKING_ENDS in decode(ids[:n]))
            thought.append((closed, len(ids) - closed))
    if not thought:
        return {}
    thinking, answer = np.mean(thought, axis=0)
    return {
        "episode/thinking_tokens_mean": float(thinking),
        "episode/answer_tokens_mean": float(answer),
        "episode/thinking_rate": len(thought) / len(turns),
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0

"""Evaluation on held-out seeds: rates with their intervals, over rooms."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from turnppo_jax.rollout.collector import Collector, evaluation_episodes
from turnppo_jax.rollout.sampler import Sampling
from turnppo_jax.training.episode_metrics import episode_metrics
from turnppo_jax.training.statistics import mean_interval, pass_at_k_interval, rate_interval
from turnppo_jax.types import Trajectory


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """`config.evaluation`.

    Attributes:
      every: training steps between evaluations; 0 evaluates before the first and after the last step only.
      num_seeds: environment seeds 0..num_seeds-1 of the evaluation environment.
      samples: episodes a seed at `temperature`; 0 for none.
      temperature, top_p, top_k: of these samples.
      greedy: also one episode a seed at temperature 0.
    """

    every: int = 0
    num_seeds: int = 256
    samples: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = True

    def __post_init__(self):
        for name, least in (("every", 0), ("num_seeds", 1), ("samples", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"evaluation.{name}={getattr(self, name)}; allowed: at least {least}")
        if not self.samples and not self.greedy:
            raise ValueError("evaluation.samples=0 with evaluation.greedy=False evaluates nothing; set either")
        if self.samples and not self.temperature > 0:
            raise ValueError(f"evaluation.temperature={self.temperature}; allowed: above 0 (greedy is its own switch)")

    def due(self, step: int, last_step: int) -> bool:
        """Whether to evaluate after this step (0: before the first)."""
        return step in (0, last_step) or (self.every > 0 and step % self.every == 0)


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """Metrics under `eval/<environment id>/`, and the lines that a person reads.

    `rooms` has the mean of each room, by environment seed, for every metric that is a mean over rooms.
    """

    metrics: dict[str, float]
    rooms: dict[str, list[float]]
    lines: list[str]
    trajectories: dict[str, list[Trajectory]]


def evaluate(
    collector: Collector,
    params: Any,
    settings: EvaluationSettings,
    *,
    env_id: str,
    seed: int,
    policy_step: int,
    on_round: Callable[[int, int], None] | None = None,
) -> EvaluationResult:
    """Plays the held-out seeds, sampled and greedy.

    An episode whose environment failed for good counts as a failure with return 0.

    Args:
      collector: of the evaluation environment.
      params: weights of the sampler.
      settings: what to play.
      env_id: names the metrics.
      seed: of the run; the same episodes and keys at every step of it.
      policy_step: recorded with the trajectories.
      on_round: see play_episodes.
    """
    modes = []
    if settings.samples:
        sampling = Sampling(settings.temperature, settings.top_p, settings.top_k)
        modes.append(("", settings.samples, sampling, f"temperature {settings.temperature:g}"))
    if settings.greedy:
        modes.append(("greedy_", 1, Sampling(temperature=0.0), "greedy"))
    metrics: dict[str, float] = {}
    rooms: dict[str, list[float]] = {}
    lines: list[str] = []
    trajectories: dict[str, list[Trajectory]] = {}
    for prefix, samples, sampling, title in modes:
        episodes = evaluation_episodes(seed, settings.num_seeds, samples)
        played, counts = collector.play(params, episodes, sampling, policy_step=policy_step, on_round=on_round)
        rows, by_room, text = _summary(played, settings.num_seeds, samples, counts["dropped_episodes"])
        metrics |= {f"eval/{env_id}/{prefix}{name}": value for name, value in rows.items()}
        rooms |= {f"eval/{env_id}/{prefix}{name}": values.tolist() for name, values in by_room.items()}
        lines.append(f"eval {env_id} {title}: {text}")
        trajectories[title] = played
    return EvaluationResult(metrics, rooms, lines, trajectories)


def _summary(
    played: Sequence[Trajectory], num_seeds: int, samples: int, num_dropped: int
) -> tuple[dict[str, float], dict[str, np.ndarray], str]:
    success, returns, scores = np.zeros((3, num_seeds, samples))
    for trajectory in played:
        at = divmod(trajectory.episode, samples)
        success[at], returns[at], scores[at] = trajectory.success, trajectory.total_reward, trajectory.score or 0.0
    by_room = {"success_rate": success.mean(axis=1), "return_mean": returns.mean(axis=1)}
    rate, mean = rate_interval(success), mean_interval(returns)
    episodes = episode_metrics(played, num_dropped=num_dropped)
    rows = {
        "success_rate": rate.mean,
        "success_rate_low": rate.low,
        "success_rate_high": rate.high,
        "return_mean": mean.mean,
        "return_mean_low": mean.low,
        "return_mean_high": mean.high,
        "num_seeds": num_seeds,
        "num_episodes": num_seeds * samples,
        "num_dropped": num_dropped,
        "turns_mean": episodes["episode/turns_mean"],
        "invalid_action_rate": episodes["episode/invalid_action_rate"],
    }
    text = f"success {rate} x {samples}, return {mean.mean:.2f} [{mean.low:.2f}, {mean.high:.2f}]"
    if any(trajectory.score is not None for trajectory in played):
        score = mean_interval(scores)
        by_room["score_mean"] = scores.mean(axis=1)
        rows |= {"score_mean": score.mean, "score_mean_low": score.low, "score_mean_high": score.high}
        text += f", score {score.mean:.3f} [{score.low:.3f}, {score.high:.3f}]"
    if samples > 1:
        best = pass_at_k_interval(success, samples)
        rows |= {
            f"pass_at_{samples}": best.mean,
            f"pass_at_{samples}_low": best.low,
            f"pass_at_{samples}_high": best.high,
        }
        text += f", pass@{samples} {best.mean:.3f} [{best.low:.3f}, {best.high:.3f}]"
    return rows, by_room, f"{text}, valid answers {1 - episodes['episode/invalid_action_rate']:.3f}"

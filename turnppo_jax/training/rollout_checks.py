"""What a rollout must be for the losses of the config; known only once it is there."""

from collections.abc import Mapping, Sequence

import jax

from turnppo_jax.training.algorithm import AlgorithmConfig
from turnppo_jax.types import Trajectory


def check_one_row(trajectories: Sequence[Trajectory]) -> None:
    """A ratio of whole trajectories is formed inside a row: over several, it would span micro-batches."""
    for number, trajectory in enumerate(trajectories):
        if any(turn.starts_row for turn in trajectory.turns[1:]):
            raise ValueError(
                f"ratio_level='sequence' with trajectory {number} (episode {trajectory.episode}) over several rows; "
                "allowed: prompts that only grow, or ratio_level='turn'"
            )


def check_targets(metrics: Mapping[str, jax.Array], cfg: AlgorithmConfig) -> None:
    """A probability can say nothing beyond 0 and 1; what rounding adds is clamped."""
    if cfg.value_loss_kind != "cross_entropy":
        return
    for name in ("value/target_min", "value/target_max"):
        target = float(metrics[name])
        if not -1e-5 <= target <= 1 + 1e-5:
            raise ValueError(
                f"value_scale={cfg.value_scale} with value_loss_kind='cross_entropy' and a return of "
                f"{target * cfg.value_scale:g}; allowed: returns from 0 to value_scale"
            )

"""Which trajectories of a rollout train, and what the estimators are told of each: work of the host, before packing."""

import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any

import numpy as np

from turnppo_jax import kernels
from turnppo_jax.training.algorithm import AlgorithmConfig
from turnppo_jax.training.batching import BatchShape, kept_turns
from turnppo_jax.training.estimators import TrajectoryFacts
from turnppo_jax.types import StopReason, Trajectory

_CUT = (StopReason.TURN_LIMIT, StopReason.CONTEXT_LIMIT)


@dataclasses.dataclass(frozen=True)
class Selection:
    """The result of `select`."""

    facts: TrajectoryFacts  # numpy, [M] each
    members: np.ndarray  # int64, indices of the trajectories that are packed and trained on, rising
    metrics: dict[str, float]


def select(
    trajectories: Sequence[Trajectory],
    shape: BatchShape,
    cfg: AlgorithmConfig,
    *,
    greedy_scores: Any = None,
    branch_values: Any = None,
) -> Selection:
    """Applies the filters and gathers what the estimator reads.

    A group that the filter leaves out has no part in anything. A trajectory masked as over-long is not packed, so its
    turns are compared with nothing, but its score stays in its group. A trajectory whose greedy score or branch value
    is missing is left out like a group.

    Args:
      trajectories: the rollout, at most `shape.trajectories`.
      shape: of a minibatch.
      cfg: filters and estimator.
      greedy_scores: [number of trajectories], NaN where there is none; where `cfg.needs` it.
      branch_values: [number of trajectories, turns], the same.

    Raises:
      ValueError: what the estimator needs is not given.
    """
    given = {"greedy_scores": greedy_scores, "branch_values": branch_values}
    if cfg.needs in given and given[cfg.needs] is None:
        raise ValueError(f"{cfg.needs}=None with estimator={cfg.estimator!r}; allowed: one number for each")
    count, capacity = len(trajectories), shape.trajectories
    scores, groups = np.zeros(capacity, np.float32), np.full(capacity, -1, np.int32)
    scores[:count] = [trajectory.total_reward for trajectory in trajectories]
    groups[:count] = [trajectory.group for trajectory in trajectories]
    extra: dict[str, np.ndarray] = {}
    if cfg.needs == "anchor_ids":
        extra["anchor_ids"] = anchor_ids(trajectories, shape, cfg)
    if cfg.needs == "greedy_scores":
        greedy = np.zeros(capacity, np.float32)
        greedy[:count] = greedy_scores
        extra["greedy_scores"], known = np.nan_to_num(greedy), np.isfinite(greedy)
        groups[~known] = -1
    if cfg.needs == "branch_values":
        values = _by_kept_turn(trajectories, branch_values, shape)
        extra["branch_values"], known = np.nan_to_num(values), np.isfinite(values).all(axis=1)
        groups[~known] = -1
    present = groups >= 0
    kept = np.asarray(_kept_groups(trajectories, scores, groups, cfg)) & present
    groups = np.where(kept, groups, -1)
    overlong = np.zeros(capacity, bool)
    if cfg.mask_overlong:
        overlong[:count] = [any(turn.stop in _CUT for turn in trajectory.turns) for trajectory in trajectories]
    train = kept & np.asarray(kernels.not_overlong(overlong, groups))
    metrics = {
        "batch/trained_trajectories": float(train.sum()),
        "batch/filtered_trajectories": float(count - kept.sum()),
        "batch/overlong_trajectories": float((kept & ~train).sum()),
    }
    facts = TrajectoryFacts(scores=scores, group_ids=groups.astype(np.int32), **extra)
    return Selection(facts, np.flatnonzero(train), metrics)


def anchor_ids(trajectories: Sequence[Trajectory], shape: BatchShape, cfg: AlgorithmConfig) -> np.ndarray:
    """[M, K_max] int32: equal where two observations of one group count as the same state; -1 where no turn is.

    With anchors "similar" an observation joins the first anchor of its group, in order of play, whose text it shares
    the asked-for part of (difflib's ratio, as the authors of GiGPO cluster), or becomes an anchor itself.
    """
    out = np.full((shape.trajectories, shape.max_turns), -1, np.int32)
    anchors: dict[int, list[str]] = {}  # by group: the texts that others are compared with
    known: dict[tuple[int, str], int] = {}  # which anchor a text of the group belongs to
    for number, trajectory in enumerate(trajectories):
        own = anchors.setdefault(trajectory.group, [])
        for order, index in enumerate(kept_turns(trajectory)[0]):
            text = trajectory.turns[index].observation
            if (trajectory.group, text) not in known:
                nearest = _first_similar(text, own, cfg.anchor_similarity) if cfg.anchors == "similar" else None
                if nearest is None:
                    nearest = len(own)
                    own.append(text)
                known[trajectory.group, text] = nearest
            out[number, order] = known[trajectory.group, text]
    return out


def _first_similar(text: str, anchors: Sequence[str], least: float) -> int | None:
    for number, anchor in enumerate(anchors):
        matcher = difflib.SequenceMatcher(None, anchor, text, autojunk=False)
        # The cheap bounds from above come first: most pairs differ too much for the full comparison.
        if matcher.real_quick_ratio() >= least and matcher.quick_ratio() >= least and matcher.ratio() >= least:
            return number
    return None


def _kept_groups(trajectories: Sequence[Trajectory], scores: np.ndarray, groups: np.ndarray, cfg: AlgorithmConfig):
    if cfg.filter == "none":
        return groups >= 0
    if cfg.filter_on == "success":
        scores = np.zeros_like(scores)
        scores[: len(trajectories)] = [trajectory.success for trajectory in trajectories]
    if cfg.filter == "spread":
        return kernels.groups_with_spread(scores, groups)
    return kernels.top_spread_groups(scores, groups, group_size=cfg.group_size, fraction=cfg.filter_fraction)


def _by_kept_turn(trajectories: Sequence[Trajectory], values: Any, shape: BatchShape) -> np.ndarray:
    """[M, K_max]: the values at the turns that count, 0 elsewhere."""
    values = np.asarray(values, np.float32)
    out = np.zeros((shape.trajectories, shape.max_turns), np.float32)
    for number, trajectory in enumerate(trajectories):
        kept = kept_turns(trajectory)[0]
        out[number, : len(kept)] = values[number, kept]
    return out

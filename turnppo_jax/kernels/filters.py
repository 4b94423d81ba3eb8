"""Which trajectories train: groups by the spread of their scores (StarPO-S, dynamic sampling), over-long ones out.

Each gives a mask [M]; several are joined with `&`. A group is kept or left out as a whole.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turnppo_jax.kernels.advantages import EQUAL_SCORES
from turnppo_jax.kernels.checks import as_float, as_mask, check_choice, check_shapes

ORDERS = ("largest", "smallest")
# fraction · groups may fall short of a whole number by float32 rounding: 6/37 · 37 = 5.9999995.
_ROUNDING = 1e-4


def top_spread_groups(
    scores: Any,
    group_ids: Any,
    *,
    group_size: int,
    fraction: float = 0.25,
    order: str = "largest",
    keep_flat: bool = True,
) -> jax.Array:
    """The groups whose scores spread most (StarPO-S of RAGEN, arXiv 2504.20073).

        kept = the max(1, ⌊fraction · groups⌋) groups with the largest sample standard deviation (n − 1) of their scores

    Groups of equal spread go in the order of their first trajectory. A group of one (whose mates were dropped) has
    spread 0. fraction 1 keeps all.

    Args:
      scores: [M], as the environment gave them: before any normalisation.
      group_ids: [M] int; negative ids belong to no group and are not kept.
      group_size: G of the rollout; refused below 2, where no group has a spread to be ranked by.
      fraction: share of the groups to keep, above 0 and at most 1; 0.25 in RAGEN.
      order: "largest" | "smallest" spread first.
      keep_flat: whether a group whose scores are all equal may be kept, where its rank allows it.

    Returns:
      [M] bool.

    Raises:
      ValueError: the shapes differ, group_size is below 2, fraction is outside (0, 1], or the order is unknown.
    """
    check_choice("top_spread_groups", "order", order, ORDERS)
    if group_size < 2:
        raise ValueError(f"top_spread_groups: group_size={group_size} must be at least 2; a group of one has no spread")
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"top_spread_groups: fraction={fraction} must be above 0 and at most 1")
    check_shapes("top_spread_groups", "scores", np.shape(scores), group_ids=group_ids)
    same, above = _groups(scores, group_ids)
    deviation = _deviation(same, above)
    present = jnp.diagonal(same)
    columns = jnp.arange(present.shape[0], dtype=jnp.int32)
    first = jnp.argmax(same, axis=-1)  # the group's first trajectory speaks for it
    speaks = present & (first == columns)
    num_groups = jnp.sum(speaks)
    quota = jnp.maximum(1, jnp.floor(fraction * num_groups + _ROUNDING).astype(jnp.int32))
    key = deviation if order == "largest" else -deviation
    ahead = (key[None, :] > key[:, None]) | ((key[None, :] == key[:, None]) & (columns[None, :] < columns[:, None]))
    rank = jnp.sum(ahead & speaks[None, :], axis=-1)
    kept = speaks & (rank < quota)
    if not keep_flat:
        kept &= deviation > 0.0
    return present & kept[first]


def groups_with_spread(scores: Any, group_ids: Any, *, min_range: float = 0.0) -> jax.Array:
    """The groups whose scores are not all equal: dynamic sampling (DAPO, arXiv 2503.14476, section 3.2).

        kept:  max_{j in group} s_j − min_{j in group} s_j > min_range

    With scores 0 and 1: groups neither all solved nor all failed. What is left out has group advantage 0.

    Args:
      scores: [M], what is compared: the reward, or success as 0 and 1.
      group_ids: [M] int; negative ids belong to no group and are not kept.
      min_range: a range up to this counts as none. Scores within 1e-6 of the largest are equal in any case.

    Returns:
      [M] bool. A group of one is never kept.

    Raises:
      ValueError: the shapes differ or min_range is negative.
    """
    if not min_range >= 0.0:
        raise ValueError(f"groups_with_spread: min_range={min_range} must be at least 0")
    check_shapes("groups_with_spread", "scores", np.shape(scores), group_ids=group_ids)
    same, above = _groups(scores, group_ids)
    return jnp.diagonal(same) & (jnp.max(above, axis=-1, initial=0.0) > min_range)


def not_overlong(cut: Any, group_ids: Any, *, num_tokens: Any = None, max_tokens: int | None = None) -> jax.Array:
    """The trajectories that ended by themselves: over-long filtering (DAPO, arXiv 2503.14476, section 3.4).

    A response that was cut tells nothing of how it would have ended, so it gives no loss. Its score still belongs to
    the baseline of its group, so this mask goes to the loss weights and not into `group_ids`.

    Args:
      cut: [M] bool or 0/1, a response of the trajectory was cut for length. Reaching the turn limit of a task that
        shows it is not that, unless the caller says so.
      group_ids: [M] int; negative where there is no trajectory, which is not kept.
      num_tokens: [M] int, sampled tokens of the trajectory; with `max_tokens` only.
      max_tokens: trajectories with more than this are over-long, too; None: no such limit.

    Returns:
      [M] bool.

    Raises:
      ValueError: the shapes differ, or only one of num_tokens and max_tokens is given.
    """
    if (num_tokens is None) != (max_tokens is None):
        lacking = "num_tokens" if num_tokens is None else "max_tokens"
        raise ValueError(f"not_overlong: {lacking}=None, but the other is given; give both or neither")
    check_shapes("not_overlong", "cut", np.shape(cut), group_ids=group_ids, num_tokens=num_tokens)
    kept = (jnp.asarray(group_ids) >= 0) & ~as_mask(cut)
    return kept if num_tokens is None else kept & (jnp.asarray(num_tokens) <= max_tokens)


def _groups(scores: Any, group_ids: Any) -> tuple[jax.Array, jax.Array]:
    """([M, M] whether j is of i's group, [M, M] the score of j above the lowest of i's group, 0 outside it)."""
    group_ids = jnp.asarray(group_ids)
    present = group_ids >= 0
    same = (group_ids[:, None] == group_ids[None, :]) & present[:, None]
    scores = jnp.where(present, as_float(scores), 0.0)
    lowest = jnp.min(jnp.where(same, scores[None, :], jnp.inf), axis=-1, initial=jnp.inf)
    above = jnp.where(same, scores[None, :] - jnp.where(present, lowest, 0.0)[:, None], 0.0)
    largest = jnp.max(jnp.where(same, jnp.abs(scores)[None, :], 0.0), axis=-1, initial=0.0)
    differ = jnp.max(above, axis=-1, initial=0.0) > EQUAL_SCORES * largest  # as in `group_advantages`
    return same, jnp.where(differ[:, None], above, 0.0)


def _deviation(same: jax.Array, above: jax.Array) -> jax.Array:
    """[M]: sample standard deviation of each trajectory's group; exactly 0 for equal scores and groups of one."""
    members = jnp.maximum(jnp.sum(same, axis=-1), 1).astype(above.dtype)
    mean = jnp.sum(above, axis=-1) / members
    squares = jnp.sum(jnp.where(same, jnp.square(above - mean[:, None]), 0.0), axis=-1)
    return jnp.sqrt(squares / jnp.maximum(members - 1.0, 1.0))

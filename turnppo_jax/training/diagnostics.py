"""The paper's explanations as measurements of a step: what the critic knows at turn starts, and credit by turn index.

Turn-PPO (arXiv 2512.17008) argues that a turn is the better unit because values are hard to learn inside a response
and jump between turns. These numbers say whether that holds in a run, for critics of turns and of tokens alike.
"""

from collections.abc import Iterator

import numpy as np

from turnppo_jax.training.advantages import Advantages
from turnppo_jax.training.rollout_table import RolloutTable
from turnppo_jax.training.update_metrics import by_turn

_LENGTHS = ("short", "middle", "long")


def critic_metrics(table: RolloutTable, estimated: Advantages, value_scale: float) -> dict[str, float]:
    """How good the critic is, seen from the starts of turns.

        value/turn_start_explained_variance   1 − Var(G − V) / Var(G) over turns, G the target at the turn's start
        value/turn_start_error_<length>       mean |V − G| over the third of the turns with the fewest, middling, most
                                              tokens (ties go together); in units of reward
        value/change_across_turns             mean |V_{k+1} − V_k| between the starts of consecutive turns
        value/change_between_turns            the same from the last token of a turn to the first of the next
        value/change_inside_turns             mean |V_{t+1} − V_t| between consecutive tokens of one turn
                                              (the last two of token critics alone)

    Args:
      table: of the rollout, numpy.
      estimated: its advantages, numpy.
      value_scale: of the algorithm.

    Returns:
      float metrics; one without anything to measure is left out.
    """
    mask = np.asarray(table.mask)
    by_token = np.shape(table.values) != mask.shape
    starts = _starts(table) if by_token else np.broadcast_to(np.arange(mask.shape[1]), mask.shape)
    starts = np.where(mask, starts, 0)
    values, goals, weights = (
        np.take_along_axis(np.asarray(x), starts, axis=1)
        for x in (table.values, estimated.targets, table.value_weights)
    )
    goals, mask = goals * value_scale, mask & (weights > 0)  # a critic of the prompt alone is asked nothing else
    metrics = {}
    spread = np.var(goals[mask]) if mask.any() else 0.0
    if spread > 0:
        metrics["value/turn_start_explained_variance"] = 1.0 - np.var((goals - values)[mask]) / spread
    for name, chosen in _thirds(np.asarray(table.num_tokens), mask):
        metrics[f"value/turn_start_error_{name}"] = np.abs(values - goals)[chosen].mean()
    both = mask[:, 1:] & mask[:, :-1]
    if both.any():
        metrics["value/change_across_turns"] = np.abs(np.diff(values, axis=1))[both].mean()
    if by_token:
        metrics |= _token_changes(table)
    return {name: float(value) for name, value in metrics.items()}


def by_turn_metrics(name: str, values: np.ndarray, mask: np.ndarray) -> dict[str, float]:
    """`by_turn/<name>_mean_<k>` and `_std_<k>` over the turns with index k, see `update_metrics.by_turn`.

    Args:
      name: of what is measured.
      values: [M, K].
      mask: [M, K] bool.
    """
    counts = mask.sum(axis=0)
    mean = np.sum(values, axis=0, where=mask) / np.maximum(counts, 1)
    squares = np.sum(np.square(values - mean), axis=0, where=mask) / np.maximum(counts, 1)
    return by_turn(f"{name}_mean", mean, counts) | by_turn(f"{name}_std", np.sqrt(squares), counts)


def _starts(table: RolloutTable) -> np.ndarray:
    """[M, K]: which sampled token of its trajectory each turn begins with."""
    counts = np.asarray(table.num_tokens)
    return np.cumsum(counts, axis=1) - counts


def _thirds(lengths: np.ndarray, mask: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """(name, [M, K] bool) of the turns up to the first tercile of length, up to the second, and beyond."""
    if not mask.any():
        return
    low, high = np.quantile(lengths[mask], [1 / 3, 2 / 3])
    for name, inside in zip(_LENGTHS, (lengths <= low, (lengths > low) & (lengths <= high), lengths > high)):
        if (mask & inside).any():
            yield name, mask & inside


def _token_changes(table: RolloutTable) -> dict[str, float]:
    """Changes of a token critic's values between neighbouring sampled tokens."""
    counts, values = np.asarray(table.num_tokens), np.asarray(table.values)
    ends = np.cumsum(counts, axis=1)
    columns = np.arange(values.shape[1])
    turn_of = (columns[None, :, None] >= ends[:, None, :]).sum(axis=-1)
    pairs = columns[None, 1:] < ends[:, -1:]
    change = np.abs(np.diff(values, axis=1))
    same = turn_of[:, 1:] == turn_of[:, :-1]
    metrics = {}
    for name, chosen in (("between", pairs & ~same), ("inside", pairs & same)):
        if chosen.any():
            metrics[f"value/change_{name}_turns"] = change[chosen].mean()
    return metrics

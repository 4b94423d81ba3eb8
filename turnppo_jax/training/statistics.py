"""Means and rates with their 95 % intervals, and pass@k: what an evaluation reports.

Rows are independent units (rooms, goals, prompts), columns are samples of one unit. Samples of one room
resemble each other, so the interval is over rooms: 256 rooms × 4 samples are not 1,024 observations.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy import special

_Z = 1.959963984540054  # 97.5 % quantile of the standard normal distribution


@dataclasses.dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % interval.

    Attributes:
      mean: the estimate.
      low: lower end; equals `mean` where one unit alone says nothing about the spread of a mean.
      high: upper end.
      units: independent units (rooms) it rests on.
      samples: samples in all.
    """

    mean: float
    low: float
    high: float
    units: int
    samples: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}] (n={self.units})"


def wilson_interval(successes: float, trials: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a rate (Wilson 1927), sound also at 0 and 1 and for few trials.

        centre = (p + z²/2n) / (1 + z²/n),   half width = z/(1 + z²/n) · sqrt(p(1 − p)/n + z²/4n²)

    Args:
      successes: 0..trials.
      trials: n > 0; both may be fractional (an effective number of trials).

    Returns:
      (low, high) in [0, 1].

    Raises:
      ValueError: no trials, or successes outside 0..trials.
    """
    if not trials > 0 or not 0 <= successes <= trials:
        raise ValueError(f"successes={successes}, trials={trials}: needs trials > 0 and successes in 0..trials")
    p = successes / trials
    scale = 1 + _Z**2 / trials
    centre = (p + _Z**2 / (2 * trials)) / scale
    half = _Z / scale * math.sqrt(p * (1 - p) / trials + _Z**2 / (4 * trials**2))
    # At 0 and 1 the end is exact; the formula leaves a rounding error there.
    return (0.0 if p == 0 else max(0.0, centre - half)), (1.0 if p == 1 else min(1.0, centre + half))


def rate_interval(outcomes: np.ndarray | Sequence) -> Interval:
    """A success rate with its interval over rooms.

        p = mean of the room means m_i,   n_eff = p(1 − p) / (Σ (m_i − p)² / N²),   Wilson on n_eff trials

    With one sample a room n_eff = N, the plain Wilson interval. With k samples it lies between N (samples of a room
    always agree) and N k (they are independent).

    Args:
      outcomes: [N] or [N, k] of 0 and 1: N rooms, k samples of each.

    Raises:
      ValueError: no outcomes, or one that is neither 0 nor 1.
    """
    table = _table(outcomes)
    if not np.isin(table, (0.0, 1.0)).all():
        raise ValueError("outcomes of a rate must be 0 or 1")
    rooms, samples = table.shape
    means = table.mean(axis=1)
    p = float(means.mean())
    variance = float(((means - p) ** 2).sum()) / rooms**2
    # Rooms that all have the same mean show no spread: at 0 or 1 they count once each, in between fully.
    effective = rooms if p in (0.0, 1.0) else p * (1 - p) / variance if variance > 0 else rooms * samples
    effective = min(effective, rooms * samples)
    low, high = wilson_interval(p * effective, effective)
    return Interval(p, low, high, rooms, rooms * samples)


def mean_interval(values: np.ndarray | Sequence) -> Interval:
    """A mean with its t interval over rooms.

        mean ± t_{0.975, N−1} · s / sqrt(N),   s² = Σ (m_i − mean)² / (N − 1)   over the room means m_i

    Args:
      values: [N] or [N, k] of finite numbers: N rooms, k samples of each.

    Raises:
      ValueError: no values, or one that is not finite.
    """
    table = _table(values)
    rooms = table.shape[0]
    means = table.mean(axis=1)
    mean = float(means.mean())
    if rooms == 1:
        return Interval(mean, mean, mean, 1, table.size)
    half = float(special.stdtrit(rooms - 1, 0.975)) * float(means.std(ddof=1)) / math.sqrt(rooms)
    return Interval(mean, mean - half, mean + half, rooms, table.size)


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """The unbiased estimate of "at least one of k samples succeeds" (Chen et al. 2021, eq. 1).

        1 − C(n − c, k) / C(n, k)

    k = 1 gives c / n, k = n gives 1 where c > 0 and 0 where not.

    Args:
      samples: n drawn.
      successes: c of them succeeded.
      k: 1..n.

    Raises:
      ValueError: k or c out of range.
    """
    if not 1 <= k <= samples or not 0 <= successes <= samples:
        raise ValueError(f"samples={samples}, successes={successes}, k={k}: needs 1 <= k <= n and 0 <= c <= n")
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def pass_at_k_interval(outcomes: np.ndarray | Sequence, k: int) -> Interval:
    """pass@k averaged over rooms, with its interval over rooms.

    Args:
      outcomes: [N, n] of 0 and 1: N rooms, n samples of each.
      k: 1..n.

    Raises:
      ValueError: k out of range, or an outcome that is neither 0 nor 1.
    """
    table = _table(outcomes)
    rate_interval(table)  # refuses what is no outcome
    rooms, samples = table.shape
    estimates = np.array([pass_at_k(samples, int(row.sum()), k) for row in table])
    if np.isin(estimates, (0.0, 1.0)).all():  # each room is one success or failure
        low, high = wilson_interval(float(estimates.sum()), rooms)
        return Interval(float(estimates.mean()), low, high, rooms, table.size)
    interval = mean_interval(estimates)
    return dataclasses.replace(
        interval, low=max(0.0, interval.low), high=min(1.0, interval.high), samples=int(table.size)
    )


def _table(values: np.ndarray | Sequence) -> np.ndarray:
    table = np.asarray(values, np.float64)
    if table.ndim == 1:
        table = table[:, None]
    if table.ndim != 2 or table.size == 0:
        raise ValueError(f"needs [N] or [N, k] with at least one entry, got shape {list(np.shape(values))}")
    if not np.isfinite(table).all():
        raise ValueError("values must be finite")
    return table

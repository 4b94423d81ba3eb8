"""From the sums of micro-batches and updates to the metrics of a training step.

Every mean is a sum over what was counted divided by the count, taken once: never a mean of means.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from turnppo_jax.training.batching import BatchShape, PackingStats
from turnppo_jax.training.mismatch import SUMS

Sums = Mapping[str, Any]  # a number or, where the name ends in _by_turn, a vector over the index of a turn

# metric: (sum, count)
_MEANS = {
    "policy/clip_fraction_turn": ("clip_fraction_turn", "num_turns"),
    "policy/clip_fraction_token": ("clip_fraction_token", "num_tokens"),
    "policy/clip_fraction_positive": ("clip_fraction_positive", "num_entries"),
    "policy/clip_fraction_negative": ("clip_fraction_negative", "num_entries"),
    "policy/dual_clip_fraction": ("dual_clip_fraction", "num_entries"),
    "policy/approx_kl": ("approx_kl", "num_tokens"),
    "policy/ref_kl": ("ref_kl", "num_tokens"),
    "policy/clip_fraction_sequence": ("clip_fraction_sequence", "num_sequences"),
    "policy/imitation_logprob": ("imitation_logprob", "imitation_tokens"),
    "policy/clip_bias_scale": ("clip_bias_scale", "actor_applied"),
    "policy/loss": ("policy_loss", "actor_applied"),
    "value/loss": ("value_loss", "critic_applied"),
    "value/clip_fraction": ("value_clip_fraction", "value_num_entries"),
    "value/error_mean": ("value_error_mean", "value_num_entries"),
    "optim/grad_norm": ("actor_grad_norm", "actor_applied"),
    "optim/grad_norm_critic": ("critic_grad_norm", "critic_applied"),
    "optim/update_rms": ("actor_update_rms", "actor_applied"),
    "optim/update_rms_critic": ("critic_update_rms", "critic_applied"),
}


def join_updates(updates: Sequence[Sums]) -> dict[str, float]:
    """Metrics over all updates of a training step; those whose count is 0 are left out."""
    total: dict[str, Any] = {}
    for sums in updates:
        for name, value in sums.items():
            value = np.asarray(value, np.float64)
            total[name] = max(total.get(name, 0.0), value) if name.endswith("_max") else total.get(name, 0.0) + value
    metrics = {
        metric: float(total[name] / total[count])
        for metric, (name, count) in _MEANS.items()
        if name in total and total.get(count, 0.0) > 0
    }
    if total.get("num_turns", 0.0) > 0:
        metrics["policy/turn_log_ratio_std"] = _log_ratio_std(total)
        if total.get("num_sequences", 0.0) > 0:
            metrics["policy/sequence_log_ratio_std"] = _log_ratio_std(total, "sequence")
        metrics["policy/turn_log_ratio_max"] = float(total["turn_log_ratio_max"])
        metrics["policy/turn_log_ratio_std_first_minibatch"] = _log_ratio_std(updates[0])
    for model in ("actor", "critic"):
        if f"{model}_applied" in total:
            metrics[f"optim/steps_{model}"] = float(total[f"{model}_applied"])
            metrics[f"optim/skipped_{model}"] = float(total[f"{model}_skipped"])
    if "turns_by_turn" in total:
        turns = total["turns_by_turn"]
        played = np.maximum(turns, 1.0)
        mean = total["log_ratio_by_turn"] / played
        variance = np.maximum(total["log_ratio_square_by_turn"] / played - np.square(mean), 0.0)
        metrics |= by_turn("log_ratio_mean", mean, turns) | by_turn("log_ratio_std", np.sqrt(variance), turns)
    return metrics


def by_turn(name: str, values: np.ndarray, counts: np.ndarray) -> dict[str, float]:
    """`by_turn/<name>_<k>` for every index of a turn, from 1, that somebody played."""
    return {f"by_turn/{name}_{k + 1}": float(values[k]) for k in range(len(values)) if counts[k] > 0}


def scoring_metrics(scored: Sequence[Sums]) -> dict[str, float]:
    """Entropy, and how far sampler and learner lie apart, over what was scored.

    Entropy, gap and divergence are means over sampled tokens, the share of low entropy is that of tokens below
    `sums.LOW_ENTROPY`; importance weights (as bounded, at the config's level)
    means over tokens, turns or trajectories. importance_ess is their effective sample size as a share of their number,
    (Σ m)² / (n Σ m²), from above 0 to 1; it is left out where every weight is 0.

    Args:
      scored: sums of the scoring pass by minibatch, or of the first update where there is no such pass: later ones
        would measure what the updates have changed.
    """
    tokens = sum(float(sums.get("num_tokens", 0.0)) for sums in scored)
    if not tokens or "gap_sum" not in scored[0]:
        return {}
    total = {name: sum(float(sums[name]) for sums in scored) for name in SUMS}
    entropies, counts = (sum(np.asarray(sums[f"{name}_by_turn"]) for sums in scored) for name in ("entropy", "tokens"))
    units, squares = total["importance_units"], total["importance_square_sum"]
    shares = {}
    if squares > 0:
        # Equal weights give 1 up to rounding, which must not say more.
        shares["sampler/importance_ess"] = min(total["importance_sum"] ** 2 / (units * squares), 1.0)
    return (
        shares
        | by_turn("entropy_mean", entropies / np.maximum(counts, 1.0), counts)
        | {
            "sampler/importance_mean": total["importance_sum"] / units,
            "sampler/importance_cut_share": total["importance_cut"] / units,
            "sampler/kl_k1": total["sampler_kl_k1"] / tokens,
            "sampler/kl_k3": total["sampler_kl_k3"] / tokens,
            "policy/entropy": sum(float(sums["entropy_sum"]) for sums in scored) / tokens,
            "policy/low_entropy_share": sum(float(sums["low_entropy_tokens"]) for sums in scored) / tokens,
            "sampler/logprob_gap_mean": sum(float(sums["gap_sum"]) for sums in scored) / tokens,
            "sampler/logprob_gap_max": max(float(sums["gap_max"]) for sums in scored),
        }
    )


def join_packing(
    stats: Sequence[PackingStats], critic_stats: Sequence[PackingStats], shape: BatchShape
) -> dict[str, float]:
    """How the rows were used; the critic's apart where its rows are trimmed."""
    tokens, rows = (sum(getattr(s, name) for s in stats) for name in ("tokens", "rows"))
    micro_batches = sum(s.num_micro for s in stats)
    area = micro_batches * shape.micro_rows * shape.tokens
    metrics = {
        "batch/rows": rows,
        "batch/micro_batches": micro_batches,
        "batch/tokens": tokens,
        "batch/sampled_tokens": sum(s.sampled for s in stats),
        "batch/turns": sum(s.turns for s in stats),
        "batch/padding_share": 1.0 - tokens / area if area else 0.0,
        "batch/empty_turns": sum(s.empty_turns for s in stats),
        "batch/empty_trajectories": sum(s.empty_trajectories for s in stats),
        "batch/lost_reward": sum(s.lost_reward for s in stats),
        "batch/missing_bootstraps": sum(s.missing_bootstraps for s in stats),
    }
    if critic_stats:
        metrics["batch/critic_tokens"] = sum(s.tokens for s in critic_stats)
        metrics["batch/critic_micro_batches"] = sum(s.num_micro for s in critic_stats)
    return {name: float(value) for name, value in metrics.items()}


def _log_ratio_std(sums: Sums, unit: str = "turn") -> float:
    """Standard deviation of the log-ratios of turns or sequences from their sums."""
    count = float(sums.get(f"num_{unit}s", 0.0))
    if not count:
        return 0.0
    mean = float(sums[f"{unit}_log_ratio_mean"]) / count
    return max(float(sums[f"{unit}_log_ratio_square_mean"]) / count - mean * mean, 0.0) ** 0.5

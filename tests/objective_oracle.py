"""Policy objectives, their gradients and importance weights as float64 double loops."""

import numpy as np


def unit_of(level, b, t, turn_ids, trajectory_ids):
    """Positions of the row whose log-ratios make the ratio of token t."""
    row, owner = turn_ids[b], trajectory_ids[b]
    if level == "token":
        return [t]
    if level == "turn":
        return [s for s in range(len(row)) if row[s] == row[t]]
    return [s for s in range(len(row)) if row[s] >= 0 and owner[row[s]] == owner[row[t]]]


def objective(
    logprobs, old, turn_ids, trajectory_ids, advantages, w, m, *, ratio_level, advantage_level, pooling, low, high,
    dual=None, name="clip",
):  # fmt: skip
    """(loss, gradient by logprobs [B, T], Σ w m A ρ over what the clip cuts)."""
    logprobs, old = np.asarray(logprobs, np.float64), np.asarray(old, np.float64)
    loss, bias, gradient = 0.0, 0.0, np.zeros(logprobs.shape)
    by_turn = advantage_level == "turn" and ratio_level != "token"
    for b, row in enumerate(turn_ids):
        seen = set()
        for t, turn in enumerate(row):
            if turn < 0 or (by_turn and turn in seen):
                continue
            seen.add(turn)
            entry = (b, turn) if by_turn else (b, t)
            advantage = advantages[b][turn] if advantage_level == "turn" else advantages[b][t]
            unit = unit_of(ratio_level, b, t, turn_ids, trajectory_ids)
            share = 1.0 / len(unit) if pooling == "geometric_mean" else 1.0
            ratio = np.exp(share * sum(logprobs[b, s] - old[b, s] for s in unit))
            log_prob = share * sum(logprobs[b, s] for s in unit)
            near = min(max(ratio, 1 - low), 1 + high)
            cut = (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)
            if name == "clip":
                value, slope = max(-advantage * ratio, -advantage * near), 0.0 if cut else -advantage * ratio
                if dual is not None and advantage < 0 and ratio > dual:
                    value, slope = -advantage * dual, 0.0
                bias += w[entry] * m[entry] * advantage * ratio if cut else 0.0
            elif name == "cispo":
                value, slope = -advantage * near * log_prob, -advantage * near
            else:
                value, slope = -advantage * log_prob, -advantage
            loss += w[entry] * m[entry] * value
            for s in unit:
                gradient[b, s] += w[entry] * m[entry] * slope * share
    return loss, gradient, bias


def importance(old, behavior, turn_ids, trajectory_ids, level, pooling, mode, low, high):
    """(weights [B, T] by token, ratio by unit, weight by unit); a trajectory's unit spans rows."""
    units = {}
    for b, row in enumerate(turn_ids):
        for t, turn in enumerate(row):
            if turn >= 0:
                key = {"token": (b, t), "turn": (b, turn), "sequence": trajectory_ids[b][turn]}[level]
                units.setdefault(key, []).append((b, t))
    weights, ratios, bounded = np.zeros(np.shape(turn_ids)), [], []
    for places in units.values():
        total = sum(float(old[p]) - float(behavior[p]) for p in places)
        ratio = np.exp(np.clip(total / (len(places) if pooling == "geometric_mean" else 1), -20, 20))
        inside = low <= ratio <= high
        weight = np.clip(ratio, low, high) if mode == "truncate" else ratio * inside
        ratios.append(ratio)
        bounded.append(weight)
        for p in places:
            weights[p] = weight
    return weights, np.array(ratios), np.array(bounded)

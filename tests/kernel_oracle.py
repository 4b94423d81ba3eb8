"""Double loops in float64 that say what the kernels must give, and random ragged rows to try them on."""

import numpy as np


def ragged_rows(rng, num_rows=4, length=24, num_turns=5):
    """turn_ids [B, T] and turn_mask [B, K] of rows with gaps, turns of 1 to 4 tokens, and one row without a turn."""
    turn_ids = np.full((num_rows, length), -1, np.int32)
    turn_mask = np.zeros((num_rows, num_turns), bool)
    for row in range(num_rows - 1):
        column = 0
        for turn in range(rng.integers(1, num_turns + 1)):
            column += rng.integers(1, 3)
            size = rng.integers(1, 5)
            if column + size > length:
                break
            turn_ids[row, column : column + size] = turn
            turn_mask[row, turn] = True
            column += size
    return turn_ids, turn_mask


def poison(x, mask, rng):
    """`x` with NaN, infinities and large numbers wherever `mask` is not set."""
    garbage = rng.choice(np.array([np.nan, np.inf, -np.inf, 1e30, -7.0]), size=np.shape(x))
    return np.where(mask, x, garbage).astype(np.asarray(x).dtype)


def gae(rewards, values, mask, gamma, gae_lambda, ends=None, bootstrap=None):
    """(advantages, returns) by the recursion as printed, row by row from the end; `ends` [B, T] marks the last."""
    advantages, returns = np.zeros(np.shape(rewards)), np.zeros(np.shape(rewards))
    for b in range(len(rewards)):
        positions = [t for t in range(len(rewards[b])) if mask[b][t]]
        next_value = next_advantage = 0.0
        for t in reversed(positions):
            last = t == positions[-1] if ends is None else ends[b][t]
            if last:
                next_value = 0.0 if bootstrap is None else bootstrap[b][t]
                next_advantage = 0.0
            delta = rewards[b][t] + gamma * next_value - values[b][t]
            next_advantage = delta + gamma * gae_lambda * next_advantage
            next_value = values[b][t]
            advantages[b, t], returns[b, t] = next_advantage, next_advantage + values[b][t]
    return advantages, returns


def segment_ends(mask, segments):
    """[B, T] bool: the last masked-in position of each segment."""
    ends = np.zeros(np.shape(mask), bool)
    for b in range(len(mask)):
        for segment in set(segments[b]) - {0}:
            inside = [t for t in range(len(mask[b])) if mask[b][t] and segments[b][t] == segment]
            if inside:
                ends[b, inside[-1]] = True
    return ends


def weights(turn_ids, turn_mask, level, normalizer, trajectory_ids):
    """The table of loss weights, by counting."""
    tokens = {}
    for b in range(len(turn_ids)):
        for turn in turn_ids[b]:
            if turn >= 0 and turn_mask[b][turn]:
                tokens[b, turn] = tokens.get((b, turn), 0) + 1
    owner = {turn: trajectory_ids[turn[0]][turn[1]] for turn in tokens}
    n, num_turns, num_trajectories = sum(tokens.values()), len(tokens), len(set(owner.values()))
    of_turn = np.zeros(np.shape(turn_mask))
    for turn, n_k in tokens.items():
        n_i = sum(tokens[other] for other in tokens if owner[other] == owner[turn])
        turns_i = sum(owner[other] == owner[turn] for other in tokens)
        total = {
            "trajectory_tokens": num_trajectories * n_i,
            "tokens": n,
            "turns": num_turns,
            "trajectories": num_trajectories * turns_i,
        }[normalizer]
        spread = n_k if level == "token" and normalizer in ("turns", "trajectories") else 1
        of_turn[turn] = 1.0 / (total * spread)
    if level == "turn":
        return of_turn
    return np.array(
        [[of_turn[b][turn] if turn >= 0 else 0.0 for turn in turn_ids[b]] for b in range(len(turn_ids))]
    ).reshape(np.shape(turn_ids))


def policy_loss(logprobs, old, turn_ids, advantages, w, ratio_level, advantage_level, pooling, low, high, dual):
    """The clipped objective, entry by entry."""

    def log_ratio(b, turn):
        ratios = [logprobs[b][t] - old[b][t] for t in range(len(turn_ids[b])) if turn_ids[b][t] == turn]
        return sum(ratios) / (len(ratios) if pooling == "geometric_mean" else 1)

    def entry(ratio, advantage):
        ratio = np.exp(np.clip(ratio, -20, 20))
        worst = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
        return min(worst, -advantage * dual) if dual and advantage < 0 else worst

    total = 0.0
    for b in range(len(turn_ids)):
        if ratio_level == advantage_level == "turn":
            for turn in sorted(set(turn_ids[b]) - {-1}):
                if w[b][turn]:
                    total += w[b][turn] * entry(log_ratio(b, turn), advantages[b][turn])
            continue
        for t, turn in enumerate(turn_ids[b]):
            if turn >= 0 and w[b][t]:
                ratio = log_ratio(b, turn) if ratio_level == "turn" else logprobs[b][t] - old[b][t]
                advantage = advantages[b][turn] if advantage_level == "turn" else advantages[b][t]
                total += w[b][t] * entry(ratio, advantage)
    return total

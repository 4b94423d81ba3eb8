"""Double loops in float64 for the critic-free advantages and the variants of GAE, and ragged tables to try them on."""

import numpy as np

from tests import kernel_oracle


def ragged_table(seed, num_trajectories=11, max_turns=5, num_groups=3, num_anchors=3):
    """Tables of trajectories of 0 to `max_turns` turns; one line belongs to no group, one is alone in its group."""
    rng = np.random.default_rng(seed)
    shape = num_trajectories, max_turns
    lengths = rng.integers(1, max_turns + 1, size=num_trajectories)
    lengths[:2] = max_turns, 0
    mask = np.arange(max_turns) < lengths[:, None]
    groups = rng.integers(0, num_groups, size=num_trajectories)
    groups[2], groups[3] = -1, num_groups
    rewards = rng.normal(size=shape).astype(np.float32)
    anchors = rng.integers(0, num_anchors, size=shape)
    anchors[rng.random(shape) < 0.1] = -1
    return {
        "scores": rng.normal(size=num_trajectories).astype(np.float32),
        "turn_rewards": rewards,
        "turn_mask": mask,
        "group_ids": groups,
        "anchor_ids": anchors,
    }


def poisoned(table, seed=0):
    """The table with garbage wherever nothing may be read: under the turn mask, and scores of lines without group."""
    rng = np.random.default_rng(seed)
    mask = table["turn_mask"]
    anchors = np.where(mask, table["anchor_ids"], rng.integers(-3, 9, size=mask.shape))
    return table | {
        "turn_rewards": kernel_oracle.poison(table["turn_rewards"], mask, rng),
        "scores": kernel_oracle.poison(table["scores"], table["group_ids"] >= 0, rng),
        "anchor_ids": anchors,
    }


def entries(mask):
    return list(zip(*np.nonzero(mask)))


def returns(rewards, mask, gamma):
    """[M, K]: each turn's reward and the discounted rewards of the masked-in turns after it."""
    result = np.zeros(np.shape(rewards))
    for m, k in entries(mask):
        later = [j for j in range(k, len(mask[m])) if mask[m][j]]
        result[m, k] = sum(gamma**distance * float(rewards[m][j]) for distance, j in enumerate(later))
    return result


def relative(x, members, scale):
    """x against the mean of `members`, by their sample deviation; 0 for one member or no spread."""
    members = np.array(members, np.float64)
    if len(members) < 2 or members.max() == members.min():
        return 0.0
    return (x - members.mean()) / (members.std(ddof=1) if scale == "std" else 1.0)


def group(scores, groups, scale):
    """[M]: score against the scores of the same non-negative group."""
    return np.array(
        [
            relative(s, [t for t, h in zip(scores, groups) if h == g], scale) if g >= 0 else 0.0
            for s, g in zip(scores.astype(np.float64), groups)
        ]
    )


def whitened(x, mask):
    inside = np.array([x[i] for i in entries(mask)], np.float64)
    result = np.zeros(np.shape(x))
    for i in entries(mask):
        result[i] = (x[i] - inside.mean()) / inside.std(ddof=1)
    return result


def by_turn_index(x, mask, groups, scale, baseline="mean", absent="skip"):
    """[M, K]: entry against those of the same column and group."""
    result = np.zeros(np.shape(x))
    for m, k in entries(mask):
        others = [
            j for j in range(len(x)) if groups[j] == groups[m] and (mask[j][k] or (absent == "zero" and mask[j].any()))
        ]
        members = [float(x[j][k]) if mask[j][k] else 0.0 for j in others]
        if groups[m] < 0:
            continue
        result[m, k] = relative(float(x[m][k]), members, scale)
        if baseline == "leave_one_out" and len(members) > 1:
            result[m, k] *= len(members) / (len(members) - 1)
    return result


def history(anchors, mask, m, k, length):
    """The last `length` observations up to turn k of trajectory m; None where there are fewer or one is no anchor."""
    seen = [int(anchors[m][j]) for j in range(k + 1) if mask[m][j]][-length:]
    return tuple(seen) if len(seen) == length and min(seen) >= 0 else None


def step(x, mask, groups, anchors, length, scale):
    """[M, K]: entry against those of the same group with the same last `length` observations."""
    result = np.zeros(np.shape(x))
    for m, k in entries(mask):
        own = history(anchors, mask, m, k, length)
        if groups[m] < 0 or own is None:
            continue
        members = [
            x[i, j] for i, j in entries(mask) if groups[i] == groups[m] and history(anchors, mask, i, j, length) == own
        ]
        result[m, k] = relative(x[m, k], members, scale)
    return result


def hierarchy(x, mask, groups, anchors, history_length, alpha, scale, scores=None):
    """[M, K]: weighted mean over the levels that are not 0 (1e-9: float64 rounding of a return at the mean)."""
    levels = {h: step(x, mask, groups, anchors, h, scale) for h in range(1, history_length + 2)}
    if scores is not None:
        levels[0] = np.where(mask, group(scores, groups, scale)[:, None], 0.0)
    result = np.zeros(np.shape(x))
    for m, k in entries(mask):
        said = {h: a[m, k] for h, a in levels.items() if abs(a[m, k]) > 1e-9}
        if said:
            weights = {h: (h + 1.0) ** alpha for h in said}
            result[m, k] = sum(weights[h] * said[h] for h in said) / sum(weights.values())
    return result


def bi_level(rewards, values, turn_ids, gamma, turn_gamma, lam, turn_lam, anchor, ends=None, bootstrap=None):
    """(advantages, returns) [B, T], token by token from the end of each row."""
    advantages, targets = np.zeros(np.shape(values)), np.zeros(np.shape(values))
    for b, ids in enumerate(turn_ids):
        turns = [(k, [t for t in range(len(ids)) if ids[t] == k]) for k in range(len(rewards[b]))]
        turns = [(k, tokens) for k, tokens in turns if tokens]
        next_value = next_advantage = 0.0
        for number, (k, tokens) in reversed(list(enumerate(turns))):
            if number == len(turns) - 1 if ends is None else ends[b][k]:
                next_value, next_advantage = (0.0 if bootstrap is None else bootstrap[b][k]), 0.0
            value = float(values[b][tokens[0 if anchor == "first" else -1]])
            next_advantage = rewards[b][k] + turn_gamma * next_value - value + turn_gamma * turn_lam * next_advantage
            next_value = value
            carried, following = 0.0, 0.0
            for t in reversed(tokens):
                reward = next_advantage + value if t == tokens[-1] else 0.0
                carried = reward + gamma * following - values[b][t] + gamma * lam * carried
                following = values[b][t]
                advantages[b, t], targets[b, t] = carried, carried + values[b][t]
    return advantages, targets

"""A key/value cache by slot and position in numpy, and attention to it in float64 by loops."""

import numpy as np


def blocked(x, block, lanes, joined=1):
    """[L, S, Nkv, C, H] -> [L, C / P, S, Nkv / J, P, lanes]: `joined` heads side by side, then zeros."""
    layers, slots, heads, capacity, head_dim = x.shape
    x = x.reshape(layers, slots, heads // joined, joined, capacity // block, block, head_dim)
    x = x.transpose(0, 4, 1, 2, 5, 3, 6).reshape(layers, capacity // block, slots, heads // joined, block, -1)
    return np.pad(x, [(0, 0)] * 5 + [(0, lanes - x.shape[-1])])


def positions_of(starts, counts, width):
    """[R, width] int32: `counts[r]` positions from `starts[r]` on, then -1."""
    column = np.arange(width)
    return np.where(column < np.asarray(counts)[:, None], np.asarray(starts)[:, None] + column, -1).astype(np.int32)


def spoil_beyond(x, slots, positions):
    """[L, S, Nkv, C, H] with NaN wherever no row of the call looks."""
    x, ends = x.copy(), {}
    for slot, row in zip(slots, positions):
        ends[slot] = row.max() + 1
    for slot in range(x.shape[1]):
        x[:, slot, :, ends.get(slot, 0) :] = np.nan
    return x


def attend(k, v, slots, positions, q):
    """[R, Q, N, H] float64 of one layer's k and v [S, Nkv, C, H]; zeros at padding and in dummy rows."""
    k, v, q = (np.asarray(x, np.float64) for x in (k, v, q))
    out = np.zeros(q.shape)
    group = q.shape[2] // k.shape[1]
    for row, slot in enumerate(slots):
        for query, position in enumerate(positions[row]):
            if slot < 0 or position < 0:
                continue
            for head in range(q.shape[2]):
                keys, values = (x[slot, head // group, : position + 1] for x in (k, v))
                scores = keys @ q[row, query, head] / np.sqrt(q.shape[3])
                weights = np.exp(scores - scores.max())
                out[row, query, head] = weights @ values / weights.sum()
    return out

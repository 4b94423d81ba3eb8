"""A decoder in numpy float64 with loops over tokens and heads, from the published formulas: the oracle of the tests."""

import numpy as np


def forward(params, sizes, tokens, positions):
    """Hidden states [T, D] after the final norm and logits [T, V] of one document, float64."""
    params = _wide(params)
    embedding = params["embed"]["embedding"]
    x = embedding[np.asarray(tokens)]
    for index in range(sizes.num_layers):
        x = _layer(_take(params["layers"], index), sizes, x, positions)
    hidden = np.stack([_norm(row, params["final_norm"]["scale"], sizes) for row in x])
    head = embedding if sizes.tie_word_embeddings else params["lm_head"]["kernel"]
    logits = hidden @ head.T
    logits[:, sizes.num_token_ids :] = -np.inf
    return hidden, logits


def _layer(layer, sizes, x, positions):
    attention, mlp = layer["attention"], layer["mlp"]
    h = np.stack([_norm(row, layer["attention_norm"]["scale"], sizes) for row in x])
    queries, keys, values = (_project(h, attention[name]) for name in "qkv")  # [T][heads, H]
    if sizes.qk_norm:
        queries = [[_norm(head, attention["q_norm"]["scale"], sizes) for head in heads] for heads in queries]
        keys = [[_norm(head, attention["k_norm"]["scale"], sizes) for head in heads] for heads in keys]
    queries = [[_rotate(head, p, sizes) for head in heads] for heads, p in zip(queries, positions)]
    keys = [[_rotate(head, p, sizes) for head in heads] for heads, p in zip(keys, positions)]
    x = x.copy()
    for t in range(len(x)):
        for head in range(sizes.num_heads):
            shared = head // (sizes.num_heads // sizes.num_kv_heads)
            scores = np.array([queries[t][head] @ keys[s][shared] for s in range(t + 1)]) / np.sqrt(sizes.head_dim)
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            mixed = sum(weight * values[s][shared] for s, weight in enumerate(weights))
            x[t] += mixed @ attention["o"]["kernel"][head]
    for t in range(len(x)):
        h = _norm(x[t], layer["mlp_norm"]["scale"], sizes)
        gate = h @ mlp["gate"]["kernel"]
        x[t] += (gate / (1 + np.exp(-gate)) * (h @ mlp["up"]["kernel"])) @ mlp["down"]["kernel"]
    return x


def _project(h, weights):
    out = np.einsum("td,dnh->tnh", h, weights["kernel"])
    return out + weights["bias"] if "bias" in weights else out


def _norm(row, scale, sizes):
    return row / np.sqrt(np.mean(row**2) + sizes.rms_norm_eps) * scale


def _rotate(head, position, sizes):
    """Pair (i, i + H/2) is turned by position * theta ** (-2 i / H)."""
    out, half = np.empty_like(head), sizes.head_dim // 2
    for i in range(half):
        angle = position * sizes.rope_theta ** (-2 * i / sizes.head_dim)
        out[i] = head[i] * np.cos(angle) - head[i + half] * np.sin(angle)
        out[i + half] = head[i + half] * np.cos(angle) + head[i] * np.sin(angle)
    return out


def _wide(tree):
    return {k: _wide(v) for k, v in tree.items()} if isinstance(tree, dict) else np.asarray(tree, np.float64)


def _take(tree, index):
    return {k: _take(v, index) for k, v in tree.items()} if isinstance(tree, dict) else tree[index]

"""What a Pallas kernel computes and moves, by formula: neither its traced body nor the compiled text says it.

The grid of a kernel does not tell either: blocks above the diagonal of causal attention are grid points that do
nothing, and the grid of the ragged kernel is as long as the cache is live.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from turnppo_jax.models.ragged_write import tile_positions


def costs(live_tokens: float = 0.0) -> Callable[[Any], tuple[float, float]]:
    """The costs of the package's kernels, for `flops.traced_flops`.

    Args:
      live_tokens: that each slot of the cache holds.

    Returns:
      pallas_call equation -> (grid points that compute, bytes through main memory).
    """

    def of_equation(equation: Any) -> tuple[float, float]:
        name = equation.params["name"]
        if name.startswith("splash"):
            return _splash(equation)
        if name == "ragged_attention":
            return _ragged_attention(equation, live_tokens)
        if name == "ragged_write":
            return _ragged_write(equation)
        return math.prod(equation.params["grid_mapping"].grid), float(sum(map(_bytes, _arrays(equation))))

    return of_equation


def _splash(equation: Any) -> tuple[float, float]:
    """Causal attention of whole rows: blocks of queries and keys on and below the diagonal, all heads and rows.

    A block of the inner axis is fetched for every block of the outer one; what stays in place moves once.
    """
    across = "dkv" in equation.params["name"]  # loops over queries inside keys; the others over keys inside queries
    grid = equation.params["grid_mapping"].grid[-3:]  # rows, where there are several, stand before
    queries = next(x for x in _arrays(equation) if _is_matrices(x))  # [B, N, T, H], without B where it is 1
    *rows_heads, length, head_dim = queries.shape
    query_blocks, key_blocks = (grid[2], grid[0]) if across else (grid[1], grid[2])
    side = length // key_blocks, length // query_blocks
    pairs = sum(key * side[0] < (query + 1) * side[1] for query in range(query_blocks) for key in range(key_blocks))
    inner = side[1] if across else side[0]
    # Two arrays follow the inner axis: keys and values, or queries and the gradient of the output.
    fetched = 2 * math.prod(rows_heads) * pairs * inner * head_dim * queries.dtype.itemsize
    results = (x for x in _arrays(equation, outputs=True) if _is_matrices(x) and x.shape[-2] == length)
    in_place = 2 * _bytes(queries) + sum(map(_bytes, results))
    return math.prod(rows_heads) * pairs, float(fetched + in_place)


def _ragged_attention(equation: Any, live_tokens: float) -> tuple[float, float]:
    """Attention to the live blocks of a cache [L, C / P, S, stacks, P, H]; queries [R, stacks, M, H]."""
    cache = _cache(equation)
    queries = next(x for x in _arrays(equation) if len(x.shape) == 4)
    _, num_blocks, _, stacks, block, lanes = cache.shape
    blocks = min(num_blocks, math.ceil(max(live_tokens, 1) / block))
    fetched = 2 * blocks * stacks * block * lanes * cache.dtype.itemsize
    return queries.shape[0] * blocks, float(queries.shape[0] * fetched + 2 * _bytes(queries))


def _ragged_write(equation: Any) -> tuple[float, float]:
    """New keys and values [R, stacks, Q, H] into a cache: whole tiles of memory are read, merged and written back.

    Of several positions there is a tile of padding before and behind in the argument, which no position needs.
    """
    cache = _cache(equation)
    new = [x for x in _arrays(equation) if len(x.shape) == 4]
    rows, stacks, width, lanes = new[0].shape
    tile = tile_positions(cache.dtype)
    tiles = 1 if width == 1 else (width - tile) // tile
    touched = 2 * rows * stacks * tiles * tile * lanes * cache.dtype.itemsize
    return 0.0, float(2 * touched + sum(map(_bytes, new)))


def _cache(equation: Any) -> Any:
    return next(x for x in _arrays(equation) if len(x.shape) == 6)


def _is_matrices(x: Any) -> bool:
    return len(x.shape) >= 3 and jnp.issubdtype(x.dtype, jnp.floating)


def _arrays(equation: Any, *, outputs: bool = False) -> list[Any]:
    return [x.aval for x in (equation.outvars if outputs else equation.invars) if hasattr(x.aval, "shape")]


def _bytes(x: Any) -> int:
    return math.prod(x.shape) * x.dtype.itemsize

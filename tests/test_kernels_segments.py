"""Turn sums, broadcasts, turn ratios, masked means and whitening."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import kernel_oracle
from turnppo_jax import kernels

# float32 sums of at most a few dozen numbers of size 1 differ from float64 by some 1e-7 each.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def test_golden():
    turn_ids = np.array([[-1, 0, 0, -1, 1, -1], [-1, -1, 0, 2, 2, 2]])
    x = np.array([[9, 1, 2, 9, 4, 9], [9, 9, 1, 1, 2, 3.0]])
    np.testing.assert_array_equal(kernels.sum_by_turn(x, turn_ids, 3), [[3, 4, 0], [1, 0, 6]])
    y = np.array([[10, 20, 30], [1, 2, 3.0]])
    np.testing.assert_array_equal(kernels.broadcast_turns(y, turn_ids), [[0, 10, 10, 0, 20, 0], [0, 0, 1, 3, 3, 3]])
    np.testing.assert_allclose(
        kernels.turn_log_ratios(x, x - 0.5, turn_ids, 3), [[1.0, 0.5, 0], [0.5, 0, 1.5]], **TOLERANCE
    )
    pooled = kernels.turn_log_ratios(x, x - 0.5, turn_ids, 3, pooling="geometric_mean")
    np.testing.assert_allclose(pooled, [[0.5, 0.5, 0], [0.5, 0, 0.5]], **TOLERANCE)


def test_garbage_changes_neither_values_nor_gradients():
    rng = np.random.default_rng(0)
    turn_ids, _ = kernel_oracle.ragged_rows(rng)
    x, old = rng.normal(size=(2, *turn_ids.shape)).astype(np.float32)

    def value(x, old):
        return jnp.sum(jnp.square(kernels.turn_log_ratios(x, old, turn_ids, 5, pooling="geometric_mean")))

    clean, poisoned = (jax.value_and_grad(value, (0, 1))(a, b) for a, b in ((x, old), _poisoned(x, old, turn_ids, rng)))
    jax.tree.map(np.testing.assert_array_equal, clean, poisoned)
    assert np.abs(clean[1][0]).max() > 0

    used = kernels.sum_by_turn(np.ones(turn_ids.shape), turn_ids, 5) > 0
    y = rng.normal(size=used.shape).astype(np.float32)
    spread = jax.value_and_grad(lambda y: jnp.sum(jnp.sin(kernels.broadcast_turns(y, turn_ids))))
    clean, poisoned = spread(y), spread(kernel_oracle.poison(y, used, rng))
    np.testing.assert_allclose(clean[0], poisoned[0])
    np.testing.assert_array_equal(clean[1], poisoned[1])


def _poisoned(x, old, turn_ids, rng):
    return kernel_oracle.poison(x, turn_ids >= 0, rng), kernel_oracle.poison(old, turn_ids >= 0, rng)


def test_jit_vmap_and_types_give_the_same():
    rng = np.random.default_rng(1)
    turn_ids, _ = kernel_oracle.ragged_rows(rng)
    x = rng.integers(-4, 5, size=turn_ids.shape)  # whole numbers: exact in every type
    want = kernels.sum_by_turn(x.astype(np.float32), turn_ids, 5)
    assert want.dtype == jnp.float32
    np.testing.assert_array_equal(jax.jit(kernels.sum_by_turn, static_argnums=2)(x, turn_ids, 5), want)
    by_row = jax.vmap(lambda x, ids: kernels.sum_by_turn(x[None], ids[None], 5)[0])
    np.testing.assert_array_equal(by_row(x, turn_ids), want)
    for dtype in (np.int32, jnp.bfloat16, np.float16, bool if (x >= 0).all() else np.int8):
        np.testing.assert_array_equal(kernels.sum_by_turn(jnp.asarray(x, dtype), turn_ids, 5), want)


def test_packed_rows_pool_by_turn_not_by_row():
    """Fault 31: the mean of a ratio belongs to its own turn, whoever shares the row."""
    x = np.array([[1.0, 3.0, 10.0, 20.0]])
    pooled = kernels.turn_log_ratios(x, np.zeros((1, 4)), np.array([[0, 0, 1, 1]]), 2, pooling="geometric_mean")
    np.testing.assert_allclose(pooled, [[2.0, 15.0]])


def test_whitening_counts_only_what_is_masked_in():
    """Fault 14, its numbers: advantages 1 and 3 beside six padded zeros."""
    x, mask = np.array([1, 3, 0, 0, 0, 0, 0, 0.0]), np.array([1, 1, 0, 0, 0, 0, 0, 0])
    np.testing.assert_allclose(kernels.whiten(x, mask)[:2], [-0.70710678, 0.70710678], rtol=1e-6)
    np.testing.assert_array_equal(kernels.whiten(x, mask)[2:], 0)
    # reference numbers of algorithms.md 1.5: sample variance over the three turns
    whitened = kernels.whiten(np.array([[7.971945, 8.7317, 10.7]]), np.ones((1, 3)))
    np.testing.assert_allclose(whitened, [[-0.825750, -0.286127, 1.111876]], atol=2e-6)


@pytest.mark.parametrize("values", [[5.0, 9.0, 9.0], [0.1, 0.1, 0.1], [1000.1] * 3, [0.0, 0.0, 0.0]])
def test_one_entry_or_no_spread_is_left_unscaled(values):
    mask = np.array([1, 0, 0]) if len(set(values)) > 1 else np.ones(3)
    x = np.array(values, np.float32)
    np.testing.assert_array_equal(kernels.whiten(x, mask), np.where(mask, x, 0))
    gradient = jax.grad(lambda x: jnp.sum(kernels.whiten(x, mask) * jnp.arange(3)))(x)
    assert np.isfinite(gradient).all()


def test_whitening_under_poison_and_shapes():
    rng = np.random.default_rng(2)
    x, mask = rng.normal(3, 5, size=(4, 7)).astype(np.float32), rng.random((4, 7)) < 0.6
    chosen = x[mask].astype(np.float64)
    want = np.zeros_like(x)
    want[mask] = (chosen - chosen.mean()) / chosen.std(ddof=1)
    got = kernels.whiten(kernel_oracle.poison(x, mask, rng), mask.astype(np.int32))
    np.testing.assert_allclose(got, want, **TOLERANCE)
    weighted = lambda x: jnp.sum(kernels.whiten(x, mask) * np.arange(28).reshape(4, 7))  # noqa: E731
    np.testing.assert_array_equal(jax.grad(weighted)(x), jax.grad(weighted)(kernel_oracle.poison(x, mask, rng)))


def test_empty_masks_give_zero():
    """Fault 1: nothing selected is 0, not a division by zero."""
    x, nothing = np.full((2, 3), np.nan), np.zeros((2, 3))
    assert kernels.masked_mean(x, nothing) == 0
    assert kernels.masked_sum(x, nothing) == 0
    np.testing.assert_array_equal(kernels.whiten(x, nothing), np.zeros((2, 3)))
    np.testing.assert_array_equal(kernels.sum_by_turn(x, np.full((2, 3), -1), 4), np.zeros((2, 4)))


def test_integer_masks_select_and_never_index():
    """Fault 54: a mask of 0 and 1 as integers is a mask."""
    x = np.arange(6.0).reshape(2, 3)
    mask = np.array([[1, 0, 1], [1, 1, 0]])
    assert kernels.whiten(x, mask).shape == (2, 3)
    np.testing.assert_array_equal(kernels.whiten(x, mask), kernels.whiten(x, mask.astype(bool)))
    np.testing.assert_allclose(kernels.masked_mean(x, mask, axis=1), [1.0, 3.5])


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"sum_by_turn: turn_ids has shape \(1, 2\)"):
        kernels.sum_by_turn(np.zeros((1, 3)), np.zeros((1, 2), int), 2)
    with pytest.raises(ValueError, match=r"pooling='mean' is not known; choose one of 'product', 'geometric_mean'"):
        kernels.turn_log_ratios(np.zeros((1, 3)), np.zeros((1, 3)), np.zeros((1, 3), int), 2, pooling="mean")


def test_import_starts_no_device():
    """Fault 45: a program that only imports the kernels has no backend."""
    program = (
        "import turnppo_jax.kernels; from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0

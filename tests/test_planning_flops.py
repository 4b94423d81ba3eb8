"""FLOPs against counts by hand: loops in full, recomputation visible, the program of one chip apart."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from turnppo_jax.planning import hlo
from turnppo_jax.planning.flops import Flops, partitioned_flops, traced_flops
from turnppo_jax.planning.kernel_costs import costs
from turnppo_jax.planning.traffic import memory_bytes

X, W = jnp.ones((8, 16)), jnp.ones((5, 16, 16))
PRODUCT = 2 * 8 * 16 * 16


def layers(x, stack, remat=False):
    def layer(x, w):
        return jnp.sin(x @ w), None

    return jnp.sum(jax.lax.scan(jax.checkpoint(layer, prevent_cse=False) if remat else layer, x, stack)[0])


@pytest.mark.parametrize(
    ("function", "products"),
    [
        (lambda x, w: layers(x, w), 5),
        (jax.grad(layers, argnums=(0, 1)), 5 + 2 * 5),
        # The forward product is made again for sin's derivative.
        (jax.grad(functools.partial(layers, remat=True), argnums=(0, 1)), 2 * 5 + 2 * 5),
        (jax.jit(lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda: x @ w[0] @ w[1], lambda: x)), 2),
        (lambda x, w: jnp.einsum("bi,lij->lbj", x, w), 5),
        (jax.vmap(lambda x, w: x @ w[0], in_axes=(0, None)), 1),
    ],
)
def test_products_by_hand(function, products):
    traced = jax.jit(function).trace(X, W)
    assert traced_flops(traced.jaxpr) == Flops(products=products * PRODUCT)
    # The same from the program that the compiler is given; a conditional runs the branch for true there.
    module = hlo.parse(traced.lower().as_text(dialect="hlo"))
    assert partitioned_flops(module, branch=1) == products * PRODUCT


def test_a_loop_takes_its_iterations_from_the_caller():
    def program(x, w, number):
        return jax.lax.fori_loop(0, number, lambda i, x: layers(x, w) + x @ w[0], x)

    traced = jax.jit(program).trace(X, W, 3)
    with pytest.raises(ValueError, match="while loop holds products"):
        traced_flops(traced.jaxpr)
    assert traced_flops(traced.jaxpr, [3]).total == 3 * 6 * PRODUCT
    module = hlo.parse(traced.lower().as_text(dialect="hlo"))
    assert partitioned_flops(module, [3]) == 3 * 6 * PRODUCT
    # A loop without products needs no number.
    empty = jax.make_jaxpr(lambda x, n: jax.lax.fori_loop(0, n, lambda i, x: x + 1, x))(X, 3)
    assert traced_flops(empty).total == 0


def test_convolutions():
    # 4 images of 10 x 10 x 3, 6 kernels of 3 x 3: 8 x 8 places.
    f = jax.jit(
        lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    )
    traced = f.trace(jnp.ones((4, 10, 10, 3)), jnp.ones((3, 3, 3, 6)))
    expected = 2 * 4 * 8 * 8 * 6 * 3 * 3 * 3
    assert traced_flops(traced.jaxpr).total == expected
    assert partitioned_flops(hlo.parse(traced.lower().as_text(dialect="hlo"))) == expected


def test_a_kernel_counts_its_grid_points():
    def body(x_ref, y_ref, out_ref):
        out_ref[...] = jnp.dot(x_ref[...], y_ref[...])

    spec = pl.BlockSpec((8, 8), lambda i: (i, 0))
    whole = pl.BlockSpec((8, 8), lambda i: (0, 0))
    shape = jax.ShapeDtypeStruct((32, 8), jnp.float32)
    call = pl.pallas_call(body, out_shape=shape, grid=(4,), in_specs=[spec, whole], out_specs=spec, name="own")
    jaxpr = jax.make_jaxpr(call)(jnp.ones((32, 8)), jnp.ones((8, 8)))
    assert traced_flops(jaxpr) == Flops(kernels=4 * 2 * 8 * 8 * 8)
    # Of a kernel without a formula: every grid point, every argument once.
    assert traced_flops(jaxpr, kernel_costs=costs()) == Flops(kernels=4096, kernel_bytes=4 * (32 * 8 + 8 * 8))


TRAFFIC = """HloModule jit_f, is_scheduled=true

%layer_of (stack: bf16[6,32,64], index: s32[], x: bf16[32,64]) -> bf16[32,64] {
  %stack = bf16[6,32,64]{2,1,0} parameter(0)
  %index = s32[] parameter(1)
  %x = bf16[32,64]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %slice = bf16[1,32,64]{2,1,0} dynamic-slice(%stack, %index, %zero, %zero), dynamic_slice_sizes={1,32,64}
  %flat = bf16[32,64]{1,0} bitcast(%slice)
  ROOT %sum = bf16[32,64]{1,0} add(%flat, %x)
}

%keep (stack.1: bf16[6,32,64], index.1: s32[], x.1: bf16[32,64]) -> bf16[6,32,64] {
  %stack.1 = bf16[6,32,64]{2,1,0} parameter(0)
  %index.1 = s32[] parameter(1)
  %x.1 = bf16[32,64]{1,0} parameter(2)
  %zero.1 = s32[] constant(0)
  %row = bf16[1,32,64]{2,1,0} bitcast(%x.1)
  ROOT %put = bf16[6,32,64]{2,1,0} dynamic-update-slice(%stack.1, %row, %index.1, %zero.1, %zero.1)
}

ENTRY %main (w: bf16[6,32,64], i: s32[], x.2: bf16[32,64]) -> bf16[6,32,64] {
  %w = bf16[6,32,64]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %x.2 = bf16[32,64]{1,0} parameter(2)
  %fast = bf16[32,64]{1,0:S(1)} fusion(%w, %i, %x.2), kind=kLoop, calls=%layer_of
  %again = bf16[32,64]{1,0} negate(%fast)
  %kernel = bf16[32,64]{1,0} custom-call(%again), custom_call_target="tpu_custom_call"
  %part-start = ((bf16[6,32,64]{2,1,0}), bf16[1,32,64]{2,1,0:S(1)}, s32[]{:S(2)}) slice-start(%w), slice={[0:1]}
  %part = bf16[1,32,64]{2,1,0:S(1)} slice-done(%part-start)
  %back-start = (bf16[1,32,64]{2,1,0}, bf16[1,32,64]{2,1,0:S(1)}, u32[]{:S(2)}) copy-start(%part)
  %back = bf16[1,32,64]{2,1,0} copy-done(%back-start)
  ROOT %kept = bf16[6,32,64]{2,1,0} fusion(%w, %i, %kernel), kind=kLoop, calls=%keep
}
"""


def test_memory_traffic_by_hand():
    layer, number = 2 * 32 * 64, 4
    read_slice = layer + number + layer  # slice and x come in, the result stays on the chip
    negate = layer  # from the chip to memory
    kernel = 0  # by formula elsewhere
    keep = number + layer + layer  # the row comes in and goes out, the stack does not move
    fetched = layer + layer  # a slice to the chip, and back
    assert memory_bytes(hlo.parse(TRAFFIC)) == read_slice + negate + kernel + keep + fetched


def test_memory_traffic_is_what_the_compiler_counts_where_there_are_no_loops():
    def f(x, w, v):
        return jnp.sum(jax.nn.relu(x @ w) @ v, axis=0) + v[0]

    compiled = jax.jit(f).lower(jnp.ones((64, 128)), jnp.ones((128, 256)), jnp.ones((256, 32))).compile()
    np.testing.assert_allclose(
        memory_bytes(hlo.parse(compiled.as_text())), compiled.cost_analysis()["bytes accessed"], rtol=0.01
    )


def test_memory_traffic_of_a_scan_is_that_of_one_layer_as_often_as_there_are_layers():
    def of(count):
        stack = jnp.ones((count, 128, 128))
        return memory_bytes(hlo.parse(jax.jit(layers).lower(jnp.ones((64, 128)), stack).compile().as_text()))

    # A layer reads its weights (64 KiB) and not the stack, and its x and some arrays like it (32 KiB) come and go.
    assert of(9) - of(5) == of(13) - of(9)
    assert 2**16 + 4 * 2**15 < (of(9) - of(5)) / 4 < 2**16 + 10 * 2**15

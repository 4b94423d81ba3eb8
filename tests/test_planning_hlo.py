"""Reading compiled programs: instructions, sizes, and how often each computation runs."""

import jax
import jax.numpy as jnp
import pytest

from turnppo_jax.planning import hlo, loops

# Two nested loops of 6 and 4 around a product; the outer bound is carried in the loop's tuple, the inner comparison is
# fused. A kernel's text, with braces and line breaks of its own, stands in the middle of the inner body.
NESTED = """HloModule jit_f, num_partitions=4

%compare_it (p0: s32[], p1: s32[]) -> pred[] {
  %p0 = s32[] parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %lt.9 = pred[] compare(%p0, %p1), direction=LT
}, execution_thread="sparsecore"

%inner_body (arg.1: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %arg.1 = (s32[], bf16[8,128]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %i.1 = s32[] get-tuple-element(%arg.1), index=0
  %x.1 = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%arg.1), index=1
  %kernel = bf16[8,128]{1,0} custom-call(%x.1), custom_call_target="tpu_custom_call", frontend_attributes={text="
module {
}}
}", metadata={op_name="a(b)"}
  %two = s32[] constant(2)
  %next.1 = s32[] add(%i.1, %two)
  ROOT %out.1 = (s32[], bf16[8,128]{1,0}) tuple(%next.1, %kernel)
}

%inner_condition (arg.2: (s32[], bf16[8,128])) -> pred[] {
  %arg.2 = (s32[], bf16[8,128]{1,0}) parameter(0)
  %eight = s32[]{:T(128)} constant(8)
  %i.2 = s32[] get-tuple-element(%arg.2), index=0
  ROOT %fused = pred[] fusion(%i.2, %eight), kind=kLoop, calls=%compare_it
}

%outer_body (arg.3: (s32[], bf16[8,128], s32[])) -> (s32[], bf16[8,128], s32[]) {
  %arg.3 = (s32[], bf16[8,128]{1,0}, s32[]) parameter(0)
  %i.3 = s32[] get-tuple-element(%arg.3), index=0
  %x.3 = bf16[8,128]{1,0} get-tuple-element(%arg.3), index=1
  %bound.3 = s32[] get-tuple-element(%arg.3), index=2
  %zero.3 = s32[] constant(0)
  %start.3 = (s32[], bf16[8,128]{1,0}) tuple(%zero.3, %x.3)
  %inner = (s32[], bf16[8,128]{1,0}) while(%start.3), condition=%inner_condition, body=%inner_body
  %y.3 = bf16[8,128]{1,0} get-tuple-element(%inner), index=1
  %minus = s32[] constant(-1)
  %next.3 = s32[] add(%minus, %i.3)
  ROOT %out.3 = (s32[], bf16[8,128]{1,0}, s32[]) tuple(%next.3, %y.3, %bound.3)
}

%outer_condition (arg.4: (s32[], bf16[8,128], s32[])) -> pred[] {
  %arg.4 = (s32[], bf16[8,128]{1,0}, s32[]) parameter(0)
  %i.4 = s32[] get-tuple-element(%arg.4), index=0
  %bound.4 = s32[] get-tuple-element(%arg.4), index=2
  ROOT %gt = pred[] compare(%i.4, %bound.4), direction=GT
}

ENTRY %main (x: bf16[8,128]) -> bf16[8,128] {
  %x = bf16[8,128]{1,0} parameter(0)
  %seven = s32[] constant(7)
  %one = s32[] constant(1)
  %copied = s32[] copy(%one)
  %start = (s32[], bf16[8,128]{1,0}, /*index=2*/s32[]) tuple(%seven, %x, %copied)
  %outer = (s32[], bf16[8,128]{1,0}, s32[]) while(%start), condition=%outer_condition, body=%outer_body
  ROOT %result = bf16[8,128]{1,0} get-tuple-element(%outer), index=1
}
"""


def times(text, dynamic_trips=(), branch=0):
    module = hlo.parse(text)
    return {visit.computation: visit.times for visit in loops.visits(module, dynamic_trips, branch)}


def test_a_computation_runs_as_often_as_the_loops_around_it():
    # 7, 6, ... 2 are above 1: six; 0, 2, 4, 6 are below 8: four each.
    assert times(NESTED) == {
        "main": 1,
        "outer_body": 6,
        "outer_condition": 6,
        "inner_body": 24,
        "inner_condition": 24,
        "compare_it": 24,
    }


def test_a_kernel_s_text_ends_no_computation():
    module = hlo.parse(NESTED)
    body = module.computations["inner_body"]
    assert list(body.instructions) == ["arg.1", "i.1", "x.1", "kernel", "two", "next.1", "out.1"]
    assert body.root == "out.1" and module.entry == "main"
    kernel = body.instructions["kernel"]
    assert (kernel.opcode, kernel.operands, kernel.shape) == ("custom-call", ("x.1",), "bf16[8,128]{1,0}")


def test_a_bound_that_is_computed_needs_a_number():
    text = NESTED.replace("%one = s32[] constant(1)", "%one = s32[] negate(%seven)")
    with pytest.raises(ValueError, match=r"loop outer in main has a dynamic number .* has 0 entries, needs 1"):
        times(text)
    assert times(text, [3])["inner_body"] == 12
    # The next entry is for the next dynamic loop inside, not for the one with a known number.
    assert times(text, [3, 100])["inner_body"] == 12


def test_a_bound_that_the_body_changes_is_no_constant():
    text = NESTED.replace("tuple(%next.3, %y.3, %bound.3)", "tuple(%next.3, %y.3, %next.3)")
    with pytest.raises(ValueError, match="dynamic"):
        times(text)


def test_of_a_conditional_one_branch_runs():
    text = """HloModule jit_f

%no (a: f32[4]) -> f32[4] {
  ROOT %a = f32[4]{0} parameter(0)
}

%yes (b: f32[4]) -> f32[4] {
  %b = f32[4]{0} parameter(0)
  ROOT %twice = f32[4]{0} add(%b, %b)
}

ENTRY %main (p: s32[], x: f32[4]) -> f32[4] {
  %p = s32[] parameter(0)
  %x = f32[4]{0} parameter(1)
  ROOT %c = f32[4]{0} conditional(%p, %x, %x), branch_computations={%no, %yes}
}
"""
    assert set(times(text)) == {"main", "no"}
    assert set(times(text, branch=1)) == {"main", "yes"}
    by_name = text.replace("branch_computations={%no, %yes}", "true_computation=%yes, false_computation=%no")
    assert set(times(by_name, branch=1)) == {"main", "yes"}


def test_bytes_of_shapes():
    shape = "(s32[]{:T(128)}, bf16[6,128,512]{2,1,0:T(8,128)(2,1)S(1)}, /*index=2*/pred[3]{0}, f8e4m3fn[10], token[])"
    assert hlo.arrays(shape) == [(4, 0), (2 * 6 * 128 * 512, 1), (3, 0), (10, 0), (0, 0)]
    assert hlo.num_bytes(shape) == 4 + 786432 + 3 + 10
    assert hlo.num_bytes(shape, on_chip=False) == 17
    assert hlo.num_bytes("s4[7]") == 3.5
    assert hlo.dimensions("f32[<=5,3]{1,0}") == (5, 3)


def test_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.parse("HloModule empty")


def test_loops_of_a_compiled_program():
    # A scan of 5 around a scan of 3 around a loop whose number of iterations is an argument.
    def f(x, number):
        def inner(x, _):
            return jax.lax.fori_loop(0, number, lambda i, x: jnp.sin(x @ x), x), None

        def outer(x, _):
            return jax.lax.scan(inner, x, None, length=3)[0], None

        return jax.lax.scan(outer, x, None, length=5)[0]

    lowered = jax.jit(f).lower(jnp.ones((32, 32)), 7)
    for text in (lowered.as_text(dialect="hlo"), lowered.compile().as_text()):
        module = hlo.parse(text)
        found = [visit.times for visit in loops.visits(module, [7]) if visit.loops]
        assert found and set(found) == {105}
        with pytest.raises(ValueError, match="dynamic"):
            list(loops.visits(module))

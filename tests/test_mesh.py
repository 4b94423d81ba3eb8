"""The learner and the sampler on meshes of 8 virtual devices against one device: one process, in `tests/on_mesh.py`."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests import mesh_cases as mc

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def found():
    # The number of devices is fixed at the first use of jax, hence a process of its own.
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-m", "tests.on_mesh"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    *told, last = done.stdout.splitlines()
    return json.loads(last) | {"told": told}


def test_a_step_on_a_mesh_is_that_of_one_device(found):
    """Gradients, update, teacher-forced log-probs and metrics; 1, 2 and 4 micro-batches with an empty row."""
    assert [case["micro-batches"] for case in found["learners"].values()] == [1, 2, 4]
    for case in found["learners"].values():
        assert case["rows"] == 7  # of 8
        # float32 sums of some hundred terms in another order: 1e-6 of a leaf's largest entry, more by cancellation.
        assert case["gradient"] < 2e-5
        # Adam's first step has the size of the learning rate, 1e-2, whatever the gradient's.
        assert case["parameters"] < 1e-5
        assert case["logprobs"] < 2e-6
        assert case["metrics"] < 1e-4
        assert case["compiled"] == 1


def test_sampled_ids_are_those_of_one_device(found):
    """Fewer key/value heads than tensor, heads that it does not divide, slots alone; prompts in one and two pieces."""
    refused = found["samplers"].pop("refused")
    assert refused == "row 1 of a prefill holds slot 2; allowed: slots of its own data shard"
    assert len(found["samplers"]) == 3
    for case in found["samplers"].values():
        assert case["same"]
        assert case["logprobs"] < 1e-5  # float32 hidden states whose sums are split over tensor
        assert case["programs"] == 0


def test_no_collective_of_the_sampler_is_the_size_of_the_cache(found):
    assert set(found["sampler_collectives"]) == {
        f"{shape} {name}" for shape in ((2, 1, 4), (4, 1, 2)) for name in ("prefill", "decode")
    }
    # Activations of a few rows against 2,048 positions of 8 slots.
    assert max(found["sampler_collectives"].values()) < 0.02


def test_what_crosses_devices_in_an_update_is_bfloat16(found):
    sizes, seen = mc.SIZES, [(kind, dtype, tuple(shape)) for kind, dtype, shape in found["update_collectives"]]
    gathered = {(dtype, shape) for kind, dtype, shape in seen if kind == "all-gather"}
    d, f, v, n, h = sizes.hidden_size, sizes.intermediate_size, sizes.vocab_size, sizes.num_heads, sizes.head_dim
    # tensor = 2 keeps its half of each kernel; fsdp = 2 is gathered: of a layer at a time, and of the head.
    for shape in ((d, f // 2), (f // 2, d), (d, n // 2, h), (n // 2, h, d), (v // 2, d)):
        assert ("bf16", shape) in gathered
    assert {dtype for dtype, _ in gathered} == {"bf16", "s32"}  # s32: token ids
    # Gradients of kernels are reduced to the part that a device keeps, never whole; in front of the data axis.
    scattered = {shape for kind, dtype, shape in seen if kind == "reduce-scatter" and dtype == "bf16"}
    assert {(d // 2, f // 2), (f // 2, d // 2), (v // 2, d // 2)} <= scattered
    whole = {(d, f // 2), (f // 2, d), (d, n // 2, h), (n // 2, h, d), (v // 2, d)}
    assert not [shape for kind, _, shape in seen if kind == "all-reduce" and shape in whole]
    # Logits never cross: nothing has the vocabulary as its last axis.
    assert not [shape for _, _, shape in seen if shape and shape[-1] in (v, v // 2)]


@pytest.mark.skipif(
    not importlib.util.find_spec("libtpu"), reason="libtpu is not installed: nothing compiles for a TPU"
)
def test_what_crosses_tpu_chips_in_an_update_is_bfloat16():
    # As on a machine without a TPU, beside other processes that do the same.
    env = os.environ | {
        "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_LOG_DIR": "disabled",
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.mesh_on_tpu"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    gathered = {dtype for kind, dtype, _ in seen if kind == "all-gather"}
    assert gathered == {"bf16", "s32"}
    assert {dtype for kind, dtype, _ in seen if kind == "reduce-scatter"} == {"bf16"}


def test_a_split_vocabulary_draws_the_same_ids(found):
    for case in found["draws_from_a_split_vocabulary"].values():
        assert case["same"]
        assert case["logprobs"] < 1e-6  # two units in the last place of numbers around 5


def test_weights_reach_the_rollout_mesh(found):
    weights = found["weights"]
    assert weights["cast"] and weights["placed"] and weights["values"] == 0 and weights["same mesh is free"]
    assert weights["types"] == ["bf16"]  # nothing crosses in float32


def test_a_forked_slot_moves_alone_between_shards(found):
    assert found["forked_slots"]["same"]
    assert found["forked_slots"]["slots"] <= 1


def test_the_tables_and_what_is_said_about_them(found):
    assert found["tables"]
    told = [line for line in found["told"] if line.startswith("sharding:")]
    assert len(told) == len(set(told))  # each fallback once
    assert (
        "sharding: tensor=4 does not divide heads=14: attention is not split over it and runs on the data axes alone"
    ) in told
    assert "sharding: tensor=4 does not divide kv_heads=2: key/value heads are replicated over it" in told

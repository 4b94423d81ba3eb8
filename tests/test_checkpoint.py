"""Checkpoints: what is kept, what is restored, what is passed over, and how a misfit ends."""

import dataclasses
import json
import pathlib
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from turnppo_jax.models.sizes import ModelSizes
from turnppo_jax.training import checkpoint
from turnppo_jax.training.checkpoint import CheckpointError, Checkpoints, cut_back, restore_actor_params, usable_steps
from turnppo_jax.training.optimizer import ModelState

SIZES = ModelSizes(
    family="qwen2",
    vocab_size=11,
    num_token_ids=10,
    hidden_size=4,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    intermediate_size=8,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
    qkv_bias=True,
    qk_norm=False,
    max_position_embeddings=32,
)


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-3, 0.0, 10)))


def make_state(seed: int, width: int = 6) -> ModelState:
    keys = jax.random.split(jax.random.key(seed), 2)
    params = {
        "embed": jax.random.normal(keys[0], (8, width)),
        "layers": {"q": jax.random.normal(keys[1], (2, width, 4)).astype(jnp.bfloat16)},
    }
    opt_state = OPTIMIZER.init(params)
    grads = jax.tree.map(jnp.ones_like, params)
    _, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return ModelState(params, opt_state, jnp.int32(seed), jnp.int32(1))


def assert_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype and a.shape == e.shape, path
        assert np.array_equal(np.asarray(a), np.asarray(e)), path


def test_state_comes_back_bit_for_bit_with_its_types(tmp_path, caplog):
    caplog.set_level("WARNING")
    state = {"actor": make_state(3), "critic": make_state(4)}
    with Checkpoints(tmp_path, config={"seed": 1, "model": {"name": "tiny"}}) as checkpoints:
        assert checkpoints.latest_step() is None
        assert checkpoints.restore_latest(state) is None
        assert checkpoints.save(3, state)
        assert checkpoints.latest_step() == 3
    with Checkpoints(tmp_path) as checkpoints:
        step, restored = checkpoints.restore_latest(jax.eval_shape(lambda: state))
        assert step == 3
        assert_equal(restored, state)
        assert isinstance(restored["actor"], ModelState)
        assert checkpoints.config(3) == {"seed": 1, "model": {"name": "tiny"}}
    assert not caplog.records, "a good save and restore warns of nothing"


def test_a_run_without_critic(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"actor": make_state(1), "critic": None})
        restored = checkpoints.restore(1, {"actor": make_state(0), "critic": None})
        assert restored["critic"] is None
        assert_equal(restored["actor"], make_state(1))
        with pytest.raises(CheckpointError, match=r"holds \['actor'\] and this run needs \['actor', 'critic'\]"):
            checkpoints.restore(1, {"actor": make_state(0), "critic": make_state(0)})


def test_newest_and_best_are_counted_apart(tmp_path):
    # The example of a public report: with one count of 3 for both, 100, 200 and 300 stay and 500 is lost.
    with Checkpoints(tmp_path, keep_latest=2, keep_best=1) as checkpoints:
        for step, score in zip((100, 200, 300, 400, 500), (0.9, 0.8, 0.7, 0.6, 0.5), strict=True):
            checkpoints.save(step, {"actor": make_state(step)}, {"score": score, "other": 5.0})
        assert checkpoints.all_steps() == [100, 400, 500]
        assert checkpoints.latest_step() == 500
        assert checkpoints.best_step() == 100


def test_the_best_is_remembered_over_a_restart_and_nan_is_no_score(tmp_path):
    state = {"actor": make_state(0)}
    with Checkpoints(tmp_path, keep_latest=1) as checkpoints:
        checkpoints.save(1, state, {"score": 0.75})
        checkpoints.save(2, state, {"score": 0.5})
    with Checkpoints(tmp_path, keep_latest=1) as checkpoints:
        assert checkpoints.best_step() == 1
        checkpoints.save(3, state, {"score": float("nan")})
        checkpoints.save(4, state)
        checkpoints.save(5, state, {"score": 0.25})
        assert checkpoints.all_steps() == [1, 5]
        checkpoints.save(6, state, {"score": 0.75})  # of equals, the later one
        assert checkpoints.all_steps() == [6]


def test_save_every_and_force(tmp_path):
    state = {"actor": make_state(0)}
    with Checkpoints(tmp_path, keep_latest=9, save_every=3) as checkpoints:
        started = [checkpoints.save(step, state) for step in range(1, 8)]
        assert started == [False, False, True, False, False, True, False]
        assert checkpoints.save(7, state, force=True)
        assert not checkpoints.save(7, state, force=True)  # is there already
        assert checkpoints.all_steps() == [3, 6, 7]


@pytest.mark.parametrize("field", ["keep_latest", "save_every", "keep_best"])
def test_counts_are_checked(tmp_path, field):
    with pytest.raises(ValueError, match=rf"{field}=-1: must be at least"):
        Checkpoints(tmp_path, **{field: -1})


def test_donating_and_changing_right_after_save_does_not_reach_the_checkpoint(tmp_path):
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    # 16 MB, so that the background write is still going on when the buffers are donated.
    state = update({"params": {"w": jnp.zeros((4_000_000,)), "n": jnp.int32(0)}})
    host = np.zeros((1000,), np.float32)
    with Checkpoints(tmp_path, keep_latest=9) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"actor": state, "critic": {"host": host}})
            host += 1
            state = update(update(state))
        jax.block_until_ready(state)
        for step in (1, 2, 3):
            restored = checkpoints.restore(step, {"actor": state, "critic": {"host": jnp.zeros((1000,))}})
            w = np.asarray(restored["actor"]["params"]["w"])
            assert w.min() == w.max() == 2 * step - 1
            assert int(restored["actor"]["params"]["n"]) == 2 * step - 1
            assert np.all(np.asarray(restored["critic"]["host"]) == step - 1)


def test_empty_and_half_written_steps_are_passed_over_by_name(tmp_path, capsys):
    state = {"actor": make_state(5)}
    with Checkpoints(tmp_path, keep_latest=9) as checkpoints:
        checkpoints.save(5, state)
        checkpoints.save(6, state)
    folder = tmp_path / "checkpoints"
    (folder / "6" / "actor" / "manifest.ocdbt").unlink()
    (folder / "7").mkdir()
    (folder / "8.orbax-checkpoint-tmp").mkdir()
    assert usable_steps(tmp_path) == [5]
    capsys.readouterr()
    with Checkpoints(tmp_path, keep_latest=9) as checkpoints:
        printed = capsys.readouterr().out
        assert "8.orbax-checkpoint-tmp is half-written" in printed
        assert (
            "6 is not whole (actor/manifest.ocdbt is missing or empty); passed over, renamed to 6.unusable" in printed
        )
        assert "7 is not whole (it is empty)" in printed
        step, restored = checkpoints.restore_latest(state)
        assert step == 5
        assert_equal(restored, state)
        assert checkpoints.save(6, state)  # the step can be written again
        assert checkpoints.all_steps() == [5, 6]
    assert not (folder / "8.orbax-checkpoint-tmp").exists()
    assert (folder / "6.unusable").is_dir()


def test_steps_that_are_not_there_or_lost_their_data(tmp_path):
    state = {"actor": make_state(1)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        with pytest.raises(CheckpointError, match=r"no checkpoint of step 2 .* there are \[1\]"):
            checkpoints.restore(2, state)
        next((tmp_path / "checkpoints" / "1" / "actor" / "d").iterdir()).write_bytes(b"")
        with pytest.raises(CheckpointError, match=r"1 is not whole: actor/d/.* is empty"):
            checkpoints.restore(1, state)
        assert usable_steps(tmp_path) == []


def test_a_misfit_names_the_first_leaf(tmp_path):
    state = {"actor": make_state(1)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        with pytest.raises(
            CheckpointError, match=r"actor.params.embed is \[8, 6\] in the checkpoint and \[8, 12\] here"
        ):
            checkpoints.restore(1, {"actor": make_state(1, width=12)})
        fewer = dataclasses.replace(state["actor"], params={"embed": state["actor"].params["embed"]})
        with pytest.raises(CheckpointError, match=r"actor.params.layers.q .*is in the checkpoint and not here"):
            checkpoints.restore(1, {"actor": fewer})
        more = dataclasses.replace(state["actor"], params=state["actor"].params | {"head": jnp.zeros((3,))})
        with pytest.raises(CheckpointError, match=r"actor.params.head \[3\] is not in the checkpoint"):
            checkpoints.restore(1, {"actor": more})


def test_another_dtype_is_refused_unless_asked_for(tmp_path):
    state = {"actor": make_state(1)}
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, state)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        with pytest.raises(CheckpointError, match=r"layers.q is bfloat16 in the checkpoint and float32 here"):
            checkpoints.restore(1, wide)
        assert_equal(checkpoints.restore(1, wide, cast=True), wide)


def test_actor_parameters_alone(tmp_path, caplog):
    actor = make_state(2)
    with Checkpoints(tmp_path, config={"a": {"b": 1}}, sizes=SIZES, keep_latest=9) as checkpoints:
        checkpoints.save(1, {"actor": make_state(1), "critic": make_state(7)})
        checkpoints.save(2, {"actor": actor, "critic": make_state(7)})
    params, sizes, config = restore_actor_params(tmp_path)
    assert not caplog.records
    assert_equal(params, actor.params)
    assert sizes == SIZES
    assert config == {"a": {"b": 1}}
    older, _, _ = restore_actor_params(tmp_path, 1)
    assert_equal(older, make_state(1).params)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3 .* there are \[1, 2\]"):
        restore_actor_params(tmp_path, 3)
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        restore_actor_params(tmp_path / "elsewhere")


def test_looking_at_a_run_changes_nothing_in_it(tmp_path):
    with Checkpoints(tmp_path, sizes=SIZES) as checkpoints:
        checkpoints.save(1, {"actor": make_state(1)})
    (tmp_path / "checkpoints" / "2").mkdir()  # a training process may be about to fill it
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    restore_actor_params(tmp_path)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_cut_back_removes_what_came_after_the_checkpoint(tmp_path):
    (tmp_path / "trajectories").mkdir()
    for step in (1, 2, 3, 10):
        (tmp_path / "trajectories" / f"step_{step:06d}.jsonl").write_text("{}\n")
    rows = [json.dumps({"step": step}) for step in (0, 1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + '\n{"step": 4, "a')
    cut_back(tmp_path, 2)
    assert (tmp_path / "metrics.jsonl").read_text() == "\n".join(rows[:3]) + "\n"
    assert sorted(path.name for path in (tmp_path / "trajectories").iterdir()) == [
        "step_000001.jsonl",
        "step_000002.jsonl",
    ]


CHILD = """
    import os, signal, sys
    import jax, jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    import numpy as np
    from turnppo_jax.training.checkpoint import Checkpoints
"""


def run_child(code: str, *arguments: str, devices: int = 1) -> subprocess.CompletedProcess:
    """Runs a program in its own process, because the number of devices is fixed when jax starts."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD) + textwrap.dedent(code), *arguments],
        cwd=pathlib.Path(checkpoint.__file__).parents[2],
        env={
            "PATH": "/usr/bin:/bin",
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_restores_onto_a_mesh_of_another_size(tmp_path):
    # Saved on one device with a scalar count; restored on four, sharded and replicated.
    actor = make_state(9)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(9, {"actor": {"w": actor.params["embed"], "count": jnp.int32(41)}})
    done = run_child(
        """
        mesh = Mesh(np.array(jax.devices()).reshape(4), ("fsdp",))
        target = {"actor": {
            "w": jax.ShapeDtypeStruct((8, 6), jnp.float32, sharding=NamedSharding(mesh, P("fsdp"))),
            "count": jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P())),
        }}
        with Checkpoints(sys.argv[1]) as checkpoints:
            step, state = checkpoints.restore_latest(target)
            w, count = state["actor"]["w"], state["actor"]["count"]
            assert [shard.data.shape for shard in w.addressable_shards] == [(2, 6)] * 4
            checkpoints.save(10, {"actor": {"w": w + 1, "count": count + 1}})
            print(step, int(count), len(count.sharding.device_set))
        """,
        str(tmp_path),
        devices=4,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["9", "41", "4"]
    with Checkpoints(tmp_path) as checkpoints:  # and from four devices onto one
        restored = checkpoints.restore(10, {"actor": {"w": jnp.zeros((8, 6)), "count": jnp.int32(0)}})["actor"]
        assert np.array_equal(np.asarray(restored["w"]), np.asarray(actor.params["embed"]) + 1)
        assert int(restored["count"]) == 42


def test_a_process_killed_while_it_saves_leaves_the_last_whole_step(tmp_path):
    done = run_child(
        """
        checkpoints = Checkpoints(sys.argv[1], keep_latest=9)
        state = {"actor": {"w": jax.random.normal(jax.random.key(0), (8_000_000,))}}
        checkpoints.save(1, state)
        checkpoints.wait()
        checkpoints.save(2, state)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        str(tmp_path),
    )
    assert done.returncode == -9, done.stderr[-2000:]
    with Checkpoints(tmp_path) as checkpoints:
        step, state = checkpoints.restore_latest({"actor": {"w": jnp.zeros((8_000_000,))}})
        assert step == 1
        assert np.array_equal(
            np.asarray(state["actor"]["w"]), np.asarray(jax.random.normal(jax.random.key(0), (8_000_000,)))
        )
        assert checkpoints.save(2, state)


def test_damaged_data_ends_in_one_line_that_says_what_to_do(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"actor": {"w": jax.random.normal(jax.random.key(0), (10_000,))}})
    for file in (tmp_path / "checkpoints" / "1" / "actor").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:-9])
    # In its own process, because Orbax leaves readers behind that complain after their event loop has gone.
    done = run_child(
        """
        from turnppo_jax.training.checkpoint import CheckpointError
        checkpoints = Checkpoints(sys.argv[1])
        try:
            checkpoints.restore(1, {"actor": {"w": jnp.zeros((10_000,))}})
        except CheckpointError as error:
            print(error, flush=True)
        os._exit(0)
        """,
        str(tmp_path),
    )
    (line,) = done.stdout.splitlines()
    assert "checkpoints/1 cannot be read" in line
    assert "rename or remove it" in line


def test_a_failure_in_the_background_surfaces(tmp_path):
    # In its own process, because the threads that fail leave their complaints behind.
    done = run_child(
        """
        import resource, signal
        from turnppo_jax.training.checkpoint import CheckpointError
        # A disk with no room for the 64 MB, which do not compress: every write of a file past 1 MB fails.
        state = {"actor": {"w": jax.block_until_ready(jax.random.normal(jax.random.key(0), (16_000_000,)))}}
        checkpoints = Checkpoints(sys.argv[1])
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        checkpoints.save(1, state)
        try:
            checkpoints.wait()
        except CheckpointError as error:
            print(error, flush=True)
        os._exit(0)
        """,
        str(tmp_path),
    )
    (line,) = done.stdout.splitlines()
    assert "checkpoints failed in the background: " in line

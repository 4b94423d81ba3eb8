"""The supervised warm start: its loss, its packing, its stopping, its files."""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from turnppo_jax import sft
from turnppo_jax.models.decoder import bind, init_decoder
from turnppo_jax.models.sizes import sizes_by_name
from turnppo_jax.parallel.mesh import make_mesh
from turnppo_jax.policy import load_policy
from turnppo_jax.rollout.builtin_tokenizer import build_tokenizer
from turnppo_jax.rollout.chat import Chat
from turnppo_jax.training import demonstrations as demos
from turnppo_jax.training import warm_start
from turnppo_jax.training.conversation_files import read_conversations
from turnppo_jax.training.optimizer import OptimizerConfig, init_state, make_optimizer
from turnppo_jax.training.supervised import SupervisedConfig, supervised_programs, train_supervised


@pytest.fixture(scope="module")
def chat():
    return Chat(build_tokenizer())


@pytest.fixture(scope="module")
def model(chat):
    sizes = dataclasses.replace(
        sizes_by_name("tiny-qwen3"), hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
        intermediate_size=64, vocab_size=chat.num_token_ids + 5, num_token_ids=chat.num_token_ids,
    )  # fmt: skip
    return init_decoder(sizes, jax.random.key(0)), sizes


def toy_conversations(count):
    """Two turns each; the right answer is the direction that the observation names."""
    names = ("Up", "Down", "Left", "Right")
    return [
        [
            {"role": "user", "content": "#" * (i % 3) + names[i % 4]},
            {"role": "assistant", "content": f"<answer>{names[i % 4]}</answer>"},
            {"role": "user", "content": names[(i + 1) % 4]},
            {"role": "assistant", "content": f"<answer>{names[(i + 1) % 4]}</answer>"},
        ]
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def toy(chat):
    return demos.encode_demonstrations(chat, toy_conversations(12))


# One shape and one config for all that can share them, because compiling is what these tests spend their time on.
SHAPE = demos.RowShape(4, 64, 32)
CONFIG = SupervisedConfig(
    OptimizerConfig(learning_rate=1e-2), steps=300, evaluate_every=20, stop_entropy=0.02, head_chunk=7
)


def packed_batch(demonstrations):
    return demos.make_batch(list(demos.pack_rows(demonstrations, SHAPE)), SHAPE, pad_id=9)


def one_step(model, batch, config=CONFIG):
    """Metrics and new parameters of one step; Adam's first step hides the gradient's size, so grad_norm tells."""
    params, sizes = model
    state = init_state(make_optimizer(config.optimizer), jax.tree.map(jnp.copy, params))
    state, metrics = supervised_programs(sizes, make_mesh(), config)[0](state, batch)
    return jax.device_get(metrics), jax.device_get(state.params)


def evaluate(model, batch, config=CONFIG):
    metrics = supervised_programs(model[1], make_mesh(), config)[1](model[0], batch)
    return [float(metrics[name]) for name in ("sft/heldout_loss", "sft/accuracy", "sft/entropy")]


def oracle(model, demonstrations):
    """Loss, accuracy and entropy by a loop over demonstrations and tokens, log-softmax in float64."""
    params, sizes = model

    @jax.jit
    def all_logits(ids):
        decoder = bind(params, sizes)
        return decoder.logits(decoder.hidden_states(ids, jnp.arange(ids.shape[1])[None], jnp.ones_like(ids)))

    losses, right, entropies = [], [], []
    for demonstration in demonstrations:
        ids = np.zeros((1, 32), np.int32)  # causal: what follows changes nothing
        ids[0, : len(demonstration.ids)] = demonstration.ids
        logits = np.asarray(all_logits(ids))[0, :, : sizes.num_token_ids].astype(np.float64)
        for t in np.flatnonzero(demonstration.action_mask):
            logp = logits[t - 1] - np.log(np.sum(np.exp(logits[t - 1])))
            losses.append(-logp[demonstration.ids[t]])
            right.append(np.argmax(logp) == demonstration.ids[t])
            entropies.append(-np.sum(np.exp(logp) * logp))
    return np.mean(losses), np.mean(right), np.mean(entropies)


def test_packed_rows_give_what_a_plain_loop_gives(model, toy):
    batch = packed_batch(toy)
    assert (batch.segment_ids.max(axis=1) > 1).any() and (batch.sampled_positions == -1).any()
    expected = oracle(model, toy)
    # float32 sums of some 120 terms of about 6 against float64.
    np.testing.assert_allclose(evaluate(model, batch), expected, rtol=1e-5)
    metrics, _ = one_step(model, batch)
    np.testing.assert_allclose(metrics["sft/loss"], expected[0], rtol=1e-5)
    alone, _ = one_step(model, demos.make_batch([[d] for d in toy], demos.RowShape(12, 32, 16)))
    np.testing.assert_allclose(metrics["sft/loss"], alone["sft/loss"], rtol=1e-5)
    np.testing.assert_allclose(metrics["sft/grad_norm"], alone["sft/grad_norm"], rtol=1e-5)


def test_microbatches_only_add(model, toy):
    batch = packed_batch(toy[:7])
    assert (batch.segment_ids == 0).all(axis=1).any()  # one part has nothing to imitate
    (whole, whole_params), (parts, parts_params) = (
        one_step(model, batch, dataclasses.replace(CONFIG, num_microbatches=n)) for n in (1, 4)
    )
    for name in ("sft/loss", "sft/grad_norm"):
        np.testing.assert_allclose(whole[name], parts[name], rtol=1e-5)
    # One Adam step of 1e-2 divides by the gradient's own size; where that is below float32 noise the sign may flip,
    # so compare in the mean: a wrong weight of one part would move most of them.
    moved = jax.tree.map(lambda a, b: np.abs(a - b).mean(), whole_params, parts_params)
    assert max(jax.tree.leaves(moved)) < 1e-4


def test_a_batch_with_nothing_to_imitate_changes_nothing(model):
    metrics, params = one_step(model, demos.make_batch([], SHAPE))
    assert metrics["sft/loss"] == metrics["sft/grad_norm"] == 0
    jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(model[0]))


def test_toy_set_is_learned_to_the_entropy_floor_in_one_compilation(model, toy):
    params, sizes = model
    before, rows = jax.tree.map(np.array, params), []
    trained, history = train_supervised(
        params, sizes, make_mesh(), demos.endless_batches(toy, SHAPE, seed=0), CONFIG,
        heldout=packed_batch(toy[:3]), report=rows.append,
    )  # fmt: skip
    assert rows == history and [row["step"] for row in history] == [20 * i for i in range(len(history))]
    entropies = [row["sft/entropy"] for row in history]
    assert entropies[-1] < CONFIG.stop_entropy <= min(entropies[:-1]) and history[-1]["step"] < CONFIG.steps
    last = history[-1]
    assert last["sft/heldout_loss"] < 0.05 < 4 < history[0]["sft/heldout_loss"]
    assert last["sft/accuracy"] == last["sft/stopped_by_entropy"] == 1 and last["sft/skipped"] == 0
    assert last["sft/loss"] < history[1]["sft/loss"] and last["sft/tokens_per_s"] > 0 and last["time/left_s"] > 0
    # The caller's parameters are neither changed nor given away.
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(params))
    assert not np.array_equal(jax.device_get(trained)["embed"]["embedding"], before["embed"]["embedding"])
    step_program, _ = supervised_programs(sizes, make_mesh(), CONFIG)
    known = step_program._cache_size()
    train_supervised(
        params, sizes, make_mesh(), demos.endless_batches(toy, SHAPE, seed=1), CONFIG, heldout=packed_batch(toy[:3])
    )
    assert step_program._cache_size() == known
    with pytest.raises(ValueError, match=r"stop_entropy=0\.02 needs held-out"):
        train_supervised(params, sizes, make_mesh(), iter(()), CONFIG)
    odd = dataclasses.replace(CONFIG, num_microbatches=3)
    with pytest.raises(ValueError, match="num_microbatches=3 does not divide rows=4"):
        train_supervised(params, sizes, make_mesh(), iter([packed_batch(toy)]), odd, heldout=packed_batch(toy[:3]))


def test_bfloat16_is_near_float32(model, toy):
    batch = packed_batch(toy)
    exact, rough = evaluate(model, batch), evaluate(model, batch, dataclasses.replace(CONFIG, compute_dtype="bfloat16"))
    np.testing.assert_allclose(exact[0], rough[0], rtol=5e-3)  # bfloat16 keeps 8 bits
    assert exact[0] != rough[0]


def test_packing_keeps_everything_once_and_within_bounds(toy):
    shape = demos.RowShape(2, 70, 20)
    many = [toy[i % len(toy)] for i in range(300)]  # more rows than stay open at once
    rows = list(demos.pack_rows(many, shape))
    assert sorted(id(d) for row in rows for d in row) == sorted(map(id, many))
    for row in rows:
        assert sum(len(d.ids) for d in row) <= 70 and sum(d.action_mask.sum() for d in row) <= 20
    assert any(sum(d.action_mask.sum() for d in row) + toy[0].action_mask.sum() > 20 for row in rows)
    batch = demos.make_batch(rows[:2], shape, pad_id=7)
    for index, row in enumerate(rows[:2]):
        start = 0
        for segment, d in enumerate(row, start=1):
            columns = slice(start, start + len(d.ids))
            assert batch.tokens[index, columns].tolist() == d.ids.tolist()
            assert batch.positions[index, columns].tolist() == list(range(len(d.ids)))
            assert (batch.segment_ids[index, columns] == segment).all()
            start += len(d.ids)
        assert (batch.tokens[index, start:] == 7).all() and (batch.segment_ids[index, start:] == 0).all()
        sampled = batch.sampled_positions[index][batch.sampled_positions[index] >= 0]
        assert batch.tokens[index, sampled].tolist() == [i for d in row for i in d.ids[d.action_mask].tolist()]


def test_batches_are_full_reproducible_and_leave_nothing_out(toy):
    shape = demos.RowShape(3, 64, 32)

    def first(count, seed):
        batches = demos.endless_batches(toy, shape, seed)
        return [next(batches) for _ in range(count)]

    same, again, other = first(8, 0), first(8, 0), first(8, 1)
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(same, again, strict=True))
    assert not all(np.array_equal(a.tokens, b.tokens) for a, b in zip(same, other, strict=True))
    assert all((batch.segment_ids[:, 0] == 1).all() for batch in same)
    # Five conversations of one row each, three rows a batch: five batches are three whole passes.
    batches = demos.endless_batches(toy[:5], demos.RowShape(3, 20, 16), seed=0)
    rows = [tuple(row.tolist()) for _ in range(5) for row in next(batches).tokens]
    assert sorted(rows.count(row) for row in set(rows)) == [3] * 5
    with pytest.raises(ValueError, match="no demonstrations"):
        next(demos.endless_batches([], shape, 0))


def test_what_does_not_fit_is_left_out_whole_and_counted(toy):
    long = demos.Demonstration(np.zeros(99, np.int32), np.arange(99) > 5)
    kept, dropped = demos.drop_long([long, *toy], 64)
    assert dropped == 1 and len(kept) == len(toy)
    with pytest.raises(ValueError, match=r"fits in row_tokens=64 \(the longest has 99"):
        demos.drop_long([long], 64)
    with pytest.raises(ValueError, match="99 tokens, 93 of them imitated, does not fit in a row of 128 and 8"):
        list(demos.pack_rows([long], demos.RowShape(1, 128, 8)))
    with pytest.raises(ValueError, match="imitates its first token"):
        list(demos.pack_rows([demos.Demonstration(np.zeros(3, np.int32), np.ones(3, bool))], demos.RowShape(1, 8, 8)))
    assert demos.sampled_capacity(toy, 64) >= max(d.action_mask.sum() for d in toy)


def test_conversations_of_a_file_are_split_at_line_feeds_only(tmp_path):
    messages = [{"role": "user", "content": "a\u2028b\u0085c"}, {"role": "assistant", "content": "d\r\n"}]
    line = json.dumps({"messages": messages}, ensure_ascii=False)
    (tmp_path / "good.jsonl").write_bytes(f"{line}\n\n{line}".encode())
    assert [c.messages for c in read_conversations(tmp_path / "good.jsonl")] == [messages, messages]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"messages": [', "Expecting value"),
        (b'["messages"]', 'expected an object with a list "messages"'),
        (b'{"messages": "hello"}', 'expected an object with a list "messages"'),
        (b'{"messages": [{"role": "user", "content": "a"}]}', "must end with an assistant message"),
        (b'{"messages": [{"role": "robot", "content": "a"}]}', "message 0 has role 'robot'; expected 'user'"),
        (b'{"messages": [{"role": "user"}]}', "message 0 needs a 'role' and a 'content' of text"),
        (b'{"messages": "\xff"}', "can't decode byte 0xff"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    good = json.dumps({"messages": toy_conversations(1)[0]}).encode()
    path = tmp_path / "bad.jsonl"
    path.write_bytes(good + b"\n" + line + b"\n")
    reader = read_conversations(path)
    next(reader)
    with pytest.raises(ValueError) as caught:
        next(reader)
    assert f"{path}:2: " in str(caught.value) and message in str(caught.value)


def run_config(**sft_fields):
    return {
        "seed": 3,
        "model": {"name": "tiny-qwen2"},
        "env": {"id": "sokoban", "kwargs": {"prompt": "compact"}},
        "sft": {"rows": 2, "row_tokens": 256, "heldout": 2, "steps": 2, "evaluate_every": 1} | sft_fields,
    }


def test_command_trains_on_a_file_and_writes_a_model_that_loads(tmp_path, capsys):
    path = tmp_path / "toy.jsonl"
    path.write_text("".join(json.dumps({"messages": c}) + "\n" for c in toy_conversations(8)))
    trained = sft.run(run_config(path=str(path)), tmp_path / "run")
    printed = capsys.readouterr().out
    assert "sft step     2/2  loss " in printed and "tokens/s  left 0 s" in printed
    rows = [json.loads(line) for line in (tmp_path / "run" / "sft_metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2] and rows[-1]["sft/demonstrations"] == 6
    loaded = load_policy(str(tmp_path / "run" / "model"), seed=0)
    fresh = load_policy("tiny-qwen2", seed=3)
    assert loaded.sizes == fresh.sizes and loaded.chat.eos_ids == fresh.chat.eos_ids
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(loaded.params), jax.device_get(trained.params))
    assert "lm_head.weight" not in load_file(tmp_path / "run" / "model" / "model.safetensors")  # tied: one matrix
    assert not np.array_equal(loaded.params["embed"]["embedding"], fresh.params["embed"]["embedding"])


def test_sokoban_demonstrates_itself(chat):
    settings = warm_start.sft_settings({"num_demonstrations": 6, "heldout": 2, "row_tokens": 512})
    first, again, other = (
        warm_start.prepare(settings, chat, "sokoban", {"prompt": "compact"}, seed) for seed in (0, 0, 1)
    )
    assert len(first.train) == 4 and first.dropped == 0
    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(first.train, again.train, strict=True))
    assert not all(np.array_equal(a.ids, b.ids) for a, b in zip(first.train, other.train, strict=False))
    imitated = [chat.decode(d.ids[d.action_mask]) for d in first.train]
    assert all(text.startswith("<think></think><answer>") and text.endswith("</answer>") for text in imitated)


@pytest.mark.parametrize(("env_id", "answers"), [("bandit", str.isalpha), ("countdown", lambda text: "(" in text)])
def test_single_turn_environments_demonstrate_themselves(chat, env_id, answers):
    settings = warm_start.sft_settings({"num_demonstrations": 6, "heldout": 2, "options": {"think": "plan"}})
    data = warm_start.prepare(settings, chat, env_id, {"prompt": "compact"}, 0)
    assert len(data.train) == 4 and data.dropped == 0
    for text in (chat.decode(d.ids[d.action_mask]) for d in data.train):
        thought, answer = text.removesuffix("</answer>").split("</think><answer>")
        assert len(thought) > len("<think>") and answers(answer)


def test_settings_out_of_range_are_named(chat):
    cases = [
        ({"leraning_rate": 1.0}, "unknown field sft.leraning_rate; known: attention, betas"),
        ({"steps": 0}, "steps=0; allowed: at least 1"),
        ({"stop_entropy": -1.0}, "stop_entropy=-1.0"),
        ({"schedule": "sudden"}, "schedule='sudden'"),
        ({"attention": "flash"}, "unknown attention 'flash'; known: auto, blocked"),
    ]
    for fields, message in cases:
        with pytest.raises(ValueError, match=message):
            warm_start.supervised_config(warm_start.sft_settings(fields))
    small = warm_start.sft_settings({"num_demonstrations": 2, "heldout": 2})
    for changes, env_id, message in [
        ({}, "sokoban", "sft.heldout=2 leaves nothing to train on"),
        ({}, "echo", "environment 'echo' has no demonstrations; known: sokoban"),
        ({"source": "nowhere"}, "sokoban", "sft.source='nowhere' is neither"),
        ({"path": "absent.jsonl"}, "sokoban", "'absent.jsonl' does not exist"),
    ]:
        with pytest.raises(ValueError, match=message):
            warm_start.prepare(small | changes, chat, env_id, {"prompt": "compact"}, 0)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--config.model.name=./absent", "model './absent'"),
        ("--config.model.nam=x", "config.model.nam"),
        ("--config.sft.steps=many", "config.sft.steps"),
        ("--config.sft.steps=0", "steps=0; allowed: at least 1"),
    ],
)
def test_a_wrong_command_ends_in_one_line(tmp_path, argument, message):
    (tmp_path / "few.py").write_text(
        "import ml_collections\n"
        "def get_config():\n"
        "  return ml_collections.ConfigDict({'seed': 0, 'model': {'name': 'tiny-qwen3'}, 'env': {'id': 'sokoban'},\n"
        "                                    'sft': {'steps': 1}})\n"
    )
    command = [sys.executable, "-m", "turnppo_jax.sft", f"--config={tmp_path / 'few.py'}", f"--workdir={tmp_path}"]
    done = subprocess.run([*command, argument], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert message in done.stderr.strip().splitlines()[-1]

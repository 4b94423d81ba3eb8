import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.golden import make_model_parity as golden
from tests.model_fixtures import FAMILIES, random_params, random_tokens, small_sizes, whole_row
from turnppo_jax import export
from turnppo_jax.models.checkpoint_files import load_model_config, load_weights
from turnppo_jax.models.decoder import bind
from turnppo_jax.models.sizes import SIZES
from turnppo_jax.models.weight_saving import save_weights

KEPT = {"tokenizer.json": "{}", "tokenizer_config.json": '{"a": 1}', "generation_config.json": '{"temperature": 0.7}',
        "chat_template.jinja": "{{ messages }}", "merges.txt": "#version", "tokenizer.model": "\x01"}  # fmt: skip


def source_directory(path, sizes, dtype, seed=0):
    params = random_params(sizes, seed)
    save_weights(params, sizes, path, dtype)
    # Written as another library would: other order, a field that means nothing here.
    config = {"transformers_version": "5.0.0", "custom": [1, 2]} | sizes.to_hf_config(dtype)
    (path / "config.json").write_text(json.dumps(config))
    for name, text in KEPT.items():
        (path / name).write_text(text)
    (path / "README.md").write_text("not ours to copy")
    return params


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_import_export_is_byte_equal_and_keeps_files(family, dtype, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    source_directory(source, small_sizes(family, num_token_ids=50), dtype)
    sizes, config = load_model_config(source)
    params = load_weights(source, sizes, jnp.float32)
    assert export.export_model(params, sizes, out, source=source) == out
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert list(before) == list(after)
    for name in before:
        assert (before[name].dtype, before[name].tobytes()) == (after[name].dtype, after[name].tobytes())
    assert json.loads((out / "config.json").read_text()) == config
    assert {path.name for path in out.iterdir()} == {*KEPT, "config.json", "model.safetensors"}
    for name, text in KEPT.items():
        assert (out / name).read_text() == text
    again = load_weights(out, sizes, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, again, params)


@pytest.mark.parametrize("family", ["qwen2", "llama"])  # tied, untied (KNOWN_FAULTS 27)
def test_trained_weights_come_back_with_equal_logits(family, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    sizes = small_sizes(family, num_token_ids=50)
    params = source_directory(source, sizes, "float32")
    tokens = random_tokens(sizes, 1, 8)

    def logits(params):
        model = bind(params, sizes)
        return model.logits(model.hidden_states(tokens, *whole_row(8)))

    logits = jax.jit(logits)
    gradients = jax.grad(lambda p: jnp.mean(jax.nn.logsumexp(logits(p), axis=-1)))(params)
    trained = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
    export.export_model(trained, sizes, out, source=source)
    assert ("lm_head.weight" in load_file(out / "model.safetensors")) == (family == "llama")
    np.testing.assert_array_equal(logits(load_weights(out, sizes, jnp.float32)), logits(trained))
    assert np.max(np.abs(logits(trained) - logits(params))) > 1e-3


def test_another_dtype_is_written_into_the_config(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    sizes = small_sizes("qwen3", num_token_ids=50)
    params = source_directory(source, sizes, "float32")
    export.export_model(params, sizes, out, source=source, dtype="bfloat16", max_shard_bytes=5000)
    config = json.loads((out / "config.json").read_text())
    assert config["torch_dtype"] == config["dtype"] == "bfloat16" and config["custom"] == [1, 2]
    assert (out / "model.safetensors.index.json").is_file()
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    jax.tree.map(np.testing.assert_array_equal, load_weights(out, sizes, jnp.bfloat16), expected)


def test_errors_are_one_line(tmp_path, monkeypatch):
    source = tmp_path / "source"
    sizes = small_sizes("qwen3", num_token_ids=50)
    params = source_directory(source, sizes, "float32")
    with pytest.raises(ValueError, match="is the source directory"):
        export.export_model(params, sizes, source, source=source)
    other = small_sizes("qwen3", num_token_ids=50, rope_theta=7e5)
    with pytest.raises(ValueError, match=r"rope_theta is 10000.0 in its config.json and 700000.0 in the parameters"):
        export.export_model(params, other, tmp_path / "out", source=source)
    monkeypatch.setattr(export, "restore_actor_params", lambda workdir, step, shardings: (params, sizes, {"steps": 3}))
    with pytest.raises(ValueError, match="names no model; pass --source"):
        export.export_workdir(tmp_path, tmp_path / "out")


def test_workdir_of_a_loaded_model_keeps_its_source(tmp_path, monkeypatch):
    source, out = tmp_path / "source", tmp_path / "out"
    sizes = small_sizes("llama", num_token_ids=50)
    params = source_directory(source, sizes, "bfloat16")
    calls = []

    def restore(workdir, step, shardings):
        calls.append((workdir, step))
        return params, small_sizes("llama", num_token_ids=47), {"model": {"name": str(source)}}

    monkeypatch.setattr(export, "restore_actor_params", restore)
    export.export_workdir("run", out, step=4)
    assert calls == [("run", 4)]
    assert load_file(out / "model.safetensors")["model.norm.weight"].dtype.name == "bfloat16"
    assert (out / "tokenizer.json").is_file()


def test_workdir_of_fresh_weights_gets_the_builtin_tokenizer_and_transformers_generates(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch", reason="generating through transformers needs torch (pip install torch)")
    import transformers

    tokenizer = export.build_tokenizer(("red shoes",))
    rows = -(-len(tokenizer) // 8) * 8
    sizes = dataclasses.replace(SIZES["tiny-qwen3"], num_layers=1, vocab_size=rows, num_token_ids=rows)
    params = random_params(sizes)
    config = {"model": {"name": "tiny-qwen3", "words": ["red shoes"]}}
    monkeypatch.setattr(export, "restore_actor_params", lambda workdir, step, shardings: (params, sizes, config))
    export.export_workdir("run", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert model.config.eos_token_id == tokenizer.eos_token_id and model.config.pad_token_id == tokenizer.pad_token_id
    prompt = np.asarray([loaded("<answer>Up</answer>")["input_ids"]], np.int32)
    ids = model.generate(torch.tensor(prompt, dtype=torch.long), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    line = ids.numpy().astype(np.int32)
    bound = bind(params, sizes)
    logits = bound.logits(bound.hidden_states(line, *whole_row(line.shape[1])))[0]
    # Greedy: each generated id is our best at the position before (min_new_tokens forbids the end id for 3 of them).
    best = jnp.argmax(logits.at[:, tokenizer.eos_token_id].set(-jnp.inf), axis=-1)
    np.testing.assert_array_equal(line[0, prompt.shape[1] :], best[prompt.shape[1] - 1 : -1])
    expected = golden.reference_logits(model, line, np.arange(line.shape[1])[None], np.ones_like(line))
    np.testing.assert_allclose(logits, expected[0], rtol=0, atol=2e-4)


def test_the_command_says_what_is_wrong_in_one_line(tmp_path):
    command = [sys.executable, "-m", "turnppo_jax.export", f"--workdir={tmp_path}"]
    for extra, message in (([], "--output is missing"), ([f"--output={tmp_path}/out"], "no checkpoint in")):
        done = subprocess.run(command + extra, capture_output=True, text=True, check=False)
        assert done.returncode != 0 and message in done.stderr and "Traceback" not in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1

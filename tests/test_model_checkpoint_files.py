import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests.checkpoint_fixtures import expected_parameters, source_tensors, write_sharded
from tests.model_fixtures import FAMILIES, small_sizes
from turnppo_jax.models.checkpoint_files import load_model_config, load_weights, resolve_model
from turnppo_jax.models.decoder import decoder_shapes
from turnppo_jax.models.tensor_files import INDEX_FILE, SINGLE_FILE, TensorFiles
from turnppo_jax.models.tensor_layout import paths_of, tensor_names
from turnppo_jax.models.weight_saving import save_weights

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


def raw(directory):
    """Name -> (dtype, bytes) over all weight files."""
    out = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            assert file.metadata() in (None, {"format": "pt"})
        for name, tensor in load_file(path).items():
            assert name not in out
            out[name] = (tensor.dtype.name, tensor.tobytes())
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_is_byte_for_byte_with_the_same_keys(family, dtype, tmp_path):
    sizes = small_sizes(family)
    tensors = source_tensors(sizes, DTYPES[dtype])
    single, sharded, out, cut = (tmp_path / name for name in ("single", "sharded", "out", "cut"))
    for directory in (single, sharded):
        directory.mkdir()
    save_file(tensors, single / SINGLE_FILE)
    write_sharded(sharded, tensors)
    assert set(tensor_names(sizes)) == set(tensors)
    params = load_weights(single, sizes, jnp.float32)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), params) == jax.tree.map(
        lambda a: (a.shape, a.dtype), decoder_shapes(sizes)
    )
    jax.tree.map(np.testing.assert_array_equal, load_weights(sharded, sizes, jnp.float32), params)
    save_weights(params, sizes, out, dtype)
    save_weights(params, sizes, cut, dtype, max_shard_bytes=4000)
    assert raw(out) == raw(single) == raw(cut)
    assert (out / SINGLE_FILE).is_file() and not list(out.glob("*.partial"))
    index = json.loads((cut / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert set(index["weight_map"]) == set(tensors) and len(set(index["weight_map"].values())) > 3
    # No shard passes the limit but one that holds a single larger tensor (the embedding); header apart.
    for path in cut.glob("*.safetensors"):
        assert sum(t.nbytes for t in load_file(path).values()) <= 4000 or len(load_file(path)) == 1
    jax.tree.map(np.testing.assert_array_equal, load_weights(cut, sizes, jnp.float32), params)


def test_values_land_where_the_names_say(tmp_path):
    sizes = small_sizes("qwen2")
    tensors = source_tensors(sizes)
    save_file(tensors, tmp_path / SINGLE_FILE)
    params = load_weights(tmp_path, sizes, jnp.float32)
    attention = params["layers"]["attention"]
    q = tensors["model.layers.1.self_attn.q_proj.weight"].reshape(sizes.num_heads, sizes.head_dim, sizes.hidden_size)
    np.testing.assert_array_equal(attention["q"]["kernel"][1][:, 2, 3], q[2, 3])
    o = tensors["model.layers.0.self_attn.o_proj.weight"].reshape(sizes.hidden_size, sizes.num_heads, sizes.head_dim)
    np.testing.assert_array_equal(attention["o"]["kernel"][0][2, 3], o[:, 2, 3])
    np.testing.assert_array_equal(
        attention["v"]["bias"][1].reshape(-1), tensors["model.layers.1.self_attn.v_proj.bias"]
    )
    np.testing.assert_array_equal(
        params["layers"]["mlp"]["up"]["kernel"][0].T, tensors["model.layers.0.mlp.up_proj.weight"]
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_is_where_it_belongs(family, tmp_path):
    sizes = small_sizes(family, num_kv_heads=1, intermediate_size=37)
    tensors = source_tensors(sizes)
    write_sharded(tmp_path, tensors)
    params, expected = paths_of(load_weights(tmp_path, sizes, jnp.float32)), expected_parameters(tensors, sizes)
    assert params.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(params[path], value, err_msg=path)


def test_loads_in_the_dtype_asked_for(tmp_path):
    sizes = small_sizes("llama")
    save_file(source_tensors(sizes), tmp_path / SINGLE_FILE)
    wide, narrow = (load_weights(tmp_path, sizes, dtype) for dtype in (jnp.float32, jnp.bfloat16))
    assert {leaf.dtype for leaf in jax.tree.leaves(narrow)} == {jnp.dtype(jnp.bfloat16)}
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16)), narrow, wide)


def test_loads_onto_shardings(tmp_path):
    from turnppo_jax.parallel.mesh import make_mesh
    from turnppo_jax.parallel.sharding import shardings

    sizes = small_sizes("llama")
    save_file(source_tensors(sizes), tmp_path / SINGLE_FILE)
    places = shardings(make_mesh(), decoder_shapes(sizes))
    params = load_weights(tmp_path, sizes, jnp.float32, places)
    assert jax.tree.map(lambda a: a.sharding, params) == places
    jax.tree.map(np.testing.assert_array_equal, params, load_weights(tmp_path, sizes, jnp.float32))


def test_nothing_is_read_before_everything_is_checked(tmp_path, monkeypatch):
    sizes = small_sizes("llama")
    # The last tensor of all is the one that is wrong.
    tensors = source_tensors(sizes) | {"lm_head.weight": np.ones((50, 31), np.float32)}
    write_sharded(tmp_path, tensors)
    read = []
    monkeypatch.setattr(TensorFiles, "read", lambda files, name, slices: read.append(name))
    with pytest.raises(ValueError, match=r"lm_head.weight has shape \(50, 31\), expected \(50, 32\)"):
        load_weights(tmp_path, sizes, jnp.float32)
    assert not read


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "missing tensor model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": np.ones(3)}), "unknown tensor model.layers.2.mlp.up"),
        (lambda t: t.update({"model.norm.bias": np.ones(3)}), "unknown tensor model.norm.bias"),
        (lambda t: t.pop("lm_head.weight"), "missing tensor lm_head.weight"),
        (
            lambda t: t.update({"model.norm.weight": np.ones(31, np.float32)}),
            r"model.norm.weight has shape \(31,\), expected \(32,\)",
        ),
        # The same number of elements in another order must not slip through a reshape.
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight": np.ones((32, 40), np.float32)}),
            r"up_proj.weight has shape \(32, 40\), expected \(40, 32\)",
        ),
    ],
)
def test_wrong_tensors_are_named(change, message, sharded, tmp_path):
    sizes = small_sizes("llama")
    tensors = source_tensors(sizes)
    change(tensors)
    if sharded:
        write_sharded(tmp_path, tensors)
    else:
        save_file(tensors, tmp_path / SINGLE_FILE)
    with pytest.raises(ValueError, match=message) as caught:
        load_weights(tmp_path, sizes, jnp.float32)
    assert "\n" not in str(caught.value)


def test_wrong_shards_are_named(tmp_path):
    sizes = small_sizes("llama")
    tensors = source_tensors(sizes)
    weight_map = write_sharded(tmp_path, tensors)
    moved = "model.norm.weight"
    home = tmp_path / weight_map[moved]
    other = next(tmp_path / name for name in set(weight_map.values()) if name != home.name)

    def fails(message):
        with pytest.raises(ValueError, match=message):
            load_weights(tmp_path, sizes, jnp.float32)

    # Doubled in the files: once more in another shard.
    save_file(load_file(other) | {moved: tensors[moved]}, other)
    fails(f"tensor {moved} (is doubled|stands in {other.name})")
    save_file({k: v for k, v in load_file(other).items() if k != moved}, other)
    load_weights(tmp_path, sizes, jnp.float32)
    # Doubled in the index.
    text = (tmp_path / INDEX_FILE).read_text()
    (tmp_path / INDEX_FILE).write_text(text.replace('"weight_map": {', f'"weight_map": {{"{moved}": "{home.name}", '))
    fails(f"tensor {moved} is doubled")
    (tmp_path / INDEX_FILE).write_text(text)
    # In the index, not in its shard.
    kept = load_file(home)
    save_file({k: v for k, v in kept.items() if k != moved}, home)
    fails(f"tensor {moved} is missing from shard {home.name}")
    # Half a file.
    save_file(kept, home)
    whole = home.read_bytes()
    home.write_bytes(whole[: len(whole) // 2])
    fails(f"{home.name}: not a whole safetensors file")
    home.unlink()
    fails(f"shard {home.name} is named by {INDEX_FILE} and is missing")
    (tmp_path / INDEX_FILE).write_text("{")
    fails("not JSON")
    (tmp_path / INDEX_FILE).write_text("{}")
    fails("weight_map is missing or empty")
    (tmp_path / INDEX_FILE).unlink()
    fails(f"no {SINGLE_FILE} and no {INDEX_FILE}")


def test_tied_checkpoint_may_repeat_its_embedding_but_not_differ(tmp_path):
    sizes = small_sizes("qwen2")
    tensors = source_tensors(sizes)
    head = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors | {"lm_head.weight": head}, tmp_path / SINGLE_FILE)
    params = load_weights(tmp_path, sizes, jnp.float32)
    assert "lm_head" not in params
    save_weights(params, sizes, tmp_path, "float32")
    assert "lm_head.weight" not in raw(tmp_path)
    head[3, 3] += 1
    save_file(tensors | {"lm_head.weight": head}, tmp_path / SINGLE_FILE)
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        load_weights(tmp_path, sizes, jnp.float32)


def test_rotary_tables_of_old_checkpoints_are_passed_over(tmp_path):
    sizes = small_sizes("llama")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    save_file(source_tensors(sizes) | extra, tmp_path / SINGLE_FILE)
    load_weights(tmp_path, sizes, jnp.float32)


def test_config_errors_name_the_file(tmp_path):
    with pytest.raises(ValueError, match=r"no config.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: not JSON"):
        load_model_config(tmp_path)
    sizes = small_sizes("qwen3")
    (tmp_path / "config.json").write_text(json.dumps(sizes.to_hf_config("bfloat16")))
    loaded, config = load_model_config(tmp_path)
    assert loaded.hidden_size == 32 and config["torch_dtype"] == "bfloat16"


def test_resolve_model(tmp_path, monkeypatch):
    import huggingface_hub

    asked = []

    def download(name, **options):
        asked.append((name, options))
        if name == "acme/absent":
            raise OSError("404 Client Error\nmore lines of it")
        return str(tmp_path / "downloaded")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model(tmp_path) == tmp_path and not asked
    assert resolve_model("acme/tiny") == tmp_path / "downloaded"
    assert asked[0][0] == "acme/tiny" and "*.safetensors" in asked[0][1]["allow_patterns"]
    with pytest.raises(ValueError, match=r"model 'acme/absent'.*404 Client Error$"):
        resolve_model("acme/absent")
    # A path that is not there is not asked for at the hub.
    for name in ("./models/none", str(tmp_path / "none"), "models/a/b"):
        with pytest.raises(ValueError, match="no such directory"):
            resolve_model(name)
    assert len(asked) == 2

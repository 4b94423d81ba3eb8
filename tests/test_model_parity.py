import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.golden import make_model_parity as golden
from tests.model_fixtures import random_params
from turnppo_jax.models.checkpoint_files import load_model_config, load_weights
from turnppo_jax.models.decoder import bind
from turnppo_jax.models.sizes import SIZES, ModelSizes
from turnppo_jax.models.weight_saving import save_weights

# The bar of the issue, in float32. Same bits of rotary frequencies, so positions of 5,000 cost nothing; what is
# left is the order of sums (measured: below 1e-5).
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def archive():
    with np.load(golden.PATH) as file:
        return dict(file)


def write_directory(directory, config, weights):
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(w) for name, w in weights.items()}, directory / "model.safetensors")


def our_logits(params, sizes, tokens, positions, mask):
    def run(params, tokens, positions, segment_ids):
        model = bind(params, sizes)
        return model.logits(model.hidden_states(tokens, positions, segment_ids))

    return np.asarray(jax.jit(run)(params, *(jnp.asarray(x, jnp.int32) for x in (tokens, positions, mask))))


@pytest.mark.parametrize("theta", golden.THETAS)
@pytest.mark.parametrize("family", golden.FAMILIES)
def test_logits_of_transformers_golden(family, theta, archive, tmp_path):
    prefix = f"{family}/weights/"
    weights = {k.removeprefix(prefix): w.astype(np.float32) for k, w in archive.items() if k.startswith(prefix)}
    write_directory(tmp_path, json.loads(str(archive[f"{family}/config"])) | {"rope_theta": theta}, weights)
    sizes, _ = load_model_config(tmp_path)
    params = load_weights(tmp_path, sizes, jnp.float32)
    for start in golden.STARTS:
        tokens, positions, mask = golden.rows(start)
        ours, expected = (
            our_logits(params, sizes, tokens, positions, mask),
            archive[f"{family}/logits/{theta:g}/{start}"],
        )
        assert positions.max() > (5000 if start else 10)
        np.testing.assert_allclose(ours[0], expected[0], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(ours[1, golden.PADDING :], expected[1, golden.PADDING :], rtol=0, atol=TOLERANCE)


def test_golden_logits_tell_the_cases_apart(archive):
    # A tolerance that another theta or another position would meet tests nothing.
    for family in golden.FAMILIES:
        cases = [archive[f"{family}/logits/{theta:g}/0"] for theta in golden.THETAS]
        assert np.max(np.abs(cases[0] - cases[1])) > 100 * TOLERANCE
        full_row, padded = cases[0][0, golden.PADDING :], cases[0][1, golden.PADDING :]
        assert np.max(np.abs(full_row - padded)) > 100 * TOLERANCE


@pytest.mark.parametrize("family", golden.FAMILIES)
def test_logits_of_transformers_live(family, tmp_path):
    pytest.importorskip("torch", reason="live parity needs torch (pip install torch)")
    for theta in golden.THETAS:
        model, _ = golden.reference_model(family, theta, seed=3)
        model.save_pretrained(tmp_path / str(theta))
        sizes, config = load_model_config(tmp_path / str(theta))
        assert sizes.rope_theta == theta and config["model_type"] == family
        params = load_weights(tmp_path / str(theta), sizes, jnp.float32)
        for start in (0, 5000):
            tokens, positions, mask = golden.rows(start)
            expected = golden.reference_logits(model, tokens, positions, mask)
            ours = our_logits(params, sizes, tokens, positions, mask)
            np.testing.assert_allclose(ours[0], expected[0], rtol=0, atol=TOLERANCE)
            np.testing.assert_allclose(ours[1, 5:], expected[1, 5:], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", golden.FAMILIES)
def test_transformers_loads_what_we_write(family, tmp_path):
    torch = pytest.importorskip("torch", reason="loading through transformers needs torch (pip install torch)")
    import transformers

    sizes = dataclasses.replace(SIZES[f"tiny-{family}"], vocab_size=60, num_token_ids=60, rope_theta=5e6)
    params = random_params(sizes)
    save_weights(params, sizes, tmp_path, "float32")
    (tmp_path / "config.json").write_text(json.dumps(sizes.to_hf_config("float32")))
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.float32 and ModelSizes.from_hf_config(model.config.to_dict()) == sizes
    tokens, positions, mask = golden.rows(0)
    expected = golden.reference_logits(model.eval(), tokens, positions, mask)
    np.testing.assert_allclose(our_logits(params, sizes, tokens, positions, mask)[0], expected[0], atol=TOLERANCE)

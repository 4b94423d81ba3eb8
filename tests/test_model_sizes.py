import dataclasses
import math

import jax
import pytest

from tests.model_fixtures import FAMILIES
from turnppo_jax.models.decoder import decoder_shapes
from turnppo_jax.models.sizes import SIZES, ModelSizes, sizes_by_name

# Parameters as published on the model cards (tied weights once).
PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
}
# Fields as transformers 4 wrote them for Qwen2.5-0.5B.
QWEN25 = {
    "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864, "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-06, "tie_word_embeddings": True, "max_position_embeddings": 32768, "hidden_act": "silu",
    "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21, "rope_scaling": None,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 1536, "rope_theta": 100000, "rms_norm_eps": 1e-05,
    "tie_word_embeddings": True, "max_position_embeddings": 8192, "hidden_act": "silu",
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_as_published(name):
    assert SIZES[name].num_parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", SIZES)
def test_parameters_are_those_of_the_shapes(name):
    sizes = SIZES[name]
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(decoder_shapes(sizes))) == sizes.num_parameters


def test_projection_shapes_of_published_models():
    # Qwen3 has heads of 128 whatever the width (KNOWN_FAULTS 28): 0.6B has 16 x 128 queries over a width of 1024.
    attention = decoder_shapes(SIZES["qwen3-0.6b"])["layers"]["attention"]
    assert attention["q"]["kernel"].shape == (28, 1024, 16, 128)
    assert attention["k"]["kernel"].shape == (28, 1024, 8, 128)
    assert "bias" not in attention["q"]
    attention = decoder_shapes(SIZES["qwen2.5-7b"])["layers"]["attention"]
    assert attention["v"]["bias"].shape == (28, 4, 128)
    assert set(attention["o"]) == {"kernel"}
    tied = {name for name, sizes in SIZES.items() if sizes.tie_word_embeddings and not name.startswith("tiny")}
    assert tied == {"qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b"}


def test_from_hf_config_reads_what_transformers_wrote():
    expected = dataclasses.replace(SIZES["qwen2.5-0.5b"], num_token_ids=151936)
    assert ModelSizes.from_hf_config(QWEN25) == expected
    llama = ModelSizes.from_hf_config(LLAMA)
    assert (llama.head_dim, llama.num_kv_heads, llama.qkv_bias, llama.qk_norm) == (64, 3, False, False)
    assert llama.rms_norm_eps == 1e-5 and llama.rope_theta == 1e5


def test_theta_is_found_under_either_spelling():
    plain = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    for field in ("rope_parameters", "rope_scaling"):
        config = plain | {field: {"rope_theta": 5e6, "rope_type": "default"}}
        assert ModelSizes.from_hf_config(config).rope_theta == 5e6


@pytest.mark.parametrize("family", FAMILIES)
def test_hf_config_round_trip(family):
    sizes = SIZES[f"tiny-{family}"]
    assert ModelSizes.from_hf_config(sizes.to_hf_config("float32")) == sizes


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (LLAMA, {"model_type": "gpt2"}, "model_type='gpt2'.*qwen2, qwen3, llama"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type='llama3'"),
        (LLAMA, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type='yarn'"),
        (LLAMA, {"attention_bias": True}, "attention_bias=True"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias=True"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (LLAMA, {"rope_interleaved": True}, "rope_interleaved"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (LLAMA, {"hidden_size": None}, "hidden_size is missing"),
        (LLAMA, {"num_key_value_heads": 2}, "num_heads=9 is not a multiple of num_kv_heads=2"),
        (LLAMA, {"head_dim": 63}, "head_dim=63"),
        (QWEN25, {"use_sliding_window": True}, "sliding_window"),
        (QWEN25, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(base, change, message):
    with pytest.raises(ValueError, match=message) as caught:
        ModelSizes.from_hf_config(base | change)
    assert "\n" not in str(caught.value)


def test_a_window_that_no_layer_uses_is_allowed():
    config = QWEN25 | {"use_sliding_window": True, "max_window_layers": 24}
    assert ModelSizes.from_hf_config(config).num_layers == 24


def test_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match=r"unknown model sizes 'qwen9'.*qwen3-8b"):
        sizes_by_name("qwen9")


def test_sizes_are_hashable_and_checked():
    assert len({SIZES["tiny-qwen2"], dataclasses.replace(SIZES["tiny-qwen2"])}) == 1
    with pytest.raises(ValueError, match="num_token_ids=600 exceeds vocab_size=512"):
        dataclasses.replace(SIZES["tiny-qwen2"], num_token_ids=600)
    with pytest.raises(ValueError, match="family='bert'"):
        dataclasses.replace(SIZES["tiny-qwen2"], family="bert")
    with pytest.raises(ValueError, match="num_layers=0"):
        dataclasses.replace(SIZES["tiny-qwen2"], num_layers=0)

"""Model sizes as data: what a decoder's shapes and arithmetic depend on, and nothing else."""

import dataclasses
from collections.abc import Mapping
from typing import Any

FAMILIES = ("qwen2", "qwen3", "llama")
_ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


@dataclasses.dataclass(frozen=True)
class ModelSizes:
    """Sizes of one decoder. Hashable, so a static argument under jit.

    Attributes:
      family: Hugging Face `model_type`: "qwen2" (q/k/v bias), "qwen3" (q/k norm) or "llama" (neither).
      vocab_size: rows of the embedding.
      num_token_ids: ids that a token has. Logits of ids from here up are -inf, in sampler and learner alike.
      hidden_size: model width D.
      num_layers: L.
      num_heads: query heads N.
      num_kv_heads: key/value heads; divides `num_heads`.
      head_dim: head size H; even.
      intermediate_size: width of the gated feed-forward layer.
      rope_theta: base of the rotary frequencies.
      rms_norm_eps: added to the mean square.
      tie_word_embeddings: the head is the embedding transposed.
      qkv_bias: q, k and v projections have a bias.
      qk_norm: RMS norm over each head of q and k before the rotation.
      max_position_embeddings: the longest context that the checkpoint was made for.

    Raises:
      ValueError: naming the field, its value and what is allowed.
    """

    family: str
    vocab_size: int
    num_token_ids: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    max_position_embeddings: int

    def __post_init__(self):
        if self.family not in FAMILIES:
            raise ValueError(f"family={self.family!r}; allowed: {', '.join(FAMILIES)}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{field.name}={value!r}; allowed: an integer of at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}; allowed: an even number (the rotation pairs its halves)")
        if self.num_token_ids > self.vocab_size:
            raise ValueError(f"num_token_ids={self.num_token_ids} exceeds vocab_size={self.vocab_size}")

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> "ModelSizes":
        """Sizes from the contents of a Hugging Face `config.json`.

        `num_token_ids` is `vocab_size`: the file does not say how many ids the tokenizer has.

        Raises:
          ValueError: a needed field is missing, or the file asks for something that this decoder does
            not compute (other model types, rope scaling, sliding windows, other activations, other biases).
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ValueError(f"config.json: model_type={family!r}; allowed: {', '.join(FAMILIES)}")
        _refuse_unsupported(config)
        num_heads, hidden_size = _need(config, "num_attention_heads"), _need(config, "hidden_size")
        default_head_dim = 128 if family == "qwen3" else hidden_size // num_heads
        return cls(
            family=family,
            vocab_size=_need(config, "vocab_size"),
            num_token_ids=_need(config, "vocab_size"),
            hidden_size=hidden_size,
            num_layers=_need(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or default_head_dim,
            intermediate_size=_need(config, "intermediate_size"),
            rope_theta=_rope_theta(config),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            # False is what the three model types take where the file is silent.
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            max_position_embeddings=int(config.get("max_position_embeddings", 32768)),
        )

    def to_hf_config(self, dtype: str) -> dict[str, Any]:
        """Contents of a `config.json` that transformers reads; `dtype` is "float32" or "bfloat16"."""
        config = {
            "architectures": [_ARCHITECTURES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "hidden_act": "silu",
            # Both spellings: transformers 4 reads the first, transformers 5 the second.
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            "torch_dtype": dtype,
            "dtype": dtype,
        }
        if self.family == "llama":
            config |= {"attention_bias": False, "mlp_bias": False}
        if self.family == "qwen3":
            config |= {"attention_bias": False}
        if self.family != "llama":
            config |= {"use_sliding_window": False, "sliding_window": None}
        return config

    @property
    def num_parameters(self) -> int:
        """Parameters of the decoder with its head; tied weights are counted once."""
        d, h = self.hidden_size, self.head_dim
        queries, keys = self.num_heads * h, self.num_kv_heads * h
        attention = d * (2 * queries + 2 * keys)
        attention += (queries + 2 * keys) * self.qkv_bias + 2 * h * self.qk_norm
        layer = attention + 3 * d * self.intermediate_size + 2 * d
        embeddings = self.vocab_size * d * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * layer + d


def sizes_by_name(name: str) -> ModelSizes:
    """Entry of `SIZES`.

    Raises:
      ValueError: unknown name; the known ones are listed.
    """
    if name not in SIZES:
        raise ValueError(f"unknown model sizes {name!r}; known: {', '.join(SIZES)}")
    return SIZES[name]


def _need(config: Mapping[str, Any], field: str) -> int:
    if config.get(field) is None:
        raise ValueError(f"config.json: field {field} is missing")
    return config[field]


def _rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rope fields of either spelling: `rope_parameters` (transformers 5) or `rope_scaling` (4)."""
    return dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})


def _rope_theta(config: Mapping[str, Any]) -> float:
    # 10,000 is the default of the three model types.
    return float(_rope_settings(config).get("rope_theta") or config.get("rope_theta") or 10000.0)


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    rope = _rope_settings(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"config.json: rope_type={kind!r}; allowed: 'default' (no rope scaling)")
    for source in (rope, config):
        if source.get("partial_rotary_factor", 1.0) not in (None, 1.0):
            raise ValueError(f"config.json: partial_rotary_factor={source['partial_rotary_factor']}; allowed: 1.0")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"config.json: hidden_act={activation!r}; allowed: 'silu'")
    # A bias on the output projection or in the feed-forward layers has no parameter here.
    for field in ("attention_bias", "mlp_bias", "rope_interleaved"):
        if config.get(field) and not (field == "attention_bias" and config.get("model_type") == "qwen2"):
            raise ValueError(f"config.json: {field}={config[field]!r}; allowed: false")
    types = config.get("layer_types")
    if types is not None:
        windowed = any(kind != "full_attention" for kind in types)
    else:
        first = config.get("max_window_layers", 0)
        windowed = bool(config.get("use_sliding_window") and config.get("sliding_window")) and first < config.get(
            "num_hidden_layers", 0
        )
    if windowed:
        raise ValueError("config.json: use_sliding_window is in effect; allowed: full attention in every layer")


def _qwen2(hidden, layers, heads, kv_heads, intermediate, tied, vocab=151936) -> ModelSizes:
    """Qwen2.5: theta 1e6, the tokenizer has 151,665 ids."""
    return ModelSizes(
        family="qwen2", vocab_size=vocab, num_token_ids=151665, hidden_size=hidden, num_layers=layers,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=hidden // heads, intermediate_size=intermediate,
        rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=tied, qkv_bias=True, qk_norm=False,
        max_position_embeddings=32768,
    )  # fmt: skip


def _qwen3(hidden, layers, heads, intermediate, tied) -> ModelSizes:
    """Qwen3: 8 key/value heads of size 128 throughout, theta 1e6, the tokenizer has 151,669 ids."""
    return ModelSizes(
        family="qwen3", vocab_size=151936, num_token_ids=151669, hidden_size=hidden, num_layers=layers,
        num_heads=heads, num_kv_heads=8, head_dim=128, intermediate_size=intermediate,
        rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=tied, qkv_bias=False, qk_norm=True,
        max_position_embeddings=40960,
    )  # fmt: skip


def _tiny(family, hidden, layers, heads, kv_heads, head_dim, intermediate, tied=True) -> ModelSizes:
    """For tests and laptops; the vocabulary is meant to be replaced (`dataclasses.replace`)."""
    return ModelSizes(
        family=family, vocab_size=512, num_token_ids=512, hidden_size=hidden, num_layers=layers,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, intermediate_size=intermediate,
        rope_theta=1e4, rms_norm_eps=1e-6, tie_word_embeddings=tied, qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3", max_position_embeddings=4096,
    )  # fmt: skip


# Published numbers, from the config.json files of the Qwen organisation on Hugging Face.
SIZES: dict[str, ModelSizes] = {
    "tiny-qwen2": _tiny("qwen2", 64, 2, 4, 2, 16, 128),
    "tiny-qwen3": _tiny("qwen3", 128, 4, 4, 2, 32, 384),
    "tiny-qwen3-narrow": _tiny("qwen3", 64, 3, 2, 2, 32, 192),
    "tiny-llama": _tiny("llama", 64, 2, 4, 4, 16, 128, tied=False),
    "qwen2.5-0.5b": _qwen2(896, 24, 14, 2, 4864, True),
    "qwen2.5-1.5b": _qwen2(1536, 28, 12, 2, 8960, True),
    "qwen2.5-3b": _qwen2(2048, 36, 16, 2, 11008, True),
    "qwen2.5-7b": _qwen2(3584, 28, 28, 4, 18944, False, vocab=152064),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288, False),
}

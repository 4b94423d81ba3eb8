"""Writes model_parity.npz: random tiny models of each family, and the logits that transformers gives for them.

    pip install torch transformers
    python -m tests.golden.make_model_parity

Weights are float16 numbers under their Hugging Face names; logits are float32 from eager attention.
Cases of each family: theta 1e4 and 5e6; positions from 0 and from 4,990; rows with padding on the left.
"""

import json
import pathlib

import numpy as np

PATH = pathlib.Path(__file__).with_name("model_parity.npz")
FAMILIES = ("qwen2", "qwen3", "llama")
THETAS = (1e4, 5e6)
STARTS = (0, 4990)
PADDING = 5  # columns on the left of the padded row
LENGTH = 16


def hf_config(family: str) -> dict:
    """Odd sizes where they may be odd; heads of another size than width / heads for qwen3; untied llama."""
    config = {
        "model_type": family, "vocab_size": 44, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 28, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "max_position_embeddings": 8192, "tie_word_embeddings": family != "llama",
    }  # fmt: skip
    return config | ({"head_dim": 8} if family == "qwen3" else {})


def reference_model(family: str, theta: float, seed: int = 0):
    """A transformers model of random float16 weights, every one of them far from its initial value."""
    import torch
    import transformers

    config = hf_config(family) | {"rope_parameters": {"rope_theta": theta, "rope_type": "default"}}
    model_config = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(model_config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            draw = torch.randn(weight.shape, generator=generator)
            draw = draw * weight.shape[-1] ** -0.5 if weight.ndim == 2 else draw * 0.3 + (1.0 if "norm" in name else 0)
            weight.copy_(draw.half().float())
    return model, model_config


def reference_logits(model, tokens: np.ndarray, positions: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """[B, T, V] float32."""
    import torch

    with torch.no_grad():
        out = model(torch.tensor(tokens), attention_mask=torch.tensor(mask), position_ids=torch.tensor(positions))
    return out.logits.numpy()


def rows(start: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, positions, mask) [2, LENGTH]: a full row, and one with PADDING columns on the left."""
    tokens = np.random.default_rng(7).integers(0, 44, (2, LENGTH))
    mask = np.ones((2, LENGTH), np.int64)
    mask[1, :PADDING] = 0
    positions = np.stack([np.arange(LENGTH), np.maximum(np.arange(LENGTH) - PADDING, 0)]) + start
    return tokens, positions, mask


def main() -> None:
    """Writes the file."""
    arrays = {}
    for family in FAMILIES:
        arrays[f"{family}/config"] = json.dumps(hf_config(family))
        for theta in THETAS:
            model, _ = reference_model(family, theta)
            tied = model.config.tie_word_embeddings
            for name, weight in model.state_dict().items():
                if not (tied and name == "lm_head.weight"):
                    arrays[f"{family}/weights/{name}"] = weight.numpy().astype(np.float16)
            for start in STARTS:
                arrays[f"{family}/logits/{theta:g}/{start}"] = reference_logits(model, *rows(start))
    np.savez_compressed(PATH, **arrays)
    print(f"wrote {PATH.name}: {PATH.stat().st_size} bytes")


if __name__ == "__main__":
    main()

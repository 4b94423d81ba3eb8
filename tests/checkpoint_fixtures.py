"""Checkpoints for the tests, and what must come of them; shapes and order of axes written down independently."""

import json

import numpy as np
from safetensors.numpy import save_file

from turnppo_jax.models.tensor_files import INDEX_FILE


def source_tensors(sizes, dtype=np.float32, seed=0):
    """Tensors by Hugging Face name with the shapes that the family publishes, written down independently."""
    d, f, h = sizes.hidden_size, sizes.intermediate_size, sizes.head_dim
    queries, keys = sizes.num_heads * h, sizes.num_kv_heads * h
    shapes = {"model.embed_tokens.weight": (sizes.vocab_size, d), "model.norm.weight": (d,)}
    if not sizes.tie_word_embeddings:
        shapes["lm_head.weight"] = (sizes.vocab_size, d)
    for i in range(sizes.num_layers):
        layer = {
            "input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,),
            "self_attn.q_proj.weight": (queries, d), "self_attn.k_proj.weight": (keys, d),
            "self_attn.v_proj.weight": (keys, d), "self_attn.o_proj.weight": (d, queries),
            "mlp.gate_proj.weight": (f, d), "mlp.up_proj.weight": (f, d), "mlp.down_proj.weight": (d, f),
        }  # fmt: skip
        if sizes.qkv_bias:
            layer |= {f"self_attn.{n}_proj.bias": (s,) for n, s in (("q", queries), ("k", keys), ("v", keys))}
        if sizes.qk_norm:
            layer |= {"self_attn.q_norm.weight": (h,), "self_attn.k_norm.weight": (h,)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def write_sharded(directory, tensors, parts=3):
    names = sorted(tensors)
    weight_map = {}
    for part in range(parts):
        file_name = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        chosen = {name: tensors[name] for name in names[part::parts]}
        save_file(chosen, directory / file_name)
        weight_map |= dict.fromkeys(chosen, file_name)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index))
    return weight_map


def expected_parameters(tensors, sizes):
    """The whole parameters as numpy arrays by path, in the dtype of the tensors: transposed, split, stacked."""
    d, h = sizes.hidden_size, sizes.head_dim

    def layers(name, change):
        return np.stack([change(tensors[f"model.layers.{i}.{name}.weight"]) for i in range(sizes.num_layers)])

    def biases(name, heads):
        return np.stack([tensors[f"model.layers.{i}.{name}.bias"].reshape(heads, h) for i in range(sizes.num_layers)])

    out = {
        "embed/embedding": tensors["model.embed_tokens.weight"],
        "final_norm/scale": tensors["model.norm.weight"],
        "layers/attention_norm/scale": layers("input_layernorm", lambda w: w),
        "layers/mlp_norm/scale": layers("post_attention_layernorm", lambda w: w),
        "layers/attention/o/kernel": layers("self_attn.o_proj", lambda w: w.T.reshape(sizes.num_heads, h, d)),
    }
    for name in ("gate", "up", "down"):
        out[f"layers/mlp/{name}/kernel"] = layers(f"mlp.{name}_proj", lambda w: w.T)
    for name, heads in (("q", sizes.num_heads), ("k", sizes.num_kv_heads), ("v", sizes.num_kv_heads)):
        kernels = layers(f"self_attn.{name}_proj", lambda w, heads=heads: w.T.reshape(d, heads, h))
        out[f"layers/attention/{name}/kernel"] = kernels
        if sizes.qkv_bias:
            out[f"layers/attention/{name}/bias"] = biases(f"self_attn.{name}_proj", heads)
    if sizes.qk_norm:
        for name in ("q_norm", "k_norm"):
            out[f"layers/attention/{name}/scale"] = layers(f"self_attn.{name}", lambda w: w)
    if not sizes.tie_word_embeddings:
        out["lm_head/kernel"] = tensors["lm_head.weight"]
    return out

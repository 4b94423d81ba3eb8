"""A policy without its weights, for those who bring their own."""

import pytest

from turnppo_jax import policy


def refuse(*_, **__):
    raise AssertionError("weights were made or read")


def test_weights_that_a_checkpoint_has_are_neither_made_nor_read(tmp_path, monkeypatch):
    whole = policy.load_policy("tiny-qwen3-narrow", seed=0)
    policy.save_policy(whole, tmp_path / "saved")
    monkeypatch.setattr(policy, "init_decoder", refuse)
    monkeypatch.setattr(policy, "load_weights", refuse)
    for name in ("tiny-qwen3-narrow", str(tmp_path / "saved")):
        bare = policy.load_policy(name, seed=0, weights=False)
        assert bare.params is None
        assert bare.sizes == whole.sizes and bare.chat.eos_ids == whole.chat.eos_ids
        with pytest.raises(AssertionError, match="made or read"):
            policy.load_policy(name, seed=0)

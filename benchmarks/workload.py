"""Models and work of the comparison with other packages, as ../shared/bench/bench_config.json states them.

The configuration, the prompts, the timer and the form of a result row are the ones that the other packages'
scripts use; they are imported from that folder (or from the one in the environment variable TURNPPO_SHARED).
"""

import os
import pathlib
import sys

import jax
import numpy as np

from turnppo_jax.models.decoder import init_decoder
from turnppo_jax.models.sizes import ModelSizes
from turnppo_jax.parallel.mesh import make_mesh
from turnppo_jax.rollout.sampler import Sampler, SamplerSettings, Sampling, episode_keys
from turnppo_jax.rollout.scheduler import Response, Scheduler

_SHARED = pathlib.Path(os.environ.get("TURNPPO_SHARED", pathlib.Path(__file__).resolve().parents[2] / "shared"))
if not (_SHARED / "bench" / "common.py").is_file():
    sys.exit(f"error: no shared bench folder at {_SHARED}; set TURNPPO_SHARED to the folder that holds bench/")
sys.path.insert(0, str(_SHARED / "bench"))

from common import CFG, emit, prompts, timed  # noqa: E402  # found through the line above

__all__ = ["CFG", "Conversations", "emit", "make_model", "prompts", "timed"]

NEVER = 1_000_000  # an end-of-turn id that no token has: every response has its full length


def make_model(preset: str, seed: int = 0) -> tuple[ModelSizes, dict]:
    """Sizes and fresh float32 parameters of a preset (Qwen3 shape, tied embeddings)."""
    shape = CFG["presets"][preset]
    sizes = ModelSizes(
        family="qwen3",
        vocab_size=shape["vocab_size"],
        num_token_ids=shape["vocab_size"],
        hidden_size=shape["embed_dim"],
        num_layers=shape["num_layers"],
        num_heads=shape["num_heads"],
        num_kv_heads=shape["num_kv_heads"],
        head_dim=shape["head_dim"],
        intermediate_size=shape["hidden_dim"],
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        qkv_bias=False,
        qk_norm=True,
        max_position_embeddings=4096,
    )
    return sizes, init_decoder(sizes, jax.random.key(seed))


class Conversations:
    """The sampler as a rollout drives it, without environments: all slots are asked, then all answers awaited."""

    def __init__(self, sizes: ModelSizes, params: dict, num_slots: int, context_length: int, **settings: int):
        self.sampler = Sampler(
            sizes,
            make_mesh(devices=jax.devices()[:1]),
            SamplerSettings(num_slots=num_slots, context_length=context_length, **settings),
            eos_ids=(NEVER,),
        )
        self.sampler.set_params(params)
        self._keys = episode_keys(0, 0, 0, num_slots)

    def begin(self, sampling: Sampling) -> None:
        """New conversations in all slots."""
        self._scheduler = Scheduler(self.sampler, sampling, decode_text=str)
        for slot, key in enumerate(self._keys):
            self._scheduler.open(slot, key)

    def turn(self, new_tokens: np.ndarray, num_tokens: int) -> list[Response]:
        """Appends a prompt [P] to every slot ([S, P]) and returns the responses by slot."""
        for slot, prompt in enumerate(new_tokens):
            self._scheduler.extend(slot, prompt.astype(np.int32), num_tokens)
        responses = []
        while self._scheduler.busy:
            self._scheduler.launch()
            responses += self._scheduler.collect()
        assert len(responses) == len(new_tokens) and all(len(response.ids) == num_tokens for response in responses)
        return sorted(responses, key=lambda response: response.slot)

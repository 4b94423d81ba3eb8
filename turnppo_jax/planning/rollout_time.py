"""How long the prefills of a rollout take, and what a decode step reads against what it must."""

import dataclasses

import jax

from turnppo_jax.models.logical_axes import path_name
from turnppo_jax.models.sizes import ModelSizes
from turnppo_jax.planning.estimate import Estimate
from turnppo_jax.planning.rollout_load import RolloutLoad
from turnppo_jax.planning.states import States, bytes_per_chip
from turnppo_jax.rollout.sampler import SamplerSettings


@dataclasses.dataclass(frozen=True)
class DecodeBytes:
    """What one decode step reads on one chip, against what it cannot do without.

    Attributes:
      weights: every parameter once, an embedding that is looked up and not multiplied left out.
      live_cache: keys and values that the slots hold, each once on one chip.
      moved: all traffic of the compiled program, a step.
    """

    weights: float
    live_cache: float
    moved: float

    @property
    def ratio(self) -> float:
        """Moved bytes over weights plus live cache."""
        return self.moved / (self.weights + self.live_cache)


def prefill_seconds(load: RolloutLoad, chunk: int, rows: int, largest: Estimate, overlap: float) -> float:
    """Time of all prefills of a host, every call with all its rows in use.

    Compute and links shrink with the bucket, the weights are read whatever it is.

    Args:
      load: of the host.
      chunk: tokens of a row of the largest prefill.
      rows: of a call.
      largest: estimate of that program.
      overlap: share of the collectives that is hidden.
    """
    total = 0.0
    for bucket, prompts in load.prefills:
        calls, share = prompts * load.episodes / rows, bucket / chunk
        busy = max(largest.compute_s * share, largest.memory_s)
        total += calls * (busy + (1 - overlap) * largest.link_s * share)
    return total


def decode_bytes(
    sizes: ModelSizes, states: States, sampler: SamplerSettings, estimate: Estimate, live_tokens: float, *, chips: int
) -> DecodeBytes:
    """What a decode step reads on one chip when each slot holds `live_tokens`.

    Args:
      sizes: of the model.
      states: shapes of the sampler's parameters and cache.
      sampler: of the host.
      estimate: of the decode program at that length.
      live_tokens: of each slot.
      chips: of the sampler.
    """
    leaves = jax.tree_util.tree_leaves_with_path(states.rollout)
    tied = sizes.tie_word_embeddings
    read = [leaf for path, leaf in leaves if tied or not path_name(path).startswith("embed/")]
    # Heads that the cache repeats for tensor, or fills up to whole lanes, are not what must be read.
    position = 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim * states.cache.k.dtype.itemsize
    return DecodeBytes(
        weights=bytes_per_chip(read),
        live_cache=sampler.num_slots * live_tokens * position / chips,
        moved=estimate.memory_bytes / sampler.decode_chunk,
    )

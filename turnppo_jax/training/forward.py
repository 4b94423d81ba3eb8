"""The forward pass of a micro-batch: the one that scoring and updates share, so that they agree to rounding."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from turnppo_jax import kernels
from turnppo_jax.models.attention import check_attention
from turnppo_jax.models.critic import Critic, ValueHead, bind_critic
from turnppo_jax.models.decoder import Decoder, bind
from turnppo_jax.models.head import token_logprobs
from turnppo_jax.models.sizes import ModelSizes
from turnppo_jax.parallel.sharding import named_sharding
from turnppo_jax.training.algorithm import AlgorithmConfig
from turnppo_jax.training.batching import BatchShape
from turnppo_jax.types import TrajectoryBatch


@dataclasses.dataclass(frozen=True)
class ForwardSettings:
    """How whole rows are computed; the same in scoring and updates.

    Attributes:
      compute_dtype: "float32" | "bfloat16", of the layers and of the head's operands.
      remat: what the backward pass computes again, a name of `models.decoder.REMAT_POLICIES`.
      attention: a name of `models.attention.ATTENTION`, or "auto": "splash" on TPUs where it can run, else "blocked".
      head_chunk: sampled tokens of a row that the head takes at a time.
    """

    compute_dtype: str = "float32"
    remat: str = "none"
    attention: str = "auto"
    head_chunk: int = 128

    def __post_init__(self):
        if self.compute_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"compute_dtype={self.compute_dtype!r}; allowed: 'float32', 'bfloat16'")
        if self.head_chunk < 1:
            raise ValueError(f"head_chunk={self.head_chunk}; allowed: at least 1")
        check_attention(self.attention)

    def hidden_states(self, model: Decoder, micro: TrajectoryBatch) -> jax.Array:
        """[R, T, D] of the rows of a micro-batch."""
        return model.hidden_states(
            micro.tokens,
            micro.positions,
            micro.segment_ids,
            compute_dtype=jnp.dtype(self.compute_dtype),
            remat=self.remat,
            attention=self.attention,
        )


@dataclasses.dataclass(frozen=True)
class LearnerSettings:
    """Everything static about the learner's programs but sizes and mesh."""

    shape: BatchShape
    algorithm: AlgorithmConfig
    forward: ForwardSettings = dataclasses.field(default_factory=ForwardSettings)

    @property
    def scores_actor(self) -> bool:
        """Whether the old log-probs need a pass of their own before the update."""
        cfg = self.algorithm
        # A KL term in the reward comes before the advantages, the weight of a trajectory may span micro-batches.
        before_update = not cfg.single_update or cfg.kl_in_reward or cfg.importance_level == "sequence"
        return cfg.share_backbone or (cfg.old_logprobs == "learner" and before_update)


def micro_batch(batch: Any, index: jax.Array, micro_rows: int, mesh: Mesh) -> Any:
    """Rows `index * micro_rows` and on of every array of `batch`, spread over the devices of the mesh by row."""

    def rows(x):
        part = jax.lax.dynamic_slice_in_dim(x, index * micro_rows, micro_rows, axis=0)
        return jax.lax.with_sharding_constraint(part, named_sharding(mesh, ("rows",), part.shape))

    return jax.tree.map(rows, batch)


def rows_of(batch: TrajectoryBatch) -> TrajectoryBatch:
    """The batch without what does not run along rows, ready for `micro_batch`."""
    return dataclasses.replace(batch, group_ids=None)


def actor_hidden(
    params: Any, sizes: ModelSizes, mesh: Mesh, micro: TrajectoryBatch, settings: ForwardSettings
) -> jax.Array:
    """[R, T, D] hidden states of the policy."""
    return settings.hidden_states(bind(params, sizes, mesh), micro)


def actor_logprobs(
    params: Any,
    sizes: ModelSizes,
    mesh: Mesh,
    hidden: jax.Array,
    micro: TrajectoryBatch,
    temperature: jax.Array,
    settings: ForwardSettings,
    *,
    with_entropy: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """(log-probabilities, entropies) of the sampled tokens, [R, A] float32 each; 0 off the end."""
    at = micro.sampled_positions
    targets = jnp.where(at >= 0, jnp.take_along_axis(micro.tokens, jnp.maximum(at, 0), axis=1), -1)
    before = gather_columns(hidden, at - 1)
    out = token_logprobs(
        bind(params, sizes, mesh), before, targets, temperature, chunk=settings.head_chunk, with_entropy=with_entropy
    )
    return out if with_entropy else (out, None)


def read_values(
    head: Critic | ValueHead, hidden: jax.Array, micro: TrajectoryBatch, *, level: str
) -> tuple[jax.Array, jax.Array]:
    """(values, bootstrap values) in units of the critic's output, float32; 0 where there is none.

    Values are [R, K] before each turn, or [R, A] before each sampled token, by `level`; bootstrap values [R, K].
    """
    columns = micro.value_positions if level == "turn" else micro.sampled_positions - 1
    present = columns >= 0
    values = _apply(head, gather_columns(hidden, columns))
    ends = micro.bootstrap_positions
    bootstrap = _apply(head, gather_columns(hidden, ends))
    return jnp.where(present, values, 0.0), jnp.where(ends >= 0, bootstrap, 0.0)


def critic_hidden(
    params: Any, sizes: ModelSizes, mesh: Mesh, micro: TrajectoryBatch, settings: ForwardSettings
) -> jax.Array:
    """[R, T, D] hidden states of a critic with a backbone of its own."""
    return settings.hidden_states(bind_critic(params, sizes, mesh).backbone, micro)


def gather_columns(hidden: jax.Array, columns: jax.Array) -> jax.Array:
    """[R, J, D]: hidden[r, columns[r, j]]; zeros where the column is negative, with no gradient."""
    picked = jnp.take_along_axis(hidden, jnp.maximum(columns, 0)[..., None], axis=1)
    return jnp.where((columns >= 0)[..., None], picked, jnp.zeros((), hidden.dtype))


def scale_gradient(x: jax.Array, factor: float) -> jax.Array:
    """`x`, whose gradient is multiplied by `factor`."""
    held = jax.lax.stop_gradient(x)
    return held + factor * (x - held)


def _apply(head: Critic | ValueHead, hidden: jax.Array) -> jax.Array:
    return head.values(hidden) if isinstance(head, Critic) else head(hidden)


def behavior_logprobs(micro: TrajectoryBatch) -> jax.Array:
    """[R, A] behavior log-probs of the sampled tokens; 0 off the end."""
    return kernels.broadcast_turns(micro.behavior_logprobs, micro.sampled_positions)

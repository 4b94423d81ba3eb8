"""The optimizer of one model: AdamW behind a global-norm clip, and steps that a NaN cannot spoil."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from turnppo_jax.parallel.sharding import shard

SCHEDULES = ("constant", "linear", "cosine")
MOMENT_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Settings of one model's optimizer. Every count is in optimizer steps of that model.

    Attributes:
      learning_rate: the peak.
      warmup_steps: steps of linear warm-up; the first has 1/warmup_steps of the peak, the last the peak.
      total_steps: where a falling schedule reaches 0; "constant" does not read it.
      schedule: "constant" | "linear" | "cosine", after the warm-up.
      betas: Adam's decay rates.
      eps: added to the root of the second moment. Losses that divide by the tokens of a trajectory have small
        gradients: too large a value slows them (watch optim/update_rms).
      weight_decay: decoupled; kernels and embeddings only.
      max_grad_norm: the gradient is scaled down to this global norm; None never.
      moment_dtype: "float32" | "bfloat16", of the first moment. The second stays float32: it moves by 1 - beta2, a
        thousandth, of itself, which bfloat16 rounds away.

    Raises:
      ValueError: naming the field, its value and what is allowed.
    """

    learning_rate: float = 1e-6
    warmup_steps: int = 0
    total_steps: int = 0
    schedule: str = "constant"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    moment_dtype: str = "float32"

    def __post_init__(self):
        object.__setattr__(self, "betas", tuple(self.betas))
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r}; allowed: {', '.join(SCHEDULES)}")
        if self.moment_dtype not in MOMENT_DTYPES:
            raise ValueError(f"moment_dtype={self.moment_dtype!r}; allowed: {', '.join(MOMENT_DTYPES)}")
        if not self.learning_rate >= 0 or math.isinf(self.learning_rate):
            raise ValueError(f"learning_rate={self.learning_rate}; allowed: a finite number of at least 0")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas}; allowed: two numbers from 0 to below 1")
        for name in ("warmup_steps", "total_steps", "eps", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)}; allowed: at least 0")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm={self.max_grad_norm}; allowed: above 0, or None for no clip")
        if self.schedule != "constant" and self.total_steps < 1:
            raise ValueError(f"total_steps={self.total_steps} with schedule={self.schedule!r}; allowed: at least 1")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ModelState:
    """A model in training: float32 parameters, optimizer state, and two counters of its own."""

    params: Any
    opt_state: Any
    step: Any  # int32, optimizer steps applied
    skipped: Any  # int32, steps that a non-finite loss or gradient left out


def learning_rate(cfg: OptimizerConfig, step: jax.Array | int) -> jax.Array:
    """Learning rate of the update that follows `step` applied ones, float32."""
    step = jnp.asarray(step, jnp.float32)
    warm = jnp.minimum(1.0, (step + 1.0) / max(cfg.warmup_steps, 1))
    progress = jnp.clip((step - cfg.warmup_steps) / max(cfg.total_steps - cfg.warmup_steps, 1), 0.0, 1.0)
    decay = {
        "constant": jnp.ones_like(progress),
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + jnp.cos(jnp.pi * progress)),
    }[cfg.schedule]
    return cfg.learning_rate * warm * decay


def make_optimizer(cfg: OptimizerConfig) -> optax.GradientTransformation:
    """Clip, Adam, decoupled weight decay, schedule, in this order."""
    parts = [] if cfg.max_grad_norm is None else [optax.clip_by_global_norm(cfg.max_grad_norm)]
    parts.append(optax.scale_by_adam(*cfg.betas, eps=cfg.eps, mu_dtype=jnp.dtype(cfg.moment_dtype)))
    if cfg.weight_decay:
        parts.append(optax.add_decayed_weights(cfg.weight_decay, mask=_decays))
    parts.append(optax.scale_by_learning_rate(lambda step: learning_rate(cfg, step)))
    return optax.chain(*parts)


def init_state(optimizer: optax.GradientTransformation, params: Any) -> ModelState:
    """Fresh optimizer state and counters around `params`, which it holds without a copy."""
    return ModelState(params, optimizer.init(params), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def fresh_state(optimizer: optax.GradientTransformation, params: Any, mesh: Mesh) -> ModelState:
    """`init_state` on the mesh, around a copy of `params`: an update donates its buffers, and the caller's stay.

    Parameters that lie on the mesh by the sharding rules never leave their devices; moments are made where they are.
    """
    copied = jax.tree.map(jnp.copy, shard(mesh, params))
    return shard(mesh, init_state(optimizer, copied))  # moves nothing but the counters


def apply_gradients(
    optimizer: optax.GradientTransformation, state: ModelState, grads: Any, loss: jax.Array
) -> tuple[ModelState, dict[str, jax.Array]]:
    """One optimizer step; a non-finite loss or gradient changes nothing but the count of skipped steps.

    Args:
      optimizer: from `make_optimizer`.
      state: of the model.
      grads: tree of `state.params`.
      loss: scalar.

    Returns:
      (state, metrics): grad_norm before the clip, update_rms (root mean square change of a parameter, 0 when
      skipped), applied (1.0 or 0.0).
    """
    grad_norm = global_norm(grads)
    applied = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)

    def choose(new, old):
        return jax.tree.map(lambda n, o: jnp.where(applied, n, o), new, old)

    size = sum(leaf.size for leaf in jax.tree.leaves(updates))
    update_rms = global_norm(updates) / math.sqrt(max(size, 1))
    new_state = ModelState(
        params=choose(params, state.params),
        opt_state=choose(opt_state, state.opt_state),
        step=state.step + applied.astype(jnp.int32),
        skipped=state.skipped + (~applied).astype(jnp.int32),
    )
    metrics = {
        "grad_norm": grad_norm,
        "update_rms": jnp.where(applied, update_rms, 0.0),
        "applied": applied.astype(jnp.float32),
    }
    return new_state, metrics


def global_norm(tree: Any) -> jax.Array:
    """Root of the sum of squares over all leaves, float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)))


def _decays(params: Any) -> Any:
    """Kernels and embeddings decay; norm scales and biases do not."""
    return jax.tree.map_with_path(lambda path, _: path[-1].key in ("kernel", "embedding"), params)

"""The learner: a list of trajectories in, updated models and metrics out.

minibatches (sets of trajectories) → pack each once → score → advantages of the whole rollout →
epochs × minibatches of update → metrics
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from turnppo_jax.models.sizes import ModelSizes
from turnppo_jax.parallel.sharding import place
from turnppo_jax.training import scoring, update
from turnppo_jax.training.batching import PackingStats, kept_turns, pack
from turnppo_jax.training.diagnostics import by_turn_metrics, critic_metrics
from turnppo_jax.training.forward import LearnerSettings
from turnppo_jax.training.optimizer import ModelState, OptimizerConfig, fresh_state, learning_rate, make_optimizer
from turnppo_jax.training.rollout_checks import check_one_row, check_targets
from turnppo_jax.training.rollout_table import RolloutTable, empty_table
from turnppo_jax.training.selection import select
from turnppo_jax.training.update_metrics import join_packing, join_updates, scoring_metrics
from turnppo_jax.types import Trajectory, TrajectoryBatch

# Streams of random numbers of a training step.
_MINIBATCHES, _PLACEBO = 0, 1


@dataclasses.dataclass
class LearnerResult:
    """What one training step gives beside the states."""

    metrics: dict[str, float]
    # By trajectory, by turn: V before the turn and the advantage that the policy learnt from (whitened). None at turns
    # without a sampled token and in trajectories that are filtered out; values are None where no critic is taught.
    turn_values: list[list[float | None]]
    turn_advantages: list[list[float | None]]


@dataclasses.dataclass
class _Minibatch:
    """One set of trajectories on the devices."""

    batch: TrajectoryBatch
    num_micro: jax.Array
    critic_batch: TrajectoryBatch  # rows of the critic; the same ones where it reads them all
    critic_num_micro: jax.Array
    stats: PackingStats
    critic_stats: PackingStats
    old_logprobs: jax.Array | None = None
    ref_logprobs: jax.Array | None = None


class Learner:
    """Holds the compiled programs of one run; the states are the caller's.

    Args:
      sizes: of the model; actor and critic have the same.
      mesh: of the learner.
      settings: shapes, algorithm, how rows are computed.
      actor_optimizer: settings of the policy's optimizer.
      critic_optimizer: settings of the critic's; not needed without a critic.
      seed: of the run; which trajectories form a minibatch is a function of it and the step.

    Raises:
      ValueError: a critic without settings for its optimizer.
    """

    def __init__(
        self,
        sizes: ModelSizes,
        mesh: Mesh,
        settings: LearnerSettings,
        actor_optimizer: OptimizerConfig,
        critic_optimizer: OptimizerConfig | None = None,
        *,
        seed: int = 0,
    ):
        cfg = settings.algorithm
        if cfg.has_critic and critic_optimizer is None:
            raise ValueError(f"critic_optimizer=None with estimator={cfg.estimator!r}; allowed: an OptimizerConfig")
        self.settings = settings
        self._cfg, self._shape, self._mesh, self._seed = cfg, settings.shape, mesh, seed
        self._actor_config, self._critic_config = actor_optimizer, critic_optimizer
        self._actor_optimizer = make_optimizer(actor_optimizer)
        self._critic_optimizer = make_optimizer(critic_optimizer) if cfg.has_critic else None
        self._own_critic = cfg.has_critic and not cfg.share_backbone
        # A turn-level critic reads nothing after the last state: its rows can be cut there.
        self._trims = self._own_critic and cfg.advantage_level == "turn"
        replicated = NamedSharding(mesh, PartitionSpec())
        self._gather = jax.jit(lambda tree: tree, out_shardings=replicated)
        self._placebo_key = jax.jit(_placebo_key, out_shardings=replicated)
        self._programs: dict[str, Callable] = {
            "collect": scoring.make_collect(settings),
            "estimate": scoring.make_estimate(settings),
            "actor_update": update.make_actor_update(
                sizes, mesh, settings, self._actor_optimizer, self._critic_optimizer if cfg.share_backbone else None
            ),
        }
        if settings.scores_actor:
            self._programs["actor_score"] = scoring.make_actor_score(sizes, mesh, settings)
        if cfg.critic_warmup_steps and cfg.critic_target != "monte_carlo":
            returns = dataclasses.replace(cfg, critic_target="monte_carlo")
            self._programs["estimate_warmup"] = scoring.make_estimate(dataclasses.replace(settings, algorithm=returns))
        if cfg.kl_coef > 0:
            self._programs["reference_score"] = scoring.make_actor_score(sizes, mesh, settings, reference=True)
        if self._own_critic:
            self._programs["critic_score"] = scoring.make_critic_score(sizes, mesh, settings)
            self._programs["critic_update"] = update.make_critic_update(sizes, mesh, settings, self._critic_optimizer)

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term asks for a reference model."""
        return self._cfg.kl_coef > 0

    def init_states(self, actor_params: Any, critic_params: Any = None) -> tuple[ModelState, ModelState | None]:
        """Fresh states on the mesh, of copies: updates donate their buffers, and the caller's (a reference's) stay.

        Args:
          actor_params: of the decoder.
          critic_params: from `init_critic`; with a shared backbone only its "value_head" is used.

        Raises:
          ValueError: a critic is needed and none is given.
        """
        if self._cfg.has_critic and critic_params is None:
            raise ValueError(f"critic_params=None with estimator={self._cfg.estimator!r}; allowed: those of a critic")
        actor = fresh_state(self._actor_optimizer, actor_params, self._mesh)
        if not self._cfg.has_critic:
            return actor, None
        if self._cfg.share_backbone:
            critic_params = {"value_head": critic_params["value_head"]}
        return actor, fresh_state(self._critic_optimizer, critic_params, self._mesh)

    def step(
        self,
        actor: ModelState,
        critic: ModelState | None,
        trajectories: Sequence[Trajectory],
        *,
        step: int,
        temperature: float = 1.0,
        ref_params: Any = None,
        greedy_scores: Any = None,
        branch_values: Any = None,
    ) -> tuple[ModelState, ModelState | None, LearnerResult]:
        """One training step on a rollout. The states that come in are donated: use those that come out.

        Args:
          actor: state of the policy.
          critic: state of the critic, None without one.
          trajectories: the rollout, at most `shape.trajectories`.
          step: the training step, from 0; decides the minibatches and the critic's warm-up.
          temperature: of the sampler; the log-probs are computed at it, values never.
          ref_params: of the reference model where `needs_reference`.
          greedy_scores: see `selection.select`.
          branch_values: see `selection.select`.

        Returns:
          (actor, critic, result).

        Raises:
          PackingError: trajectories that do not fit the shape.
          ValueError: no reference, greedy scores or branch values where they are needed, a temperature that is not
            above 0, a trajectory over several rows with a sequence ratio, a return that a cross-entropy critic cannot
            say.
        """
        if not temperature > 0:
            raise ValueError(f"temperature={temperature}; allowed: above 0 in training")
        if self.needs_reference and ref_params is None:
            raise ValueError(f"ref_params=None with kl_coef={self._cfg.kl_coef}; allowed: parameters of the reference")
        if self._cfg.ratio_level == "sequence":
            check_one_row(trajectories)
        started = time.perf_counter()
        temperature = np.float32(temperature)
        selection = select(
            trajectories, self._shape, self._cfg, greedy_scores=greedy_scores, branch_values=branch_values
        )
        minibatches = self._minibatches(trajectories, selection.members, step)
        packed = time.perf_counter()

        table = self._replicate(self.empty_table())
        scored = []
        for mini in minibatches:
            table = self._score(actor, critic, mini, table, temperature, ref_params, scored)
        key = self._placebo_key(np.uint32(self._seed), np.uint32(step))
        actor_learns = step >= self._cfg.critic_warmup_steps
        estimate = self._programs["estimate"]
        if not actor_learns:
            estimate = self._programs.get("estimate_warmup", estimate)
        estimated = estimate(table, self._replicate(selection.facts), key)
        jax.block_until_ready(estimated)
        check_targets(estimated.metrics, self._cfg)
        success = None
        if self._cfg.imitation_coef > 0:
            flags = [trajectory.success for trajectory in trajectories]
            success = self._replicate(np.array(flags + [False] * (self._shape.trajectories - len(flags))))
        estimated_at = time.perf_counter()

        # Rates are copied to the host before the update donates the counters; where nothing is left to train on, there
        # is no update that would count steps.
        metrics = {}
        if actor_learns:
            metrics |= {"optim/lr": float(learning_rate(self._actor_config, actor.step)), "optim/steps_actor": 0.0}
        if critic is not None:
            rate = float(learning_rate(self._critic_config, critic.step))
            metrics |= {"optim/lr_critic": rate, "optim/steps_critic": 0.0}
        updates = []
        for _ in range(self._cfg.epochs):
            for mini in minibatches:
                if mini.stats.rows == 0:
                    continue
                sums: dict[str, jax.Array] = {}
                if self._own_critic:
                    critic, sums = self._programs["critic_update"](
                        critic, mini.critic_batch, estimated, table, mini.critic_num_micro
                    )
                if actor_learns:
                    head = critic if self._cfg.share_backbone else None
                    actor, head, more = self._programs["actor_update"](
                        actor, head, mini.batch, estimated, table, mini.old_logprobs, mini.ref_logprobs,
                        mini.num_micro, temperature, success,
                    )  # fmt: skip
                    critic = head if self._cfg.share_backbone else critic
                    sums = sums | more
                updates.append(sums)
        estimated, table, scored, updates = self._fetch((estimated, table, scored, updates))
        metrics |= {name: float(value) for name, value in estimated.metrics.items()}
        metrics |= scoring_metrics(scored or updates[:1])
        metrics |= join_updates(updates) | selection.metrics
        metrics |= by_turn_metrics("advantage", estimated.turn_advantages, np.asarray(table.mask))
        if self._cfg.has_critic:
            metrics |= critic_metrics(table, estimated, self._cfg.value_scale)
        metrics |= join_packing(
            [mini.stats for mini in minibatches],
            [mini.critic_stats for mini in minibatches] if self._trims else [],
            self._shape,
        )
        metrics |= {
            "time/pack_s": packed - started,
            "time/score_s": estimated_at - packed,
            "time/update_s": time.perf_counter() - estimated_at,
        }
        values = estimated.turn_values if self._cfg.has_critic else None
        if self._cfg.estimator == "sequence_critic":  # it is taught the value of the prompt alone
            values = np.where(np.arange(values.shape[1]) == 0, values, np.nan)
        result = LearnerResult(
            metrics=metrics,
            turn_values=_by_turn(trajectories, values, selection.members),
            turn_advantages=_by_turn(trajectories, estimated.turn_advantages, selection.members),
        )
        return actor, critic, result

    def empty_table(self) -> RolloutTable:
        """The rollout's table before any minibatch is in it."""
        return empty_table(self._shape, self._cfg)

    def compile_counts(self) -> dict[str, int]:
        """How many shapes each program has been compiled for."""
        return {name: program._cache_size() for name, program in self._programs.items()}

    def _replicate(self, tree: Any) -> Any:
        """On every device of the mesh: integers and tables are small, and any device may own any row."""
        return place(tree, NamedSharding(self._mesh, PartitionSpec()))

    def _fetch(self, tree: Any) -> Any:
        """On the host, after what lies in parts on several hosts has been gathered."""
        return jax.device_get(tree if jax.process_count() == 1 else self._gather(tree))

    def _minibatches(self, trajectories: Sequence[Trajectory], trained: np.ndarray, step: int) -> list[_Minibatch]:
        order = np.random.default_rng([self._seed, step, _MINIBATCHES]).permutation(trained)
        out = []
        for members in np.array_split(order, self._cfg.num_minibatches):
            members = np.sort(members)  # what is in a minibatch matters, not in which order it is packed
            batch, stats = pack(trajectories, self._shape, members=members, bootstrap=self._cfg.bootstraps)
            batch = self._replicate(batch)
            critic_batch, critic_stats = batch, stats
            if self._trims:
                critic_batch, critic_stats = pack(
                    trajectories,
                    self._shape,
                    members=members,
                    bootstrap=self._cfg.bootstraps,
                    values_only=True,
                )
                critic_batch = self._replicate(critic_batch)
            counts = self._replicate((np.int32(stats.num_micro), np.int32(critic_stats.num_micro)))
            out.append(_Minibatch(batch, counts[0], critic_batch, counts[1], stats, critic_stats))
        return out

    def _score(self, actor, critic, mini: _Minibatch, table, temperature, ref_params, scored: list) -> Any:
        """Fills in the minibatch's log-probs; returns the table with its turns and values."""
        values = None
        if self.settings.scores_actor:
            head = critic.params if self._cfg.share_backbone else None
            out = dict(self._programs["actor_score"](actor.params, head, mini.batch, mini.num_micro, temperature))
            scored_logprobs = out.pop("logprobs")
            if self._cfg.old_logprobs == "learner":
                mini.old_logprobs = scored_logprobs
            if head is not None:
                values = {name: out.pop(name) for name in ("values", "bootstrap")}
            scored.append(out)
        if self.needs_reference:
            mini.ref_logprobs = self._programs["reference_score"](
                ref_params, None, mini.batch, mini.num_micro, temperature
            )["logprobs"]
        if self._own_critic:
            values = self._programs["critic_score"](critic.params, mini.critic_batch, mini.critic_num_micro)
        if not self._cfg.kl_in_reward:
            return self._programs["collect"](table, mini.batch, mini.critic_batch, values)
        # Read before the advantages; the update has no use for them.
        ref_logprobs, mini.ref_logprobs = mini.ref_logprobs, None
        return self._programs["collect"](table, mini.batch, mini.critic_batch, values, mini.old_logprobs, ref_logprobs)


def _placebo_key(seed: jax.Array, step: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), _PLACEBO)


def _by_turn(
    trajectories: Sequence[Trajectory], table: np.ndarray | None, trained: np.ndarray
) -> list[list[float | None]]:
    """Lines of the table at the turns that were trained on, None at the others."""
    out: list[list[float | None]] = [[None] * len(trajectory.turns) for trajectory in trajectories]
    if table is not None:
        for number in trained:
            for order, index in enumerate(kept_turns(trajectories[number])[0]):
                out[number][index] = None if np.isnan(table[number, order]) else float(table[number, order])
    return out

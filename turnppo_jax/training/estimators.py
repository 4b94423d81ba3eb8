"""The advantage estimators by name. A new one is a function here and its line in `ESTIMATORS`.

Each takes (level, table, facts, cfg): the rollout at the advantage's level (turns or sampled tokens), its table, what
the host knows of the trajectories, and the AlgorithmConfig. It returns (advantages, critic targets) in the level's
shape, [M, K] over turns or [M, N] over sampled tokens, before whitening; targets in units of reward, None without a
critic.

All see one rollout, once. ArCHer (arXiv 2402.19446) does not fit: its advantage is min Q − min V of twin critics that
learn off the policy, which takes a replay buffer of turns, target networks that follow slowly, and critic updates
between rollouts; a second system beside this one. Its nearest relative on the policy, REINFORCE with r + γ V' − V for a
turn, is `estimator="turn_gae", gae_lambda=0, objective="reinforce"`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from turnppo_jax import kernels


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrajectoryFacts:
    """What the host knows of each trajectory beside its rows; a field that no estimator asks for is None."""

    scores: Any  # [M] float32, undiscounted reward
    group_ids: Any  # [M] int32, which answer the same prompt; -1 where there is none, or it is filtered out
    greedy_scores: Any = None  # [M] float32, undiscounted reward of a greedy rollout of the same prompt
    anchor_ids: Any = None  # [M, K_max] int32, equal where the observations count as the same state; -1
    branch_values: Any = None  # [M, K_max] float32, mean return of fresh rollouts from the state before the turn


@dataclasses.dataclass(frozen=True)
class Estimator:
    """One way to get advantages.

    Attributes:
      compute: see the module's docstring.
      levels: "turn", "token" or both, where the advantages live.
      reads: the fields of AlgorithmConfig that it reads and not every other estimator does.
      critic: reads and teaches a critic.
      groups: compares trajectories of one prompt: `group_size` must be at least 2.
      needs: the further field of TrajectoryFacts that it reads, "" for none.
    """

    compute: Callable
    levels: tuple[str, ...]
    reads: tuple[str, ...] = ()
    critic: bool = False
    groups: bool = False
    needs: str = ""


def _gae(level: Any, table: Any, facts: TrajectoryFacts, cfg: Any):
    """GAE over turns or tokens; λ of the advantages and of the critic's targets may differ (VC-PPO, VAPO)."""
    policy_lambda = cfg.gae_lambda
    if cfg.length_adaptive_alpha is not None:
        policy_lambda = kernels.length_adaptive_lambda(jnp.sum(table.num_tokens, 1), alpha=cfg.length_adaptive_alpha)
    advantages, returns = kernels.decoupled_gae(
        level.rewards,
        table.values,
        level.mask,
        level=cfg.advantage_level,
        gamma=cfg.gamma,
        policy_lambda=policy_lambda,
        value_lambda=policy_lambda if cfg.critic_lambda is None else cfg.critic_lambda,
        bootstrap_values=level.bootstrap,
    )
    if cfg.critic_target == "monte_carlo":
        returns = _returns_to_go(level, cfg)
    return advantages, returns


def _bi_level_gae(level: Any, table: Any, facts: TrajectoryFacts, cfg: Any):
    """GAE over turns, then over the tokens of each turn; at λ = 1 its returns are the Monte-Carlo targets."""
    estimate = functools.partial(
        kernels.bi_level_gae,
        level.turn_rewards,
        table.values,
        level.turn_of_token,
        gamma=cfg.gamma,
        turn_gamma=cfg.gamma if cfg.turn_gamma is None else cfg.turn_gamma,
        bootstrap_values=level.turn_bootstrap,
    )
    advantages, returns = estimate(gae_lambda=cfg.gae_lambda, turn_lambda=cfg.turn_lambda)
    if cfg.critic_target == "monte_carlo":
        _, returns = estimate(gae_lambda=1.0)
    return advantages, returns


def _sequence_critic(level: Any, table: Any, facts: TrajectoryFacts, cfg: Any):
    """Score minus the value of the prompt; only that value is taught (SPPO)."""
    advantages = kernels.sequence_critic_advantages(facts.scores, table.values[:, 0], level.mask)
    return advantages, jnp.where(level.mask, facts.scores[:, None], 0.0)


def _returns(level: Any, table: Any, facts: TrajectoryFacts, cfg: Any):
    """Discounted returns without a critic; whitened over the rollout, their mean is the baseline.

    Returns without any spread are 0 then; `whiten`, which comes after every estimator, would leave them as they are,
    and changes nothing about what is white.
    """
    if cfg.whitening == "rollout":
        whitened = kernels.whitened_returns(
            level.rewards, level.mask, gamma=cfg.gamma, bootstrap_values=level.bootstrap
        )
        return whitened, None
    return _returns_to_go(level, cfg), None


def _group(level: Any, table: Any, facts: TrajectoryFacts, cfg: Any):
    """Score against the scores of the same prompt, for every entry of the trajectory."""
    relative = kernels.group_advantages(
        facts.scores, facts.group_ids, scale=cfg.group_scale, baseline=cfg.group_baseline
    )
    return jnp.where(level.mask, relative[:, None], 0.0), None


def _turn_group(level: Any, table: Any, facts: TrajectoryFacts, cfg: Any):
    """Return from turn k on against those of turn k of the same prompt."""
    advantages = kernels.turn_index_advantages(
        level.rewards,
        level.mask,
        facts.group_ids,
        gamma=cfg.gamma,
        scale=cfg.group_scale,
        baseline=cfg.group_baseline,
        absent=cfg.group_absent,
    )
    return advantages, None


def _mt_grpo(level: Any, table: Any, facts: TrajectoryFacts, cfg: Any):
    """The last turn's reward is the outcome, the others are rewards of their turns."""
    outcome = jnp.sum(jnp.where(level.last, level.rewards, 0.0), axis=1)
    advantages = kernels.mt_grpo_advantages(
        outcome,
        jnp.where(level.last, 0.0, level.rewards),
        level.mask,
        jnp.where(jnp.any(level.mask, axis=1), facts.group_ids, -1),  # without a turn there is no outcome in the table
        gamma=cfg.gamma,
        turn_weight=cfg.turn_weight,
        scale=cfg.group_scale,
    )
    return advantages, None


def _gigpo(level: Any, table: Any, facts: TrajectoryFacts, cfg: Any):
    """Score in its group, plus the return of the turn among those with the same observation."""
    advantages = kernels.gigpo_advantages(
        facts.scores,
        level.rewards,
        level.mask,
        facts.group_ids,
        facts.anchor_ids,
        gamma=cfg.gamma,
        step_weight=cfg.step_weight,
        scale=cfg.group_scale,
    )
    return advantages, None


def _hgpo(level: Any, table: Any, facts: TrajectoryFacts, cfg: Any):
    """Returns of turns among those that share ever more history; the score in its group is level 0."""
    advantages = kernels.hgpo_advantages(
        level.rewards,
        level.mask,
        facts.group_ids,
        facts.anchor_ids,
        history_length=cfg.history_length,
        gamma=cfg.gamma,
        alpha=cfg.history_alpha,
        scale=cfg.group_scale,
        scores=facts.scores,
    )
    return advantages, None


def _remax(level: Any, table: Any, facts: TrajectoryFacts, cfg: Any):
    """Return to go minus the score of the greedy rollout."""
    return kernels.remax_advantages(level.rewards, level.mask, facts.greedy_scores, gamma=cfg.gamma), None


def _branches(level: Any, table: Any, facts: TrajectoryFacts, cfg: Any):
    """Turn GAE on values that fresh rollouts from each state have measured (VinePPO: λ = 0)."""
    advantages, _ = kernels.turn_gae(
        level.rewards, facts.branch_values, level.mask, gamma=cfg.gamma, gae_lambda=cfg.gae_lambda
    )
    return advantages, None


def _returns_to_go(level: Any, cfg: Any) -> jax.Array:
    return kernels.discounted_returns(level.rewards, level.mask, gamma=cfg.gamma, bootstrap_values=level.bootstrap)


_TURNS = ("gamma", "reward_placement")
_GAE = (*_TURNS, "gae_lambda", "bootstrap_truncated", "critic_target")
_ANCHORS = (*_TURNS, "group_scale", "anchors", "anchor_similarity")

ESTIMATORS = {
    "turn_gae": Estimator(_gae, ("turn",), reads=(*_GAE, "critic_lambda"), critic=True),
    "token_gae": Estimator(_gae, ("token",), reads=(*_GAE, "critic_lambda", "length_adaptive_alpha"), critic=True),
    "bi_level_gae": Estimator(_bi_level_gae, ("token",), reads=(*_GAE, "turn_gamma", "turn_lambda"), critic=True),
    "sequence_critic": Estimator(_sequence_critic, ("turn",), critic=True),
    "returns": Estimator(_returns, ("turn", "token"), reads=_TURNS),
    "group": Estimator(_group, ("turn", "token"), reads=("group_scale", "group_baseline"), groups=True),
    "turn_group": Estimator(
        _turn_group, ("turn",), reads=(*_TURNS, "group_scale", "group_baseline", "group_absent"), groups=True
    ),
    "mt_grpo": Estimator(_mt_grpo, ("turn",), reads=(*_TURNS, "group_scale", "turn_weight"), groups=True),
    "gigpo": Estimator(_gigpo, ("turn",), reads=(*_ANCHORS, "step_weight"), groups=True, needs="anchor_ids"),
    "hgpo": Estimator(
        _hgpo, ("turn",), reads=(*_ANCHORS, "history_length", "history_alpha"), groups=True, needs="anchor_ids"
    ),
    "remax": Estimator(_remax, ("turn",), reads=_TURNS, needs="greedy_scores"),
    "branches": Estimator(_branches, ("turn",), reads=("gamma", "gae_lambda", "num_branches"), needs="branch_values"),
}

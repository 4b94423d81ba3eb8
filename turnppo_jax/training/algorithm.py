"""What is optimised: one frozen dataclass, from which every algorithm is chosen by value; see `training.presets`."""

import dataclasses
from typing import Any

from turnppo_jax.kernels.importance import IMPORTANCE_LEVELS, IMPORTANCE_MODES
from turnppo_jax.kernels.kl import KL_KINDS
from turnppo_jax.kernels.policy_losses import OBJECTIVES, RATIO_LEVELS
from turnppo_jax.kernels.segments import POOLINGS
from turnppo_jax.kernels.turn_groups import ABSENT
from turnppo_jax.kernels.value_losses import VALUE_LOSSES
from turnppo_jax.kernels.weights import LEVELS, NORMALIZERS
from turnppo_jax.training.algorithm_notes import notes
from turnppo_jax.training.estimators import ESTIMATORS, Estimator

_CHOICES: dict[str, tuple[Any, ...]] = {
    "estimator": tuple(ESTIMATORS),
    "advantage_level": (None, *LEVELS),
    "ratio_level": RATIO_LEVELS,
    "ratio_pooling": POOLINGS,
    "normalizer": (None, *NORMALIZERS),
    "whitening": ("rollout", "trajectory", "none"),
    "reward_placement": ("turn", "final"),
    "group_scale": ("std", "none"),
    "group_baseline": ("mean", "leave_one_out"),
    "group_absent": ABSENT,
    "anchors": ("exact", "similar"),
    "filter": ("none", "top_spread", "spread"),
    "filter_on": ("return", "success"),
    "critic_target": ("monte_carlo", "lambda_return"),
    "value_normalizer": NORMALIZERS,
    "old_logprobs": ("learner", "behavior"),
    "kl_kind": KL_KINDS,
    "objective": tuple(OBJECTIVES),
    "kl_placement": ("loss", "reward"),
    "value_loss_kind": VALUE_LOSSES,
    "importance_level": (None, *IMPORTANCE_LEVELS),
    "importance_mode": IMPORTANCE_MODES,
    "importance_pooling": POOLINGS,
}


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    """Advantages, losses and the order of updates.

    Attributes:
      estimator: a name of `training.estimators.ESTIMATORS`.
      advantage_level: "turn" | "token"; by default the estimator's own, and where it has both the
        ratio's ("turn" where that is "sequence").
      ratio_level: where the PPO ratio is formed and clipped, "turn" | "token" | "sequence" (the whole trajectory,
        which must stand in one row: window prompts are refused).
      ratio_pooling: of the ratio of a turn or sequence, "product" | "geometric_mean".
      normalizer: of the policy loss, see `kernels.loss_weights`; by default "trajectory_tokens", and "trajectories"
        with the geometric mean or a sequence ratio.
      clip_low: ε below ratio 1.
      clip_high: ε above ratio 1.
      dual_clip: bound of the ratio where the advantage is negative, above 1; None or 0 for none.
      gamma: discount a turn (turn_gae) or a token (token_gae).
      gae_lambda: λ.
      critic_lambda: λ of the critic's targets with critic_target "lambda_return"; None: that of the advantages.
      length_adaptive_alpha: token_gae: λ of the advantages is 1 − 1 / (alpha · sampled tokens of the trajectory) in
        place of gae_lambda; None for gae_lambda.
      turn_gamma: bi_level_gae: discount a turn; None: gamma.
      turn_lambda: bi_level_gae: λ over turns; None: gae_lambda.
      turn_weight: mt_grpo: weight of the turns' rewards against the outcome.
      anchors: gigpo, hgpo: observations are the same state where their text is "exact"ly equal, or "similar".
      anchor_similarity: share of text that two similar observations have in common at least.
      step_weight: gigpo: weight of the turn's advantage against the trajectory's.
      history_length: hgpo: earlier observations that the deepest level compares.
      history_alpha: hgpo: preference for long histories; 0 weighs all levels alike.
      num_branches: branches: fresh rollouts from each state.
      whitening: of advantages, "rollout" | "trajectory" | "none", over the entries of the advantage's level.
      reward_placement: "turn": on its own turn; "final": all on the last turn.
      bootstrap_truncated: a truncated trajectory ends with the value of the state after its last action (turn_gae,
        token_gae, bi_level_gae; no other estimator has that value).
      group_size: trajectories that answer the same prompt.
      group_scale: "std" | "none".
      group_baseline: "mean" | "leave_one_out".
      group_absent: turn_group: a member that ended before turn k is left out of its group ("skip") or counts with
        return 0 ("zero").
      filter: which groups train: "none" (all) | "top_spread" (the share `filter_fraction` with the largest standard
        deviation) | "spread" (those whose scores are not all equal).
      filter_fraction: with "top_spread".
      filter_on: the score that the filter compares, "return" | "success".
      mask_overlong: a trajectory with a response that was cut for length trains nothing. Its score still counts in its
        group; what compares turns (turn_group, mt_grpo, the turns of gigpo and hgpo) does not see it.
      critic_target: "monte_carlo" (discounted return) | "lambda_return" (A + V).
      value_normalizer: of the value loss.
      value_clip: PPO's clip of the value, in units of the critic's output; None or 0 for none.
      value_scale: the critic learns return / value_scale.
      share_backbone: the value head reads the actor's hidden states; there is no backbone of the critic's own.
      value_loss_coef: with a shared backbone, weight of the value loss in the backbone's gradient.
      critic_warmup_steps: training steps at the start in which only the critic learns, each on a fresh rollout of the
        policy that stands still, from Monte-Carlo returns whatever `critic_target` is (the value pre-training of
        VC-PPO, arXiv 2503.01491).
      old_logprobs: "learner": recomputed before the first epoch; "behavior": those of the sampler.
      epochs: passes over the rollout.
      num_minibatches: optimizer steps a pass; a minibatch is a set of trajectories.
      kl_coef: weight of the KL term in the loss; above 0 a reference model is needed.
      kl_kind: estimate of the KL term.
      entropy_coef: weight of the entropy bonus.
      objective: "clip" | "cispo" | "reinforce", see `kernels.policy_loss`.
      clip_bias_correction: the policy's gradient, KL and entropy terms included, is multiplied by
        `kernels.clip_bias_scale`.
      kl_straight_through: the KL term in the loss takes the gradient of "k2" whatever its kind.
      kl_placement: "loss": as a term beside the objective; "reward": every sampled token's reward is lowered by
        kl_coef times its estimate from the old log-probs, and so is its turn's; `reward_placement` does not move it.
      value_loss_kind: "squared" | "cross_entropy": the critic says value_scale · sigmoid(output), and every return
        must lie from 0 to value_scale.
      imitation_coef: weight of the language-model loss on successes, −mean log π over the sampled tokens of the
        minibatch's successful trajectories (VAPO, arXiv 2504.05118: 0.1).
      importance_level: "token" | "turn" | "sequence": the policy loss is weighted by how much likelier the learner
        finds a sample than the sampler did, see `kernels.importance_weights`; a loss over turns takes the mean of
        its tokens' weights. None for no weights; metrics are then of the level "token".
      importance_mode: "truncate" to the bounds | "mask" what lies beyond them.
      importance_low: least weight.
      importance_high: largest weight.
      importance_pooling: of the weight of a turn or sequence, "product" | "geometric_mean".
      permute_advantages: placebo for tests of learning: advantages are shuffled among all entries of the rollout.

    Raises:
      ValueError: naming the field, its value and what is allowed.
    """

    estimator: str = "turn_gae"
    advantage_level: str | None = None
    ratio_level: str = "turn"
    ratio_pooling: str = "product"
    normalizer: str | None = None
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    gamma: float = 0.99
    gae_lambda: float = 0.9
    critic_lambda: float | None = None
    length_adaptive_alpha: float | None = None
    turn_gamma: float | None = None
    turn_lambda: float | None = None
    turn_weight: float = 1.0
    anchors: str = "exact"
    anchor_similarity: float = 0.95
    step_weight: float = 1.0
    history_length: int = 2
    history_alpha: float = 1.0
    num_branches: int = 4
    whitening: str = "rollout"
    reward_placement: str = "turn"
    bootstrap_truncated: bool = False
    group_size: int = 1
    group_scale: str = "std"
    group_baseline: str = "mean"
    group_absent: str = "skip"
    filter: str = "none"
    filter_fraction: float = 0.25
    filter_on: str = "return"
    mask_overlong: bool = False
    critic_target: str = "monte_carlo"
    value_normalizer: str = "trajectories"
    value_clip: float | None = None
    value_scale: float = 1.0
    share_backbone: bool = False
    value_loss_coef: float = 0.5
    critic_warmup_steps: int = 0
    old_logprobs: str = "learner"
    epochs: int = 1
    num_minibatches: int = 1
    kl_coef: float = 0.0
    kl_kind: str = "k3"
    entropy_coef: float = 0.0
    objective: str = "clip"
    clip_bias_correction: bool = False
    kl_straight_through: bool = False
    kl_placement: str = "loss"
    value_loss_kind: str = "squared"
    imitation_coef: float = 0.0
    importance_level: str | None = None
    importance_mode: str = "truncate"
    importance_low: float = 0.0
    importance_high: float = 2.0
    importance_pooling: str = "product"
    permute_advantages: bool = False

    def __post_init__(self):
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                listed = ", ".join(repr(value) for value in allowed)
                raise ValueError(f"{name}={getattr(self, name)!r}; allowed: {listed}")
        if self.advantage_level is None:
            levels = self._estimator.levels
            of_ratio = "turn" if self.ratio_level == "sequence" else self.ratio_level
            object.__setattr__(self, "advantage_level", levels[0] if len(levels) == 1 else of_ratio)
        if self.normalizer is None:
            geometric = self.ratio_level == "turn" and self.ratio_pooling == "geometric_mean"
            geometric = geometric or self.ratio_level == "sequence"
            object.__setattr__(self, "normalizer", "trajectories" if geometric else "trajectory_tokens")
        for name in ("gamma", "gae_lambda", "critic_lambda", "turn_gamma", "turn_lambda", "anchor_similarity"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}; allowed: from 0 to 1")
        for name in ("clip_low", "clip_high", "value_scale"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}; allowed: above 0")
        for name in ("kl_coef", "entropy_coef", "value_loss_coef", "critic_warmup_steps", "history_length"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)}; allowed: at least 0")
        for name in ("epochs", "num_minibatches", "group_size", "num_branches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; allowed: at least 1")
        for name, least in (("dual_clip", 1.0), ("value_clip", 0.0)):
            if getattr(self, name) == 0:  # a flag can say 0 and not None
                object.__setattr__(self, name, None)
            if getattr(self, name) is not None and not getattr(self, name) > least:
                raise ValueError(f"{name}={getattr(self, name)}; allowed: above {least:g}, or 0 for none")
        self._check_estimator()
        if self.share_backbone and self.critic_warmup_steps:
            raise ValueError(
                f"critic_warmup_steps={self.critic_warmup_steps} with share_backbone=True; allowed: 0 "
                "(one backward pass serves both)"
            )
        self._check_objective()

    def _check_objective(self):
        """Ratios, objectives, KL, critic losses and importance weights that do not go together."""
        if not self.imitation_coef >= 0:
            raise ValueError(f"imitation_coef={self.imitation_coef}; allowed: at least 0")
        if not 0 <= self.importance_low < self.importance_high:
            raise ValueError(
                f"importance_low={self.importance_low}, importance_high={self.importance_high}; allowed: "
                "0 <= importance_low < importance_high"
            )
        in_reward, cross_entropy = self.kl_placement == "reward", self.value_loss_kind == "cross_entropy"
        refused = {
            "dual_clip": (self.objective != "clip", "objective", None),
            "clip_bias_correction": (self.objective != "clip", "objective", False),
            "kl_straight_through": (in_reward, "kl_placement", False),
            "value_clip": (cross_entropy, "value_loss_kind", None),
            "importance_level": (self.old_logprobs == "behavior", "old_logprobs", None),
        }
        for name, (holds, other, allowed) in refused.items():
            value = getattr(self, name)
            if holds and value != allowed:
                raise ValueError(f"{name}={value!r} with {other}={getattr(self, other)!r}; allowed: {allowed!r}")
        if self.clip_bias_correction and self.share_backbone:
            raise ValueError(
                "clip_bias_correction=True with share_backbone=True; allowed: False (it would scale the value loss too)"
            )
        if cross_entropy and self.kl_in_reward:
            raise ValueError(
                "kl_placement='reward' with value_loss_kind='cross_entropy'; allowed: 'loss' (returns must lie from 0 "
                "to value_scale)"
            )

    def _check_estimator(self) -> None:
        """The parts that the estimator and the filter need, and those that would be read by nobody."""
        own, name = self._estimator, f"estimator={self.estimator!r}"
        if self.advantage_level not in own.levels:
            listed = ", ".join(repr(level) for level in own.levels)
            raise ValueError(f"advantage_level={self.advantage_level!r} with {name}; allowed: {listed}")
        if own.groups and self.group_size < 2:
            raise ValueError(
                f"group_size={self.group_size} with {name}; allowed: at least 2 "
                "(a group of one has advantage 0 and learns nothing)"
            )
        if not own.critic and (self.share_backbone or self.critic_warmup_steps):
            raise ValueError(f"{name} has no critic; allowed: share_backbone=False, critic_warmup_steps=0")
        if self.estimator == "branches" and self.reward_placement != "turn":
            raise ValueError(
                f"reward_placement={self.reward_placement!r} with {name}; allowed: 'turn' (the branches measure what a "
                "state has ahead, and a reward on the last turn is ahead of all)"
            )
        if self.estimator == "branches" and self.kl_in_reward:
            raise ValueError(
                f"kl_placement='reward' with {name}; allowed: 'loss' (the branches measure returns without the penalty)"
            )
        if self.length_adaptive_alpha is not None:
            if self.estimator != "token_gae":
                raise ValueError(
                    f"length_adaptive_alpha={self.length_adaptive_alpha} with {name}; allowed: None "
                    "(it needs estimator='token_gae')"
                )
            if not self.length_adaptive_alpha > 0:
                raise ValueError(f"length_adaptive_alpha={self.length_adaptive_alpha}; allowed: above 0, or None")
        if self.filter != "none" and self.group_size < 2:
            raise ValueError(
                f"filter={self.filter!r} with group_size={self.group_size}; allowed: 'none' "
                "(a group of one has no spread)"
            )
        if not 0 < self.filter_fraction <= 1:
            raise ValueError(f"filter_fraction={self.filter_fraction}; allowed: above 0 and at most 1")

    @property
    def _estimator(self) -> Estimator:
        return ESTIMATORS[self.estimator]

    @property
    def needs(self) -> str:
        """The field of TrajectoryFacts that the estimator reads beside scores and groups, "" for none."""
        return self._estimator.needs

    @property
    def has_critic(self) -> bool:
        """Whether the advantages need values."""
        return self._estimator.critic

    @property
    def bootstraps(self) -> bool:
        """Whether a truncated trajectory ends with a value: it is asked for, and the estimator reads it."""
        return self.bootstrap_truncated and "bootstrap_truncated" in self._estimator.reads

    @property
    def loss_level(self) -> str:
        """What the policy loss runs over: turns, or tokens where ratio or advantage are of tokens."""
        return "turn" if self.advantage_level == "turn" and self.ratio_level != "token" else "token"

    @property
    def kl_in_loss(self) -> bool:
        """Whether the update needs the reference's log-probs."""
        return self.kl_coef > 0 and self.kl_placement == "loss"

    @property
    def kl_in_reward(self) -> bool:
        """Whether the advantages need them."""
        return self.kl_coef > 0 and self.kl_placement == "reward"

    @property
    def single_update(self) -> bool:
        """One optimizer step a training step: then the update's own forward pass gives the old log-probs."""
        return self.epochs == self.num_minibatches == 1 and self.old_logprobs == "learner"

    def warnings(self) -> list[str]:
        """Settings that work and are rarely meant."""
        return notes(self)

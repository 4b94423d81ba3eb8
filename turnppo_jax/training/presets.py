"""The methods of the field as presets: what each changes in `AlgorithmConfig`, where it comes from, what it reached.

A preset is a function without arguments whose docstring says so; its name is what `algo=` knows. Values that a preset
does not name are the config's, by default those of Turn-PPO: with a critic that is whitening over the rollout and the
dual clip. Learning rates, batch and group sizes in the number of prompts are the config's. The methods that were
published as REINFORCE with one update a rollout (rloo, reinforce_rej, remax, gem) keep the clip of PPO: it changes
nothing in the first update of a rollout and is needed in the others.
"""

import inspect
from collections.abc import Callable
from typing import Any

from turnppo_jax.training.algorithm import AlgorithmConfig

_TOKEN = {"ratio_level": "token"}
_CRITIC_FREE = {"whitening": "none", "dual_clip": None, "group_size": 8}


def turn_ppo() -> dict[str, Any]:
    """Turn-PPO (arXiv 2512.17008): a whole response is one action; the ratio is the product over its tokens.

    γ .99, λ .9, clip .2, Monte-Carlo target of the critic, no KL. The dual clip is that of verl. Published with
    Qwen2.5-7B on Sokoban: mean return 3.74, against 2.90 of token PPO.
    """
    return {}


def token_ppo() -> dict[str, Any]:
    """PPO on tokens (arXiv 1707.06347) as RAGEN and verl run it: γ = λ = 1.

    Changes: GAE, critic and ratio per token. Errors of the critic keep the config's weights; verl weights every token
    alike (`value_normalizer="tokens"`, see configs/ablations/value_weights.py). Published with Qwen2.5-7B: mean return
    2.90 on Sokoban (Turn-PPO's authors), success 80.4 % on ALFWorld and 68.7 % on WebShop (GiGPO's).
    """
    return {**_TOKEN, "estimator": "token_gae", "gamma": 1.0, "gae_lambda": 1.0}


def turn_advantage() -> dict[str, Any]:
    """Turn GAE with the ratio per token: the PPO of GEM (arXiv 2510.01051), and an ablation of Turn-PPO.

    Changes: the ratio is formed and clipped per token. No published number on our tasks.
    """
    return {**_TOKEN}


def bilevel_gae() -> dict[str, Any]:
    """Bi-level GAE of VAGEN (arXiv 2510.16907): GAE over turns gives the reward of a GAE inside each turn.

    Changes: γ .95 over turns and 1 inside them, λ 1, critic per token with target A + V. No published number on text.
    """
    return {
        **_TOKEN,
        "estimator": "bi_level_gae",
        "critic_target": "lambda_return",
        "gamma": 1.0,
        "turn_gamma": 0.95,
        "gae_lambda": 1.0,
    }


def vc_ppo() -> dict[str, Any]:
    """VC-PPO (arXiv 2503.01491): the critic learns first, and with a λ of its own.

    Changes to token PPO: λ .95 for the policy, 1 for the critic; steps at the start in which only the critic learns.
    """
    return {**token_ppo(), "gae_lambda": 0.95, "critic_target": "lambda_return", "critic_lambda": 1.0,
            "critic_warmup_steps": 10}  # fmt: skip


def vapo() -> dict[str, Any]:
    """VAPO (arXiv 2504.05118): VC-PPO with λ by length, a higher upper clip, token mean, imitation of successes.

    Changes to VC-PPO: λ = 1 − 1/(.05 l) over the sampled tokens of all turns, clip .2 / .28, normalizer tokens, μ .1,
    groups of trajectories. Published with Qwen2.5-32B: AIME 2024 60.4.
    """
    settings = vc_ppo()
    del settings["gae_lambda"]
    return {**settings, "length_adaptive_alpha": 0.05, "clip_high": 0.28, "normalizer": "tokens", "imitation_coef": 0.1,
            "group_size": 8}  # fmt: skip


def sppo() -> dict[str, Any]:
    """SPPO (arXiv 2604.08865): the trajectory is one action of a bandit; the critic says how solvable a prompt is.

    Changes: advantage = score − V(prompt), critic by cross-entropy, ratio per token. The score must lie in
    [0, value_scale]: here it is 1 for a success. Published: average of mathematics tasks 48.06 against GRPO's 47.08
    (1.5B), 58.1 to 58.6 (7B).
    """
    return {**_TOKEN, "estimator": "sequence_critic", "value_loss_kind": "cross_entropy", "value_scale": 1.0}


def st_ppo() -> dict[str, Any]:
    """ST-PPO (arXiv 2511.20718): turn ratio by geometric mean on token GAE, with a correction of the clip's bias.

    Changes to token PPO: the ratio, its correction. A turn's ratio stands at each of its tokens, all of a trajectory's
    alike (1/|y| Σ), so that its gradient is that of token PPO with the mean advantage of the turn. The name "Turn-PPO"
    in that paper means the ratio alone. How the correction is read: `kernels.clip_bias_scale`.
    """
    return {**token_ppo(), "ratio_level": "turn", "ratio_pooling": "geometric_mean", "normalizer": "trajectory_tokens",
            "clip_bias_correction": True}  # fmt: skip


def starpo_s() -> dict[str, Any]:
    """StarPO-S (RAGEN, arXiv 2504.20073): token PPO on the groups whose scores spread most.

    Changes to token PPO: a quarter of the groups trains, clip .2 / .28, no KL. Published with Qwen2.5-0.5B: Sokoban
    success 20 to 21 %.
    """
    return {**token_ppo(), "group_size": 16, "filter": "top_spread", "filter_fraction": 0.25, "clip_high": 0.28}


def grpo() -> dict[str, Any]:
    """GRPO (arXiv 2402.03300): one score a trajectory against its group, for every token.

    Changes: no critic, ratio per token, KL .001 as in the GRPO rows of Turn-PPO, where its multi-turn runs crashed.
    Published by GiGPO's authors with Qwen2.5-7B: ALFWorld success 77.6 %, WebShop 66.1 %.
    """
    return {**_TOKEN, **_CRITIC_FREE, "estimator": "group", "kl_coef": 0.001}


def dr_grpo() -> dict[str, Any]:
    """Dr. GRPO (arXiv 2503.20783): GRPO without the standard deviation and without the length of the trajectory.

    Changes to GRPO: the score is centred only; tokens count alike; no KL. The sum over tokens is divided by their
    number in the minibatch, where the paper has a constant.
    """
    return {**grpo(), "group_scale": "none", "normalizer": "tokens", "kl_coef": 0.0}


def dapo() -> dict[str, Any]:
    """DAPO (arXiv 2503.14476): GRPO with a higher upper clip, token mean, no flat groups, no cut responses, no KL.

    Groups without spread are dropped, not sampled anew: the step is smaller where they are many. Spread is that of the
    return; filter_on="success" is the paper's, whose rewards say right or wrong. Its soft over-long penalty is a term
    of the reward (`REWARD_TERMS`). Published with Qwen2.5-32B: AIME 2024 50.
    """
    return {**grpo(), "clip_high": 0.28, "normalizer": "tokens", "filter": "spread", "mask_overlong": True,
            "kl_coef": 0.0}  # fmt: skip


def rloo() -> dict[str, Any]:
    """RLOO (arXiv 2402.14740): REINFORCE whose baseline is the mean of the others in the group.

    Changes to GRPO: leave-one-out, no scale; a trajectory is one action, so its length divides nothing (tokens count
    alike); k1 KL in the reward. Published by GiGPO's authors with Qwen2.5-7B: ALFWorld success 75.5 %,
    WebShop 65.7 %.
    """
    return {**grpo(), "group_scale": "none", "group_baseline": "leave_one_out", "normalizer": "tokens",
            "kl_kind": "k1", "kl_placement": "reward"}  # fmt: skip


def reinforce_rej() -> dict[str, Any]:
    """Reinforce-Rej (arXiv 2504.11343): returns as they are, without the groups that all succeed or all fail.

    Changes: no critic, no baseline; groups whose success is the same for all are left out.
    """
    return {**_TOKEN, **_CRITIC_FREE, "estimator": "returns", "gamma": 1.0, "filter": "spread", "filter_on": "success"}


def reinforce_pp() -> dict[str, Any]:
    """REINFORCE++ (arXiv 2501.03262): returns to go per token with the KL inside, whitened over the batch.

    Changes: no critic, no groups, k1 KL in the reward.
    """
    return {**_TOKEN, "estimator": "returns", "gamma": 1.0, "dual_clip": None, "kl_coef": 0.001, "kl_kind": "k1",
            "kl_placement": "reward"}  # fmt: skip


def reinforce_pp_baseline() -> dict[str, Any]:
    """REINFORCE++ with baseline (arXiv 2501.03262): the group's mean is taken off, the scale is the batch's.

    Changes to GRPO: no standard deviation of the group, whitening over the rollout, k2 KL.
    """
    return {**grpo(), "group_scale": "none", "whitening": "rollout", "advantage_level": "token", "kl_kind": "k2"}


def remax() -> dict[str, Any]:
    """ReMax (arXiv 2310.10505): the baseline is the score of a greedy rollout of the same prompt.

    Changes: no critic, no groups; one greedy episode more for each prompt. As in RLOO, tokens count alike. At a later
    turn it is the return from there on minus the whole greedy score, as in verl.
    """
    return {**_TOKEN, "estimator": "remax", "gamma": 1.0, "whitening": "none", "dual_clip": None,
            "normalizer": "tokens"}  # fmt: skip


def vine_ppo() -> dict[str, Any]:
    """VinePPO (arXiv 2410.01679): values are means over fresh rollouts from each state, here before each turn.

    Changes: no critic; λ 0, γ 1; `num_branches` rollouts more for each turn, four unless the config says otherwise.
    """
    return {**_TOKEN, "estimator": "branches", "gamma": 1.0, "gae_lambda": 0.0}


def gspo() -> dict[str, Any]:
    """GSPO (arXiv 2507.18071): GRPO whose ratio is the geometric mean over the whole sequence.

    Changes to GRPO: the ratio, its clip of 3e-4 / 4e-4, every trajectory counts 1/M, no KL.
    """
    return {**grpo(), "ratio_level": "sequence", "ratio_pooling": "geometric_mean", "clip_low": 3e-4, "clip_high": 4e-4,
            "normalizer": "trajectories", "kl_coef": 0.0}  # fmt: skip


def gigpo() -> dict[str, Any]:
    """GiGPO (arXiv 2505.10978): the score in its group plus the return of the turn among equal observations.

    Changes to GRPO: the second term (weight 1, γ .95), no standard deviation, KL .01. Its penalty of .1 on an invalid
    action is the environment's or the term `invalid_action` of the reward. Published with Qwen2.5-7B, without the
    standard deviation: ALFWorld success 90.2 %, WebShop 75.2 %.
    """
    return {**grpo(), "estimator": "gigpo", "group_scale": "none", "gamma": 0.95, "kl_coef": 0.01}


def hgpo() -> dict[str, Any]:
    """HGPO (arXiv 2602.22817): returns among turns that share ever more history.

    Changes to GiGPO: groups by the last 1 to 3 observations, deeper ones weigh more; the score in its group is one
    level among them, the shallowest. Published: WebShop score 88.4.
    """
    return {**gigpo(), "estimator": "hgpo", "history_length": 2}


def mt_grpo() -> dict[str, Any]:
    """MT-GRPO (arXiv 2505.11821): rewards of turns and outcome, each in its group, added from each turn on.

    Changes to GRPO: credit by turn; the last turn's reward is the outcome.
    """
    return {**grpo(), "estimator": "mt_grpo", "gamma": 1.0}


def gem() -> dict[str, Any]:
    """REINFORCE with return batch normalisation of GEM (arXiv 2510.01051): discounted turn returns, whitened.

    Changes: no critic, no groups, no KL; the ratio per token.
    """
    return {**_TOKEN, "estimator": "returns", "advantage_level": "turn", "dual_clip": None}


_PRESETS: tuple[Callable[[], dict[str, Any]], ...] = (
    turn_ppo, token_ppo, turn_advantage, grpo, dr_grpo, reinforce_rej, dapo, rloo, reinforce_pp, reinforce_pp_baseline,
    remax, vine_ppo, gspo, gigpo, hgpo, mt_grpo, starpo_s, vc_ppo, vapo, sppo, st_ppo, gem, bilevel_gae,
)  # fmt: skip

ALGORITHMS: dict[str, dict[str, Any]] = {preset.__name__: preset() for preset in _PRESETS}
ALIASES = {"m_grpo": "grpo"}

# Weights of `config.reward.terms` where a method is not about the environment's reward alone.
REWARD_TERMS: dict[str, dict[str, float]] = {
    "sppo": {"success": 1.0},
    "dapo": {"environment": 1.0, "overlong": 1.0},
}


def algorithm_settings(name: str) -> dict[str, Any]:
    """What a preset changes, by its name or alias.

    Raises:
      ValueError: an unknown name; the known ones are listed.
    """
    name = ALIASES.get(name, name)
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm {name!r} is not known; choose one of {', '.join([*ALGORITHMS, *ALIASES])}")
    return dict(ALGORITHMS[name])


def algorithm_by_name(name: str, **changes: Any) -> AlgorithmConfig:
    """The settings of an algorithm, with `changes` in place of its own values.

    Raises:
      ValueError: an unknown name (the known ones are listed) or a value that is not allowed.
    """
    return AlgorithmConfig(**(algorithm_settings(name) | changes))


def describe(name: str) -> str:
    """What the method changes, its source and its published number: the preset's docstring."""
    preset = next(one for one in _PRESETS if one.__name__ == ALIASES.get(name, name))
    return inspect.cleandoc(preset.__doc__)

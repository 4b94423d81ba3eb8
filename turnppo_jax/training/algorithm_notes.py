"""What is said of an algorithm's settings that work together and are rarely meant."""

import dataclasses
from typing import Any

from turnppo_jax.training.estimators import ESTIMATORS

# Without value_scale, which a config gives for its environment whatever the method.
_OF_A_CRITIC = (
    "critic_target", "value_normalizer", "value_clip", "share_backbone", "value_loss_coef", "critic_warmup_steps",
    "value_loss_kind",
)  # fmt: skip
_OF_ESTIMATORS = tuple(dict.fromkeys(name for estimator in ESTIMATORS.values() for name in estimator.reads))
# Whole scores against each other, those of masked trajectories among them.
_SCORES_IN_GROUPS = ("group", "gigpo", "hgpo")


def notes(cfg: Any) -> list[str]:
    """One line for each; `cfg` is an AlgorithmConfig."""
    lines = _scales(cfg) + _normalizers(cfg)
    if cfg.objective == "reinforce" and cfg.epochs * cfg.num_minibatches > 1:
        lines.append(
            f"objective='reinforce' with epochs={cfg.epochs}, num_minibatches={cfg.num_minibatches}: no ratio "
            "corrects the updates after the first"
        )
    if cfg.mask_overlong and cfg.kl_in_reward and cfg.estimator in _SCORES_IN_GROUPS:
        lines.append(
            f"mask_overlong=True with kl_placement='reward' and estimator={cfg.estimator!r}: the score that a masked "
            "trajectory has in its group is without the penalty, which is measured of those that train"
        )
    for because, names in unread(cfg).items():
        lines.append(f"not read with {because}: {', '.join(f'{name}={getattr(cfg, name)!r}' for name in names)}")
    return lines


def unread(cfg: Any) -> dict[str, list[str]]:
    """Fields that somebody has set, away from their defaults, and that nothing reads; by what makes them so."""
    own, default = ESTIMATORS[cfg.estimator], {field.name: field.default for field in dataclasses.fields(cfg)}
    without = [name for name in _OF_ESTIMATORS if name not in own.reads]
    if not own.critic:
        without += [name for name in _OF_A_CRITIC if name not in without]
    causes = {
        f"estimator={cfg.estimator!r}": without,
        "length_adaptive_alpha": ["gae_lambda"] if cfg.length_adaptive_alpha is not None else [],
        f"critic_target={cfg.critic_target!r}": ["critic_lambda"] if cfg.critic_target == "monte_carlo" else [],
        "share_backbone=False": [] if cfg.share_backbone else ["value_loss_coef"],
        f"filter={cfg.filter!r}": {"none": ["filter_fraction", "filter_on"], "spread": ["filter_fraction"]}.get(
            cfg.filter, []
        ),
        "anchors='exact'": ["anchor_similarity"] if cfg.anchors == "exact" else [],
        "kl_coef=0": [] if cfg.kl_coef > 0 else ["kl_kind", "kl_straight_through", "kl_placement"],
        "ratio_level='token'": ["ratio_pooling"] if cfg.ratio_level == "token" else [],
        "objective='reinforce'": ["clip_low", "clip_high"] if cfg.objective == "reinforce" else [],
    }
    out: dict[str, list[str]] = {}
    seen: set[str] = set()
    for because, names in causes.items():
        names = [name for name in names if name not in seen and getattr(cfg, name) != default[name]]
        seen |= set(names)
        if names:
            out[because] = names
    return out


def _scales(cfg: Any) -> list[str]:
    if not ESTIMATORS[cfg.estimator].groups or cfg.group_scale != "std" or cfg.whitening == "none":
        return []
    return [
        f"whitening={cfg.whitening!r} with estimator={cfg.estimator!r} and group_scale='std': "
        "group advantages are scaled twice"
    ]


def _normalizers(cfg: Any) -> list[str]:
    """At ratio 1 the token ratio has the gradient Σ_t w_t A_t ∇log π_t.

    Over turns, that of the turn ratio is Σ_k w_k A_k Σ_{t in k} ∇log π_t, with the mean over t for the geometric mean.
    Over tokens a turn's ratio stands at each of its n_k tokens: the geometric mean gives every token its turn's mean
    advantage, by any normalizer; the product n_k times that, by none.
    """
    if cfg.ratio_level == "sequence":
        whole = ("trajectories",) if cfg.loss_level == "turn" else ("trajectory_tokens", "trajectories")
        if cfg.normalizer in whole:
            return []
        return [
            f"normalizer={cfg.normalizer!r} with ratio_level='sequence': trajectories do not weigh the same; "
            f"they do with {', '.join(whole)}"
        ]
    if cfg.ratio_level == "token":
        return []
    if cfg.loss_level == "token":
        if cfg.ratio_pooling == "geometric_mean":
            return []
        return [
            "ratio_pooling='product' with ratio_level='turn' and advantage_level='token': at ratio 1 a turn's "
            "gradient is that of the token ratio times its number of tokens; 'geometric_mean' is without that factor"
        ]
    pairs = {"product": ("trajectory_tokens", "tokens"), "geometric_mean": ("turns", "trajectories")}
    if cfg.normalizer in pairs[cfg.ratio_pooling]:
        return []
    return [
        f"normalizer={cfg.normalizer!r} with ratio_pooling={cfg.ratio_pooling!r}: at ratio 1 the gradient "
        f"differs from that of the token ratio; the pairs that agree: {', '.join(pairs[cfg.ratio_pooling])}"
    ]

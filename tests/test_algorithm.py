"""Settings of the algorithm: what is allowed together, what is said about it, and the presets that choose them."""

import dataclasses

import pytest

from configs.sections import parse_algo
from turnppo_jax.training.algorithm import AlgorithmConfig
from turnppo_jax.training.estimators import ESTIMATORS
from turnppo_jax.training.presets import ALGORITHMS, algorithm_by_name, describe


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"estimator": "gae"}, f"estimator='gae'; allowed: {', '.join(map(repr, ESTIMATORS))}"),
        ({"estimator": "group", "group_size": 1}, "group_size=1 with estimator='group'; allowed: at least 2"),
        ({"estimator": "gigpo"}, "group_size=1 with estimator='gigpo'; allowed: at least 2"),
        ({"whitening": "batch"}, "whitening='batch'; allowed: 'rollout', 'trajectory', 'none'"),
        ({"advantage_level": "token"}, "advantage_level='token' with estimator='turn_gae'; allowed: 'turn'"),
        ({"estimator": "token_gae", "advantage_level": "turn"}, "estimator='token_gae'; allowed: 'token'"),
        ({"gamma": 1.5}, "gamma=1.5; allowed: from 0 to 1"),
        ({"critic_lambda": 1.5}, "critic_lambda=1.5; allowed: from 0 to 1"),
        ({"dual_clip": 1.0}, "dual_clip=1.0; allowed: above 1, or 0 for none"),
        ({"share_backbone": True, "critic_warmup_steps": 2}, "critic_warmup_steps=2 with share_backbone=True"),
        ({"estimator": "returns", "critic_warmup_steps": 2}, "estimator='returns' has no critic; allowed: share_back"),
        ({"length_adaptive_alpha": 0.05}, "length_adaptive_alpha=0.05 with estimator='turn_gae'; allowed: None"),
        ({"estimator": "token_gae", "length_adaptive_alpha": 0.0}, "length_adaptive_alpha=0.0; allowed: above 0"),
        ({"filter": "top_spread"}, "filter='top_spread' with group_size=1; allowed: 'none'"),
        ({"filter": "top_spread", "group_size": 2, "filter_fraction": 0.0}, "filter_fraction=0.0; allowed: above 0"),
        ({"anchors": "fuzzy"}, "anchors='fuzzy'; allowed: 'exact', 'similar'"),
        ({"num_branches": 0}, "num_branches=0; allowed: at least 1"),
        ({"epochs": 0}, "epochs=0; allowed: at least 1"),
        ({"clip_low": -0.1}, "clip_low=-0.1; allowed: above 0"),
    ],
)
def test_settings_are_checked_by_name(changes, message):
    with pytest.raises(ValueError) as error:
        AlgorithmConfig(**changes)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_defaults_follow_the_other_fields():
    assert AlgorithmConfig(ratio_pooling="geometric_mean").normalizer == "trajectories"
    levels = {
        ratio: AlgorithmConfig(estimator="returns", ratio_level=ratio).advantage_level for ratio in ("turn", "token")
    }
    assert levels == {"turn": "turn", "token": "token"}
    assert AlgorithmConfig(estimator="returns", ratio_level="token", advantage_level="turn").loss_level == "token"
    assert AlgorithmConfig(estimator="bi_level_gae", critic_target="lambda_return").advantage_level == "token"


def test_a_flag_can_switch_the_clips_off():
    assert AlgorithmConfig(dual_clip=0.0, value_clip=0.0) == AlgorithmConfig(dual_clip=None)
    assert AlgorithmConfig(objective="cispo", dual_clip=0.0).dual_clip is None


def test_what_is_rarely_meant_is_said():
    assert AlgorithmConfig().warnings() == []
    assert "normalizer='turns'" in AlgorithmConfig(normalizer="turns").warnings()[0]
    (line,) = AlgorithmConfig(estimator="group", group_size=2).warnings()
    assert "whitening='rollout' with estimator='group' and group_scale='std'" in line


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_preset_is_allowed_documented_and_unlike_the_others(name):
    own = algorithm_by_name(name)
    # Only what goes with each other is said of a preset; a preset is what its paper says.
    assert not [line for line in own.warnings() if "scaled twice" in line]
    assert "arXiv" in describe(name)
    assert [other for other in ALGORITHMS if algorithm_by_name(other) == own] == [name]


def test_names_and_aliases():
    assert algorithm_by_name("m_grpo") == algorithm_by_name("grpo")
    assert parse_algo("algo=m_grpo") == "grpo" and describe("m_grpo") == describe("grpo")
    assert algorithm_by_name("gspo", clip_low=0.1) == dataclasses.replace(algorithm_by_name("gspo"), clip_low=0.1)
    with pytest.raises(ValueError, match=r"algorithm 'ppo' is not known; choose one of turn_ppo, token_ppo, .*m_grpo$"):
        algorithm_by_name("ppo")

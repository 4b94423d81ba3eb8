"""Settings of the algorithm: what is allowed together, what is said about it, and the presets that choose them."""

import dataclasses

import numpy as np
import pytest

from configs.sections import parse_algo
from turnppo_jax.training.algorithm import AlgorithmConfig
from turnppo_jax.training.algorithm_notes import unread
from turnppo_jax.training.batching import BatchShape
from turnppo_jax.training.estimators import ESTIMATORS, TrajectoryFacts
from turnppo_jax.training.presets import ALGORITHMS, algorithm_by_name, describe
from turnppo_jax.training.rollout_table import Level, empty_table


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
        ({"estimator": "remax", "share_backbone": True}, "has no critic; allowed: share_backbone=False, critic_warm"),
        ({"length_adaptive_alpha": 0.05}, "length_adaptive_alpha=0.05 with estimator='turn_gae'; allowed: None"),
        ({"estimator": "token_gae", "length_adaptive_alpha": 0.0}, "length_adaptive_alpha=0.0; allowed: above 0"),
        ({"filter": "top_spread"}, "filter='top_spread' with group_size=1; allowed: 'none'"),
        ({"filter": "top_spread", "group_size": 2, "filter_fraction": 0.0}, "filter_fraction=0.0; allowed: above 0"),
        ({"anchors": "fuzzy"}, "anchors='fuzzy'; allowed: 'exact', 'similar'"),
        ({"num_branches": 0}, "num_branches=0; allowed: at least 1"),
        ({"estimator": "branches", "reward_placement": "final"}, "reward_placement='final' with estimator='branches'"),
        (
            {"estimator": "branches", "kl_coef": 0.1, "kl_placement": "reward"},
            "kl_placement='reward' with estimator='branches'; allowed: 'loss'",
        ),
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
    masked = {"group_size": 2, "whitening": "none", "mask_overlong": True, "kl_coef": 0.1, "kl_placement": "reward"}
    (line,) = AlgorithmConfig(estimator="group", **masked).warnings()
    assert "the score that a masked trajectory has in its group is without the penalty" in line
    assert AlgorithmConfig(estimator="turn_group", **masked).warnings() == []  # it does not see masked ones
    # over tokens a turn's ratio needs the mean, whatever the normalizer; the product counts a turn n_k times
    by_token = {"estimator": "token_gae", "ratio_level": "turn"}
    for normalizer in ("trajectory_tokens", "turns"):
        assert AlgorithmConfig(ratio_pooling="geometric_mean", normalizer=normalizer, **by_token).warnings() == []
        (line,) = AlgorithmConfig(normalizer=normalizer, **by_token).warnings()
        assert "times its number of tokens" in line


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"turn_weight": 0.5}, "not read with estimator='turn_gae': turn_weight=0.5"),
        ({"estimator": "group", "group_size": 2, "whitening": "none", "gae_lambda": 1.0, "value_clip": 0.5},
         "not read with estimator='group': gae_lambda=1.0, value_clip=0.5"),
        ({"estimator": "returns", "bootstrap_truncated": True}, "'returns': bootstrap_truncated=True"),
        ({"estimator": "sequence_critic", "gamma": 0.9, "reward_placement": "final", "critic_target": "lambda_return"},
         "'sequence_critic': gamma=0.9, reward_placement='final', critic_target='lambda_return'"),
        ({"critic_lambda": 0.5}, "not read with critic_target='monte_carlo': critic_lambda=0.5"),
        ({"estimator": "token_gae", "ratio_level": "token", "length_adaptive_alpha": 0.1, "gae_lambda": 0.5},
         "not read with length_adaptive_alpha: gae_lambda=0.5"),
        ({"value_loss_coef": 0.1}, "not read with share_backbone=False: value_loss_coef=0.1"),
        ({"filter_on": "success"}, "not read with filter='none': filter_on='success'"),
        ({"filter": "spread", "group_size": 2, "filter_fraction": 0.5}, "with filter='spread': filter_fraction=0.5"),
        ({"kl_kind": "k1", "kl_placement": "reward"}, "with kl_coef=0: kl_kind='k1', kl_placement='reward'"),
    ],
)  # fmt: skip
def test_a_field_that_nothing_reads_is_said(changes, line):
    (said,) = AlgorithmConfig(**changes).warnings()
    assert line in said


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_says_which_fields_it_reads(name):
    """What a function asks of the config is what its line in the table says; nothing more, nothing less."""
    own, asked = ESTIMATORS[name], set()

    class Asked:
        def __getattr__(self, field):
            asked.add(field)
            return getattr(AlgorithmConfig(**options), field)

    mask = np.ones((2, 3), bool)
    for target in ("monte_carlo", "lambda_return"):
        for level in own.levels:
            options = {"estimator": name, "critic_target": target, "group_size": 2, "whitening": "none"}
            options |= {"ratio_level": level, "critic_lambda": 0.5}
            cfg = Asked()
            table = empty_table(BatchShape(4, 8, 3, 6, trajectories=2, max_turns=3, max_sampled=6), cfg)
            table = dataclasses.replace(table, mask=mask, num_tokens=2 * mask)
            facts = TrajectoryFacts(*np.zeros((2, 2), int), np.zeros(2), np.zeros((2, 3), int), np.zeros((2, 3)))
            own.compute(Level(table, cfg), table, facts, cfg)
    # Whitening, level and the values' units are read for all; bootstraps, anchors and branches before the estimator.
    asked -= {"advantage_level", "whitening", "value_scale", "value_loss_kind"}
    elsewhere = {"bootstrap_truncated", "anchors", "anchor_similarity", "num_branches"}
    if name == "turn_gae":
        asked -= {"length_adaptive_alpha"}  # refused there: `_gae` serves tokens, too
    if "reward_placement" not in own.reads:
        asked -= {"reward_placement"}  # of the table's view, which every estimator gets
    assert asked == set(own.reads) - elsewhere


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_preset_is_allowed_documented_and_unlike_the_others(name):
    own = algorithm_by_name(name)
    # Only what goes with each other is said of a preset; a preset is what its paper says.
    assert not [line for line in own.warnings() if "scaled twice" in line] and not unread(own)
    assert "arXiv" in describe(name)
    assert [other for other in ALGORITHMS if algorithm_by_name(other) == own] == [name]


def test_names_and_aliases():
    assert algorithm_by_name("m_grpo") == algorithm_by_name("grpo")
    assert parse_algo("algo=m_grpo") == "grpo" and describe("m_grpo") == describe("grpo")
    assert algorithm_by_name("gspo", clip_low=0.1) == dataclasses.replace(algorithm_by_name("gspo"), clip_low=0.1)
    with pytest.raises(ValueError, match=r"algorithm 'ppo' is not known; choose one of turn_ppo, token_ppo, .*m_grpo$"):
        algorithm_by_name("ppo")

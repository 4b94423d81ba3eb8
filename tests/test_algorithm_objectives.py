"""Settings of ratios, objectives, KL, critic losses and importance weights: what they become, what is refused."""

import numpy as np
import pytest

from tests import kernel_oracle
from tests.learner_cases import make_trajectories, quick_compilation  # noqa: F401  (a fixture of this module)
from tests.tiny_config import get_config
from turnppo_jax.command_line import finalise
from turnppo_jax.settings import run_settings
from turnppo_jax.training import rollout_table as tables
from turnppo_jax.training.advantages import estimate as advantages_of
from turnppo_jax.training.algorithm import AlgorithmConfig
from turnppo_jax.training.batching import BatchShape, pack
from turnppo_jax.training.forward import LearnerSettings
from turnppo_jax.training.selection import select

SHAPE = BatchShape(rows=12, tokens=32, turns=4, sampled=12, trajectories=7, max_turns=4, max_sampled=16)
GROUP = {"estimator": "group", "group_size": 2, "whitening": "none", "dual_clip": None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ratio_level": "row"}, "ratio_level='row'; allowed: 'turn', 'token', 'sequence'"),
        ({"objective": "ppo"}, "objective='ppo'; allowed: 'clip', 'cispo', 'reinforce'"),
        ({"objective": "cispo"}, "dual_clip=3.0 with objective='cispo'; allowed: None"),
        (
            {"objective": "reinforce", "dual_clip": None, "clip_bias_correction": True},
            "clip_bias_correction=True with objective='reinforce'; allowed: False",
        ),
        ({"clip_bias_correction": True, "share_backbone": True}, "clip_bias_correction=True with share_backbone=True"),
        ({"kl_placement": "returns"}, "kl_placement='returns'; allowed: 'loss', 'reward'"),
        (
            {"kl_placement": "reward", "kl_straight_through": True},
            "kl_straight_through=True with kl_placement='reward'; allowed: False",
        ),
        ({"value_loss_kind": "bce"}, "value_loss_kind='bce'; allowed: 'squared', 'cross_entropy'"),
        (
            {"value_loss_kind": "cross_entropy", "value_clip": 0.2},
            "value_clip=0.2 with value_loss_kind='cross_entropy'; allowed: None",
        ),
        (
            {"value_loss_kind": "cross_entropy", "kl_placement": "reward", "kl_coef": 0.1},
            "kl_placement='reward' with value_loss_kind='cross_entropy'; allowed: 'loss'",
        ),
        ({"imitation_coef": -0.1}, "imitation_coef=-0.1; allowed: at least 0"),
        ({"importance_level": "row"}, "importance_level='row'; allowed: None, 'token', 'turn', 'sequence'"),
        ({"importance_mode": "drop"}, "importance_mode='drop'; allowed: 'truncate', 'mask'"),
        ({"importance_pooling": "sum"}, "importance_pooling='sum'; allowed: 'product', 'geometric_mean'"),
        (
            {"importance_high": 0.0},
            "importance_low=0.0, importance_high=0.0; allowed: 0 <= importance_low < importance",
        ),
        (
            {"importance_low": -1.0},
            "importance_low=-1.0, importance_high=2.0; allowed: 0 <= importance_low < importance",
        ),
        (
            {"importance_level": "token", "old_logprobs": "behavior"},
            "importance_level='token' with old_logprobs='behavior'; allowed: None",
        ),
    ],
)
def test_wrong_settings_are_named(changes, message):
    with pytest.raises(ValueError) as error:
        AlgorithmConfig(**changes)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_what_a_sequence_ratio_becomes():
    gspo = AlgorithmConfig(ratio_level="sequence", ratio_pooling="geometric_mean", **GROUP)
    assert (gspo.advantage_level, gspo.loss_level, gspo.normalizer) == ("turn", "turn", "trajectories")
    assert gspo.warnings() == []
    assert "trajectories do not weigh the same" in AlgorithmConfig(
        ratio_level="sequence", normalizer="trajectory_tokens", **GROUP
    ).warnings()[0]  # fmt: skip
    by_token = AlgorithmConfig(ratio_level="sequence", advantage_level="token", normalizer="trajectory_tokens", **GROUP)
    assert by_token.loss_level == "token" and by_token.warnings() == []
    assert AlgorithmConfig(estimator="token_gae", ratio_level="sequence").loss_level == "token"
    assert "no ratio corrects" in AlgorithmConfig(objective="reinforce", dual_clip=None, epochs=2).warnings()[0]


def test_who_needs_a_scoring_pass():
    def scores(**changes):
        return LearnerSettings(SHAPE, AlgorithmConfig(**changes)).scores_actor

    assert not scores() and not scores(kl_coef=0.1) and not scores(importance_level="token")
    assert scores(kl_coef=0.1, kl_placement="reward")
    assert not scores(kl_placement="reward")
    assert not scores(kl_coef=0.1, kl_placement="reward", old_logprobs="behavior")
    assert scores(importance_level="sequence")


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reward_placement": "final", "critic_target": "lambda_return"},
        {"estimator": "token_gae", "kl_kind": "k1", "reward_placement": "final"},
        GROUP | {"group_scale": "none"},
    ],
)
def test_kl_in_the_reward_of_every_sampled_token(changes, window):
    """By token where the advantage is, by turn summed; reward_placement moves what the environment gave and no more."""
    settings = {"whitening": "none", "kl_coef": 0.5, "kl_placement": "reward", "value_scale": 2.0}
    cfg = AlgorithmConfig(**(settings | changes))
    trajectories, rng = make_trajectories(8, count=6, window=window), np.random.default_rng(0)
    by_turn = cfg.advantage_level == "turn"
    kl = [[rng.normal(0, 0.5, size=len(turn.response_ids)) for turn in t.turns] for t in trajectories]
    table, n = tables.empty_table(SHAPE, cfg), 0
    values = rng.normal(size=np.shape(table.values))
    for members in ([0, 2, 5], [1, 3, 4]):
        batch, _ = pack(trajectories, SHAPE, members=members)
        turn_ids, own = np.asarray(tables.compact_turn_ids(batch)), np.full((SHAPE.rows, SHAPE.sampled), np.nan)
        for b, a in np.argwhere(turn_ids >= 0):
            turn = turn_ids[b, a]
            place = a - np.flatnonzero(turn_ids[b] == turn)[0]
            own[b, a] = kl[batch.trajectory_ids[b, turn]][batch.turn_index[b, turn]][place]
            n += 1
        table = tables.add_minibatch(table, batch, cfg)
        lines, columns = (np.asarray(x) for x in tables.entry_index(batch, SHAPE.max_turns, cfg))
        said = np.where(lines >= 0, values[lines, columns], np.nan) / cfg.value_scale
        table = tables.add_values(table, batch, said, np.zeros((SHAPE.rows, SHAPE.turns)), cfg)
        table = tables.add_kl(table, batch, own, np.where(turn_ids >= 0, 0.0, np.inf), cfg)
    got = advantages_of(table, select(trajectories, SHAPE, cfg).facts, None, cfg)
    kind = {"k1": lambda d: d, "k3": lambda d: np.exp(-d) - 1 + d}[cfg.kl_kind]
    estimates = [[kind(d) for d in own] for own in kl]
    wanted_scores = np.array([t.total_reward - 0.5 * sum(map(np.sum, own)) for t, own in zip(trajectories, estimates)])
    for m, trajectory in enumerate(trajectories):
        given = [turn.reward for turn in trajectory.turns]
        if cfg.reward_placement == "final":
            given = [0.0] * (len(given) - 1) + [sum(given)]
        lines = [np.append(np.zeros(len(d) - 1), r) - 0.5 * d for d, r in zip(estimates[m], given)]
        rewards = [line.sum() for line in lines] if by_turn else np.concatenate(lines)
        everything, size = [[True] * len(rewards)], len(rewards)
        if not cfg.has_critic:
            own = wanted_scores[[other.group == trajectory.group for other in trajectories]]
            want = np.full(size, wanted_scores[m] - own.mean())
        else:
            loop = (cfg.gamma, cfg.gae_lambda)
            a, returns = kernel_oracle.gae([rewards], [values[m, :size]], everything, *loop)
            if cfg.critic_target == "monte_carlo":
                _, returns = kernel_oracle.gae([rewards], np.zeros((1, size)), everything, cfg.gamma, 1.0)
            want = a[0]
            np.testing.assert_allclose(got.targets[m, :size], returns[0] / 2, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(got.advantages[m, :size], want, rtol=1e-4, atol=1e-5)
    total = sum(np.sum(d) for own in estimates for d in own)
    np.testing.assert_allclose(got.metrics["policy/ref_kl"], total / n, rtol=1e-4)


def test_each_schedule_ends_with_the_last_step_of_its_model():
    """Fault 56: the policy makes no step while the critic learns alone, so its schedule is that much shorter."""
    config = finalise(get_config())
    config["steps"] = 10
    config["algorithm"] |= {"critic_warmup_steps": 4, "epochs": 3, "num_minibatches": 2}
    settings = run_settings(config)
    assert (settings.actor_optimizer.total_steps, settings.critic_optimizer.total_steps) == (36, 60)
    config["actor_optimizer"] = {"schedule": "linear"}
    config["algorithm"]["critic_warmup_steps"] = 10  # the policy never learns: any length will do
    assert run_settings(config).actor_optimizer.schedule == "linear"

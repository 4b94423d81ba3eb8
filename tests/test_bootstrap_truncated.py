"""A truncated trajectory ends with a value where the estimator has one, through every estimator."""

import dataclasses

import jax
import numpy as np
import pytest

from tests import advantage_oracle, kernel_oracle, learner_reference
from tests.learner_cases import (
    actor_params,
    critic_params,
    make_learner,
    make_trajectories,
    quick_compilation,  # noqa: F401  (a fixture of this module)
)
from tests.test_advantages import SHAPE, TOLERANCE, estimate
from turnppo_jax.training.algorithm import AlgorithmConfig
from turnppo_jax.training.estimators import ESTIMATORS, TrajectoryFacts

READ_IT = {"turn_gae", "token_gae", "bi_level_gae"}


def loop(t, cfg, values, after, name):
    """(advantages, targets) of one trajectory in float64, entry by entry from its end; `after` is V behind its end."""
    lengths = [len(turn.response_ids) for turn in t.turns]
    rewards, n = [turn.reward for turn in t.turns], len(t.turns)
    monte_carlo = cfg.critic_target == "monte_carlo"
    if name == "bi_level_gae":
        ids = [np.repeat(np.arange(n), lengths)]

        def both(lam, turn_lam):
            found = advantage_oracle.bi_level(
                [rewards], [values], ids, cfg.gamma, cfg.turn_gamma, lam, turn_lam, "first",
                bootstrap=[[after] * n],
            )  # fmt: skip
            return found[0][0], found[1][0]

        advantages, targets = both(cfg.gae_lambda, cfg.turn_lambda)
        return advantages, both(1.0, 1.0)[1] if monte_carlo else targets
    if name == "token_gae":
        rewards = [x for r, size in zip(rewards, lengths) for x in [0.0] * (size - 1) + [r]]
    n = len(rewards)

    def by(lam):
        found = kernel_oracle.gae([rewards], [values], [[True] * n], cfg.gamma, lam, bootstrap=[[after] * n])
        return found[0][0], found[1][0]

    alpha = cfg.length_adaptive_alpha
    advantages, _ = by(max(0.0, 1 - 1 / (alpha * sum(lengths))) if alpha else cfg.gae_lambda)
    return advantages, by(1.0 if monte_carlo else cfg.critic_lambda)[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"estimator": "turn_gae", "critic_target": "lambda_return", "critic_lambda": 0.5},
        {"estimator": "token_gae", "length_adaptive_alpha": 0.3},
        {"estimator": "bi_level_gae", "turn_gamma": 0.8, "turn_lambda": 0.3},
        {"estimator": "bi_level_gae", "turn_gamma": 0.8, "turn_lambda": 0.3, "critic_target": "lambda_return"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_variants_of_gae_end_with_the_value_behind_the_last_action(changes):
    cfg = AlgorithmConfig(whitening="none", gamma=0.95, bootstrap_truncated=True, value_scale=2.0, **changes)
    trajectories, rng = make_trajectories(8), np.random.default_rng(0)
    trajectories[3].terminated = True  # both flags: the task ended
    width = SHAPE.max_turns if cfg.advantage_level == "turn" else SHAPE.max_sampled
    values, behind = rng.normal(size=(SHAPE.trajectories, width)), rng.normal(size=SHAPE.trajectories)
    _, got = estimate(trajectories, cfg, values, behind)
    ended = []
    for m, t in enumerate(trajectories):
        n = len(t.turns) if cfg.advantage_level == "turn" else sum(len(turn.response_ids) for turn in t.turns)
        after = behind[m] if t.truncated and not t.terminated else 0.0
        advantages, targets = loop(t, cfg, values[m, :n], after, cfg.estimator)
        np.testing.assert_allclose(got.advantages[m, :n], advantages, **TOLERANCE)
        np.testing.assert_allclose(got.targets[m, :n], targets / 2.0, **TOLERANCE)
        ended.append(after != 0)
    assert sum(ended) == 2


@pytest.mark.parametrize("name", ESTIMATORS)
def test_who_does_not_read_it_says_so_and_packs_nothing_for_it(name):
    """The prompt that nobody answered would take room in the rows, and make some of them too long."""
    trajectories, batches = make_trajectories(), []
    settings = {"estimator": name, "group_size": 2, "whitening": "none"}
    for asked in (False, True):
        learner = make_learner(bootstrap_truncated=asked, **settings)
        (mini,) = learner._minibatches(trajectories, np.arange(6), 0)
        batches += [mini.batch, mini.critic_batch]
    said = [line for line in learner.settings.algorithm.warnings() if "bootstrap_truncated=True" in line]
    assert (name in READ_IT) == (not said) == ("bootstrap_truncated" in ESTIMATORS[name].reads)
    if name in READ_IT:
        for batch in batches[2:]:
            assert np.sum(np.asarray(batch.bootstrap_positions) >= 0) == 3
        return
    jax.tree.map(np.testing.assert_array_equal, batches[2:], batches[:2])


def states(trajectories, window):
    """Contexts of the sampled tokens by trajectory and turn, and the one behind the last; lists of ids."""
    inside, behind = [], []
    for t in trajectories:
        context, own = [], []
        for turn in t.turns:
            context = ([] if window else context) + turn.prompt_ids.tolist()
            own.append([context + turn.response_ids[:n].tolist() for n in range(len(turn.response_ids))])
            context = context + turn.response_ids.tolist()
        inside.append(own)
        behind.append(None if t.final_prompt_ids is None else ([] if window else context) + t.final_prompt_ids.tolist())
    return inside, behind


def value_of(contexts):
    """V of the state that each context is, float64."""
    ids = np.zeros((96, learner_reference.LENGTH), np.int32)
    for row, context in enumerate(contexts):
        ids[row, : len(context)] = context
    ends = [len(context) - 1 for context in contexts]
    return np.asarray(learner_reference.all_values(critic_params(), ids), np.float64)[np.arange(len(ends)), ends]


@pytest.mark.parametrize(("name", "window"), [("turn_gae", True), ("token_gae", False)])
def test_the_critic_reads_the_state_behind_the_last_action(name, window):
    """In the learner's own programs: trimmed rows of a turn critic, prompts that grow and prompts rendered anew."""
    trajectories = make_trajectories(4, window=window)
    # One of a single turn: with prompts rendered anew its last state does not hold the turn either.
    trajectories[1] = dataclasses.replace(trajectories[1], turns=trajectories[1].turns[:1])
    settings = {"estimator": name, "whitening": "none", "gamma": 0.9, "critic_target": "lambda_return"}
    learner = make_learner(bootstrap_truncated=True, critic_lambda=0.9, **settings)
    actor, critic = learner.init_states(actor_params(), critic_params())
    (mini,) = learner._minibatches(trajectories, np.arange(6), 0)
    table = learner._score(actor, critic, mini, learner.empty_table(), np.float32(1.0), None, [])
    facts = TrajectoryFacts(scores=np.zeros(8, np.float32), group_ids=np.zeros(8, np.int32))
    got = learner._programs["estimate"](table, facts, jax.random.key(0))
    inside, behind = states(trajectories, window)
    by_turn = name == "turn_gae"
    for m, t in enumerate(trajectories):
        contexts = [context for turn in inside[m] for context in (turn[:1] if by_turn else turn)]
        values = value_of(contexts + ([behind[m]] if behind[m] else []))
        n = len(contexts)
        after = values[n] if behind[m] else 0.0
        assert abs(after) > 1e-3 or not behind[m]
        np.testing.assert_allclose(table.values[m, :n], values[:n], rtol=1e-4, atol=1e-5)
        advantages, targets = loop(t, learner.settings.algorithm, values[:n], after, name)
        np.testing.assert_allclose(got.advantages[m, :n], advantages, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(got.targets[m, :n], targets, rtol=1e-3, atol=1e-4)

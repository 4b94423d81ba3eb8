"""A config that follows the paper's recipe has no notes; each way out of it has one that names the fields."""

import pytest

from configs.paper import sokoban
from tests.tiny_config import get_config
from turnppo_jax.command_line import finalise
from turnppo_jax.recipe_notes import recipe_notes
from turnppo_jax.settings import run_settings


def notes(argument="", **changes):
    config = get_config(argument)
    config.actor_optimizer.learning_rate, config.critic_optimizer.learning_rate = 1e-6, 1e-5
    for field, value in changes.items():
        section, _, name = field.partition("__")
        config[section][name] = value
    return recipe_notes(run_settings(finalise(config)))


def test_the_recipe_itself_has_none():
    assert notes() == []  # 1e-5 over 1e-6 is not quite 10 in binary
    assert notes(critic_optimizer__learning_rate=5e-6) == []
    assert recipe_notes(run_settings(finalise(sokoban.get_config()))) == []


@pytest.mark.parametrize(("rate", "ratio"), [(4.9e-6, "4.9"), (1.01e-5, "10.1"), (1e-6, "1"), (1e-3, "1e+03")])
def test_learning_rates_outside_5_to_10(rate, ratio):
    (line,) = notes(critic_optimizer__learning_rate=rate)
    assert line.startswith(f"critic_optimizer.learning_rate={rate:g} is {ratio} times")


def test_groups_with_a_critic_and_more_epochs():
    (line,) = notes(algorithm__group_size=4)
    assert line.startswith("algorithm.group_size=4 with a critic")
    (line,) = notes(algorithm__epochs=3)
    assert line.startswith("algorithm.epochs=3")
    assert len(notes(algorithm__epochs=3, algorithm__group_size=2, critic_optimizer__learning_rate=1.0)) == 3


def test_a_note_about_a_critic_needs_one():
    assert notes("algo=grpo", critic_optimizer__learning_rate=1.0) == []
    assert notes(algorithm__share_backbone=True, critic_optimizer__learning_rate=1.0) == []
    assert notes(actor_optimizer__learning_rate=0.0) == []


def test_a_critic_that_learns_alone_to_the_end():
    config = get_config()
    assert notes(algorithm__critic_warmup_steps=config.steps - 1) == []
    (line,) = notes(algorithm__critic_warmup_steps=config.steps)
    assert line == "algorithm.critic_warmup_steps=6 with steps=6: the critic alone learns, the policy never"

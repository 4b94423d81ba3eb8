"""The studies in configs/ablations: every arm is a config that builds, and the arms differ in what the file says."""

import pathlib

import pytest

from turnppo_jax.command_line import UserError
from turnppo_jax.comparison.arms import Comparison, check_comparable, read_spec

# ml_collections loads config files with a method of importlib that Python 3.11 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")

FOLDER = pathlib.Path("configs/ablations")
FILES = sorted(path for path in FOLDER.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_arm_builds_and_is_unlike_the_others(path):
    comparison = Comparison(**read_spec(path))
    configs = {arm.name: arm.config(comparison.seeds[0]) for arm in comparison.arms}
    assert len(configs) >= 4 and len(comparison.seeds) == 3
    for name, config in configs.items():
        assert [other for other in configs if configs[other] == config] == [name]
    if path.stem != "thinking":  # two prompts, so two sets of episodes
        assert not [line for line in check_comparable(configs) if "rooms may differ" in line]


def test_the_argument_goes_to_the_config_and_mistakes_are_one_line(tmp_path):
    arm = read_spec("configs/ablations/discounts.py:model=qwen2.5-7b")["arms"][0]
    assert arm.config(0)["model"]["name"] == "Qwen/Qwen2.5-7B-Instruct"
    with pytest.raises(UserError, match=r"arm 'actor_1e-06-critic_x10': .*allowed: model=qwen2.5-3b"):
        read_spec("configs/ablations/learning_rates.py:model=gpt")["arms"][0].config(0)
    with pytest.raises(UserError, match=r"no file 'nowhere\.py'"):
        read_spec("nowhere.py")
    empty = tmp_path / "empty.py"
    empty.write_text("")
    with pytest.raises(UserError, match="has no function get_spec"):
        read_spec(empty)

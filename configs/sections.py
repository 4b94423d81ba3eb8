"""What config files are made of: sections with every field of the settings they become."""

import dataclasses
import types
import typing
from typing import Any

from ml_collections import ConfigDict, config_dict

from turnppo_jax.parallel.mesh import MeshSettings, RolloutMeshSettings
from turnppo_jax.settings import CheckpointSettings
from turnppo_jax.training.algorithm import AlgorithmConfig
from turnppo_jax.training.collapse import CollapseSettings
from turnppo_jax.training.presets import ALGORITHMS, ALIASES, REWARD_TERMS
from turnppo_jax.training.reward_terms import TERMS, RewardSettings
from turnppo_jax.training.warm_start import SFT_DEFAULTS


def parse_algo(argument: str) -> str:
    """The algorithm that `--config=FILE.py:algo=NAME` names, "turn_ppo" without an argument.

    Raises:
      ValueError: another name, or an algorithm that is not known; the known ones are listed.
    """
    options = dict(part.partition("=")[::2] for part in argument.split(",") if part)
    algo = options.pop("algo", "turn_ppo")
    algo = ALIASES.get(algo, algo)
    if options or algo not in ALGORITHMS:
        known = ", ".join([*ALGORITHMS, *ALIASES])
        raise ValueError(f"config argument {argument!r}: allowed: algo=NAME with NAME in {known}")
    return algo


def algorithm_section(algo: str, *, group_size: int = 0, **values: Any) -> ConfigDict:
    """`config.algorithm` of a preset.

    Args:
      algo: its name.
      group_size: in place of the preset's, where that has groups; 0 leaves it.
      **values: of the config; those that the preset names stand above them.
    """
    settings = values | ALGORITHMS[algo]
    if group_size and settings.get("group_size", 1) > 1:
        settings["group_size"] = group_size
    return section(AlgorithmConfig, **settings)


def base_config(algo: str) -> ConfigDict:
    """What few configs have otherwise: seed, writers, one device, the method's reward, alarms, how often to save."""
    config = ConfigDict()
    config.seed = 0
    config.writers = ("jsonl", "tensorboard", "console")
    config.mesh = section(MeshSettings)
    config.rollout_mesh = section(RolloutMeshSettings)
    config.reward = reward_section(algo)
    config.collapse = section(CollapseSettings)
    config.checkpoint = section(CheckpointSettings, save_every=20)
    return config


def env_section(
    env_id: str, *, num_workers: int = 0, reset_timeout_s: float = 60.0, step_timeout_s: float = 60.0, **kwargs: Any
) -> ConfigDict:
    """`config.env`, evaluated on the environment's split "eval".

    Args:
      env_id: registered id.
      num_workers: processes of a host; 0 plays inside the run's own, for environments that answer at once.
      reset_timeout_s: seconds.
      step_timeout_s: seconds.
      **kwargs: arguments of the environment.
    """
    return ConfigDict(
        {
            "id": env_id,
            "kwargs": kwargs,
            "eval_kwargs": {"split": "eval"},
            "num_workers": num_workers,
            "reset_timeout_s": reset_timeout_s,
            "step_timeout_s": step_timeout_s,
        }
    )


def reward_section(algo: str) -> ConfigDict:
    """`config.reward` of a preset: the environment's reward, where the method does not ask for other terms.

    Every known term has its field, so that a flag can give it a weight; one without a weight is none.
    """
    weights = dict.fromkeys(TERMS) | REWARD_TERMS.get(algo, {"environment": 1.0})
    terms = {name: config_dict.placeholder(float) if weight is None else weight for name, weight in weights.items()}
    return section(RewardSettings, terms=terms)


def section(settings: type, **values: Any) -> ConfigDict:
    """A section with every field of a settings dataclass, so that every field can be changed by a flag.

    Args:
      settings: the dataclass that `command_line.build` makes of the section.
      **values: in place of its defaults; fields without a default must be among them. A None keeps the field's type.
    """
    hints = typing.get_type_hints(settings)
    out = ConfigDict()
    for field in dataclasses.fields(settings):
        if field.name in values:
            value = values.pop(field.name)
        elif field.default is not dataclasses.MISSING:
            value = field.default
        else:
            raise ValueError(f"{settings.__name__}.{field.name} has no default: give it a value")
        out[field.name] = config_dict.placeholder(_type_of(hints[field.name])) if value is None else value
    if values:
        raise ValueError(f"{settings.__name__} has no field {next(iter(values))!r}")
    return out


def sft_section(**values: Any) -> ConfigDict:
    """`config.sft` with every field."""
    out = ConfigDict(SFT_DEFAULTS | values)
    if out.min_reward is None:
        out.min_reward = config_dict.placeholder(float)  # so that a flag can set it
    return out


def _type_of(hint: Any) -> type:
    """The type beside None."""
    if isinstance(hint, types.UnionType):
        return next(option for option in typing.get_args(hint) if option is not types.NoneType)
    return hint

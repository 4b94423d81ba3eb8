"""What config files are made of: sections with every field of the settings they become."""

import dataclasses
import types
import typing
from typing import Any

from ml_collections import ConfigDict, config_dict

from turnppo_jax.training.algorithm import ALGORITHMS
from turnppo_jax.training.warm_start import SFT_DEFAULTS


def parse_algo(argument: str) -> str:
    """The algorithm that `--config=FILE.py:algo=NAME` names, "turn_ppo" without an argument.

    Raises:
      ValueError: another name, or an algorithm that is not known; the known ones are listed.
    """
    options = dict(part.partition("=")[::2] for part in argument.split(",") if part)
    algo = options.pop("algo", "turn_ppo")
    if options or algo not in ALGORITHMS:
        raise ValueError(f"config argument {argument!r}: allowed: algo=NAME with NAME in {', '.join(ALGORITHMS)}")
    return algo


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

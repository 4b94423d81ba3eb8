"""What all commands share: flags, the config, and mistakes that end in one clear line.

    _CONFIG = command_line.config_flag()

    def main(argv): ...

    if __name__ == "__main__":
        command_line.run(main)

A mistake of the person at the keyboard (a flag, a config field, a path, an id) prints one line and ends with
exit code 2. A mistake of ours shows its traceback. `--debug` or TURNPPO_DEBUG=1 shows it always.
"""

import dataclasses
import enum
import os
import pathlib
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from absl import app, flags, logging
from ml_collections import config_dict, config_flags

_DEBUG = flags.DEFINE_bool("debug", False, "Show the whole traceback of an error.")
_EXIT_CODE = 2  # what argparse and most shells' own commands use for a wrong call
_ROOT = pathlib.Path(__file__).resolve().parents[1]
_OURS = tuple(str(_ROOT / name) + os.sep for name in ("turnppo_jax", "envs", "configs"))

# What absl and ml_collections raise while flags are parsed; `flag_error_line` tells mistakes in the call from others.
FLAG_ERRORS = (flags.Error, ValueError, OSError, ImportError, AttributeError, KeyError, TypeError)

T = TypeVar("T")


class UserError(ValueError):
    """A mistake of the caller; the message is one line that names the field, its value and what is allowed."""


def config_flag(default: str | None = None) -> flags.FlagHolder:
    """Defines `--config=FILE.py[:ARGUMENT]` and `--config.a.b=value`; call it at import.

    Several commands imported in one process share the flag, with the default of the first.

    Returns:
      A holder whose `value` is a locked ConfigDict. Without a default the flag must be given.
    """
    if "config" in flags.FLAGS:
        return flags.FlagHolder(flags.FLAGS, flags.FLAGS["config"])
    return config_flags.DEFINE_config_file(
        "config", default, "Configuration: a Python file with get_config().", lock_config=True
    )


def workdir_flag() -> flags.FlagHolder:
    """Defines `--workdir=DIR`, the run's directory; several commands imported in one process share it.

    Returns:
      A holder whose `value` is the text given, None where there is none.
    """
    if "workdir" in flags.FLAGS:
        return flags.FlagHolder(flags.FLAGS, flags.FLAGS["workdir"])
    return flags.DEFINE_string("workdir", None, "Directory of the run.")


def run(main: Callable[[Sequence[str]], Any]) -> None:
    """Parses the flags, calls `main(argv)` and ends the process.

    Exit codes: 0 where `main` returns None, what it returns otherwise, 2 for a mistake in the call, 130 for Ctrl-C.
    """

    def guarded(argv: Sequence[str]) -> Any:
        if len(argv) > 1:
            _fail(f"unexpected argument {argv[1]!r}; options are written --name=value")
        # Orbax tells of every file at level INFO.
        logging.set_verbosity(logging.WARNING)
        try:
            return main(argv)
        except KeyboardInterrupt:
            if _debug():
                raise
            print("interrupted", file=sys.stderr)
            sys.exit(130)
        except Exception as error:
            if _debug() or not is_callers_mistake(error):
                raise
            _fail(error_line(error))

    app.run(guarded, flags_parser=_parse)


def is_callers_mistake(error: BaseException) -> bool:
    """Whether one line says enough: a UserError, a path, or a ValueError that our own code raised on purpose.

    A ValueError out of a library below (a shape in jax, say) is our mistake and needs its traceback.
    """
    if isinstance(error, UserError | FileNotFoundError | NotADirectoryError | IsADirectoryError | PermissionError):
        return True
    if not isinstance(error, ValueError):
        return False
    # jax removes its own frames from a traceback and says so in a note; such an error only seems to be ours.
    if any("JAX" in note for note in getattr(error, "__notes__", ())):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return False
    innermost = os.path.realpath(frames[-1].filename)
    return innermost.startswith(_OURS) or innermost == os.path.realpath(sys.argv[0])


def error_line(error: BaseException) -> str:
    """An error as one line."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}: {error.filename}"
    return " ".join(str(error).split()) or type(error).__name__


def finalise(config: config_dict.ConfigDict | Mapping[str, Any]) -> dict[str, Any]:
    """The config as JSON types, references resolved: what is printed, saved and built from.

    Raises:
      UserError: a required field is not set, or a value is no JSON type; names the field.
    """
    if isinstance(config, config_dict.ConfigDict):
        try:
            config = config.to_dict()
        except config_dict.RequiredValueError as error:
            raise UserError(f"a required config field is not set: {error_line(error)}") from None
    return _plain(config, "config")


def build(cls: type[T], section: Mapping[str, Any], name: str = "config") -> T:
    """Makes a frozen dataclass from a section of the config.

    Args:
      cls: a dataclass; fields may be bool, int, float, str, tuples, literals, enums, dataclasses, and None beside them.
      section: value by field name: a ConfigDict or dict. Lists become tuples and whole numbers floats where the field
        is one; nothing else is converted.
      name: what the section is called in messages, for example "config.optim".

    Raises:
      UserError: an unknown field, a missing one, or a value of the wrong type.
    """
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    values = dict(section.items())
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise UserError(f"unknown field {name}.{unknown[0]}; known: {', '.join(sorted(fields))}")
    missing = [
        field.name
        for field in fields.values()
        if field.name not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise UserError(f"field {name}.{missing[0]} is missing ({_type_name(hints[missing[0]])})")
    return cls(**{key: _convert(hints[key], value, f"{name}.{key}") for key, value in values.items()})


def _convert(hint: Any, value: Any, name: str) -> Any:
    """The value as a field of type `hint` takes it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        for option in sorted(arguments, key=lambda option: option is float):  # 1 stays an int where both fit
            try:
                return _convert(option, value, name)
            except UserError:
                continue
    elif origin is typing.Literal:
        if any(value == option and type(value) is type(option) for option in arguments):
            return value
        raise UserError(f"{name}={value!r}: must be one of {', '.join(map(repr, arguments))}")
    elif origin is tuple or hint is tuple:
        if isinstance(value, list | tuple):
            if not arguments:
                return tuple(value)
            kinds = [arguments[0]] * len(value) if arguments[-1] is ... else list(arguments)
            if len(kinds) == len(value):
                return tuple(_convert(kind, item, f"{name}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value)))
    elif origin in (dict, Mapping) or hint is dict or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if isinstance(value, Mapping | config_dict.ConfigDict):
            return value.to_dict() if isinstance(value, config_dict.ConfigDict) else dict(value)
    elif hint is None or hint is types.NoneType:
        if value is None:
            return None
    elif dataclasses.is_dataclass(hint):
        if isinstance(value, hint):
            return value
        if isinstance(value, Mapping | config_dict.ConfigDict):
            return build(hint, value, name)
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(value)
        except ValueError:
            allowed = ", ".join(repr(member.value) for member in hint)
            raise UserError(f"{name}={value!r}: must be one of {allowed}") from None
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif isinstance(hint, type) and isinstance(value, hint):
        return value
    raise UserError(f"{name}={value!r}: needs {_type_name(hint)}, got {type(value).__name__}")


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")


def _plain(value: Any, name: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{name}[{index}]") for index, item in enumerate(value)]
    raise UserError(
        f"{name}={value!r}: a config holds numbers, text, None, lists and sections, got {type(value).__name__}"
    )


def _parse(argv: Sequence[str]) -> list[str]:
    """Parses the flags; --help prints what the command takes."""
    if any(re.match(r"--?(help|helpfull|helpshort|helpxml)(=|$)", argument) for argument in argv[1:]):
        return app.parse_flags_with_usage(list(argv))
    debug = os.environ.get("TURNPPO_DEBUG") or any(argument in ("--debug", "-debug") for argument in argv)
    try:
        argv = _config_first(argv)
        sys.argv[1:] = argv[1:]  # where ml_collections looks for the overrides
        rest = flags.FLAGS(argv)
        if "config" in flags.FLAGS and flags.FLAGS["config"].value is None:
            raise UserError("--config=FILE.py is missing")
        return rest
    except FLAG_ERRORS as error:
        line = flag_error_line(error, argv)
        if debug or line is None:
            raise
        _fail(line)


def _config_first(argv: Sequence[str]) -> list[str]:
    """Moves --config=FILE before the --config.a.b=value that change it, in whatever order they were written.

    Raises:
      UserError: there is no such file. (ml_collections would put off that error until the config is used.)
    """
    command, *rest = argv
    files = [argument for argument in rest if re.match(r"--?config=", argument)]
    for argument in files:
        path = argument.split("=", 1)[1].split(":")[0]
        if not os.path.isfile(path):
            raise UserError(f"no config file {path!r}")
    return [command, *files, *(argument for argument in rest if argument not in files)]


def flag_error_line(error: Exception, argv: Sequence[str]) -> str | None:
    """One line about an error while flags were parsed, None where it is no mistake in the call."""
    text = str(error)
    if isinstance(error, (AttributeError, KeyError, TypeError)):
        meant = re.search(r"Did you mean \\?\"(\w+)\\?\"", text)  # as ml_collections says it
        unknown = _unknown_field(argv)
        if unknown is not None:
            path, known = unknown
            return f"unknown config field {path}; " + (f"did you mean {meant[1]}?" if meant else f"known: {known}")
        if "no attribute 'get_config'" in text:
            return "the file of --config has no get_config()"
        return None
    if isinstance(error, ImportError):
        return f"the config file cannot be loaded: {error_line(error)}"
    if "Traceback" in text:  # ml_collections puts the traceback of get_config() into the message
        last = re.search(r"^(?:[\w.]*\.)?(ValueError|UserError): (.*)\Z", text.strip(), re.MULTILINE | re.DOTALL)
        return None if last is None else " ".join(last[2].split())
    return error_line(error)


def _unknown_field(argv: Sequence[str]) -> tuple[str, str] | None:
    """The first field "config.a.b" of a call that its config lacks, and what the section has instead."""
    command, *rest = argv
    argv = [command, *(argument for argument in rest if re.match(r"--?config=", argument))]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, flag_values=values, sys_argv=argv)
    try:
        values(argv)
    except FLAG_ERRORS:  # of the config file itself
        return None
    for path in (re.split(r"[= ]", argument)[0].lstrip("-") for argument in rest if re.match(r"--?config\.", argument)):
        section = values["config"].value
        for name in path.split(".")[1:]:
            fields = list(section) if isinstance(section, config_dict.ConfigDict) else []
            if name not in fields:
                return path, ", ".join(fields) or "none, it is a value"
            section = section[name]
    return None


def _debug() -> bool:
    return bool(_DEBUG.value or os.environ.get("TURNPPO_DEBUG"))


def _fail(line: str) -> typing.NoReturn:
    print(f"error: {line}", file=sys.stderr, flush=True)
    sys.exit(_EXIT_CODE)

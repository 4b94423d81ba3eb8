"""What is compared: arms (a config with changes each), seeds, and whether comparing them is fair."""

import dataclasses
import json
import pathlib
import re
import runpy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from absl import flags
from ml_collections import config_flags

from turnppo_jax import command_line
from turnppo_jax.command_line import UserError
from turnppo_jax.settings import run_settings

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")  # it names a directory
# Two arms are evaluated on the same episodes only where these are equal.
_EVALUATED = tuple(f"evaluation.{name}" for name in ("num_seeds", "samples", "temperature", "top_p", "top_k"))


@dataclasses.dataclass(frozen=True)
class Arm:
    """One thing that is compared.

    Attributes:
      name: of its directory and its line in the table.
      config_file: "FILE.py" or "FILE.py:ARGUMENT", as --config takes it.
      overrides: (field, value) as in --config.FIELD=VALUE.
    """

    name: str
    config_file: str
    overrides: tuple[tuple[str, str], ...] = ()

    def __post_init__(self):
        if not _NAME.fullmatch(self.name):
            raise UserError(
                f"arm {self.name!r}: a name has letters, digits and . _ + -, and begins with one of the first"
            )
        if any(field == "seed" for field, _ in self.overrides):
            raise UserError(f"arm {self.name!r} sets seed; allowed: --seeds, which all arms share")

    def flags(self, seed: int) -> list[str]:
        """Of `turnppo_jax.train`, without the workdir."""
        changes = (*self.overrides, ("seed", str(seed)))
        return [f"--config={self.config_file}", *(f"--config.{field}={value}" for field, value in changes)]

    def config(self, seed: int) -> dict[str, Any]:
        """The finalised config of a run, as `turnppo_jax.train` would make it of the same flags.

        Raises:
          UserError: no such file or field, or a value that is not allowed; names the arm.
        """
        argv = ["compare", *self.flags(seed)]
        path = self.config_file.split(":")[0]
        if not pathlib.Path(path).is_file():
            raise UserError(f"arm {self.name!r}: no config file {path!r}")
        values = flags.FlagValues()
        config_flags.DEFINE_config_file("config", None, flag_values=values, lock_config=True, sys_argv=argv)
        try:
            values(argv)
            config = command_line.finalise(values["config"].value)
            run_settings(config)
        except command_line.FLAG_ERRORS as error:
            line = command_line.flag_error_line(error, argv)
            if line is None:
                raise
            raise UserError(f"arm {self.name!r}: {line}") from error
        return json.loads(json.dumps(config))  # lists, as a run's config.json has them


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What is compared, and how.

    Attributes:
      arms: the first is what the others are compared with.
      seeds: of the runs, the same for every arm.
      metric: the number compared; None is the evaluated success rate.
      last: a run counts with the mean of so many last evaluations.
      jobs: runs at once.
    """

    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    metric: str | None = None
    last: int = 3
    jobs: int = 1

    def __post_init__(self):
        names = [arm.name for arm in self.arms]
        if not names:
            raise UserError("nothing to compare: give --runs=NAME=CONFIG.py:ARGUMENT, several times, or --spec=FILE")
        for what, given in (("arm", names), ("seed", self.seeds)):
            for value in given:
                if list(given).count(value) > 1:
                    raise UserError(f"{what} {value!r} is given twice")
        if not self.seeds:
            raise UserError("seeds=(): needs at least one")
        for name in ("last", "jobs"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: needs at least 1")
        for seed in self.seeds:
            if seed < 0:
                raise UserError(f"seed {seed}: needs a whole number of at least 0")


def parse_arm(text: str, shared: Iterable[tuple[str, str]] = ()) -> Arm:
    """An arm written "NAME=CONFIG.py[:ARGUMENT][;field=value]..."; its own changes come after the shared ones.

    Raises:
      UserError: another form.
    """
    name, equals, rest = text.partition("=")
    config_file, *changes = (part.strip() for part in rest.split(";"))
    if not equals or not config_file:
        raise UserError(f"run {text!r}: allowed: NAME=CONFIG.py[:ARGUMENT][;field=value]...")
    return Arm(name.strip(), config_file, (*shared, *(_change(part) for part in changes if part)))


def read_spec(path: str | pathlib.Path) -> dict[str, Any]:
    """The fields of a `Comparison` from "FILE.json", or "FILE.py[:ARGUMENT]" with a function `get_spec(argument)`.

        {"seeds": [0, 1, 2], "metric": "eval/sokoban/return_mean", "last": 3, "jobs": 1,
         "overrides": {"steps": 100},
         "arms": {"turn_ppo": "configs/quickstart.py:algo=turn_ppo",
                  "grpo": {"config": "configs/quickstart.py:algo=grpo", "overrides": {"algorithm.group_size": 16}}}}

    Only "arms" is needed; "overrides" beside it are those of all arms.

    Raises:
      UserError: no such file, no JSON, no `get_spec`, or a field that is unknown or of the wrong kind.
    """
    spec = _load_spec(str(path))
    known = {"arms": dict, "overrides": dict, "seeds": list, "metric": str, "last": int, "jobs": int}
    if not isinstance(spec, dict) or "arms" not in spec:
        raise UserError(f"{path}: needs an object with the field 'arms'; known: {', '.join(known)}")
    for name, value in spec.items():
        if name not in known:
            raise UserError(f"{path}: unknown field {name!r}; known: {', '.join(known)}")
        if not isinstance(value, known[name]):
            raise UserError(f"{path}: {name}={value!r}: needs {known[name].__name__}")
    shared = _changes(spec.pop("overrides", {}))
    arms = []
    for name, value in spec.pop("arms").items():
        arm = {"config": value} if isinstance(value, str) else value
        if not isinstance(arm, dict) or not set(arm) <= {"config", "overrides"} or "config" not in arm:
            raise UserError(f"{path}: arm {name!r}: needs 'CONFIG.py:ARGUMENT' or {{'config': ..., 'overrides': ...}}")
        arms.append(Arm(name, arm["config"], (*shared, *_changes(arm.get("overrides", {})))))
    if "seeds" in spec:
        if not all(isinstance(seed, int) for seed in spec["seeds"]):
            raise UserError(f"{path}: seeds={spec['seeds']!r}: needs whole numbers")
        spec["seeds"] = tuple(spec["seeds"])
    return spec | {"arms": tuple(arms)}


def _load_spec(path: str) -> Any:
    file, _, argument = path.partition(":")
    if not pathlib.Path(file).is_file():
        raise UserError(f"--spec: no file {file!r}")
    if file.endswith(".py"):
        make = runpy.run_path(file).get("get_spec")
        if make is None:
            raise UserError(f"{file}: has no function get_spec(argument)")
        try:
            return make(argument)
        except ValueError as error:
            raise UserError(f"{path}: {error}") from None
    try:
        return json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is no JSON: {error}") from None


def parse_changes(texts: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """("field=value", ...) as (field, value) pairs."""
    return tuple(_change(text) for text in texts)


def check_comparable(configs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Sees that all arms are evaluated alike.

    Args:
      configs: finalised config by arm, of one seed.

    Returns:
      Remarks on what makes the arms less comparable, for the table.

    Raises:
      UserError: another environment, other evaluation seeds or sampling than the first arm, or no metrics file.
    """
    (first, reference), *others = configs.items()
    remarks = []
    for name, config in configs.items():
        if "jsonl" not in config.get("writers", ("jsonl",)):
            raise UserError(f"arm {name!r}: writers={config['writers']}: needs 'jsonl' among them, which is read here")
    for name, config in others:
        for field in ("env.id", *_EVALUATED):
            here, there = field_of(config, field), field_of(reference, field)
            if here != there:
                raise UserError(
                    f"{field} differs: arm {first!r} has {there!r}, arm {name!r} has {here!r}; make them equal"
                )
        if rooms_of(config) != rooms_of(reference):
            remarks.append(f"{name}: its environment's arguments are not those of {first}; the rooms may differ")
        for field in ("evaluation.every", "steps"):
            here, there = field_of(config, field), field_of(reference, field)
            if here != there:
                remarks.append(f"{name}: {field}={here}, {first} has {there}; the last evaluations come at other steps")
    return remarks


def rooms_of(config: Mapping[str, Any]) -> Any:
    """What decides which rooms are evaluated, beside the seeds."""
    env = config["env"]
    return env["id"], {**env.get("kwargs", {}), **env.get("eval_kwargs", {})}


def field_of(config: Mapping[str, Any], path: str) -> Any:
    """The value at "a.b" of a finalised config, None where there is none."""
    value: Any = config
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def differences(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """{field: {arm: value}} of every field that is not the same in all configs."""
    flat = {name: dict(_flat(config)) for name, config in configs.items()}
    fields = dict.fromkeys(field for values in flat.values() for field in values)  # in the order of the configs
    table = {field: {name: values.get(field) for name, values in flat.items()} for field in fields}
    return {field: row for field, row in table.items() if len({repr(value) for value in row.values()}) > 1}


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _change(text: str) -> tuple[str, str]:
    field, equals, value = text.partition("=")
    if not equals or not field.strip():
        raise UserError(f"override {text!r}: allowed: field=value, as in --config.field=value")
    return field.strip().removeprefix("config."), value.strip()


def _changes(given: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    return tuple((field, value if isinstance(value, str) else _written(value)) for field, value in given.items())


def _written(value: Any) -> str:
    """As --config.field=value takes it."""
    return repr(tuple(value)) if isinstance(value, list) else str(value)

"""A mistake in the call ends in one clear line; a mistake of ours shows its traceback."""

import dataclasses
import enum
import json
import os
import pathlib
import subprocess
import sys
import textwrap
from typing import Literal

import ml_collections
import pytest
from ml_collections import config_dict

from turnppo_jax import command_line
from turnppo_jax.command_line import UserError

ROOT = pathlib.Path(command_line.__file__).parents[1]

COMMAND = '''
"""A small command."""
import json
from absl import flags
from turnppo_jax import command_line

_FIRST = command_line.config_flag(), command_line.workdir_flag()  # as if another command had been imported
_CONFIG = command_line.config_flag()
_WORKDIR = command_line.workdir_flag()
_WHAT = flags.DEFINE_enum("what", "print", ["print", "value", "user", "path", "library", "bug", "jax", "stop"], "What.")


def main(argv):
    what = _WHAT.value
    if what == "print":
        print(json.dumps(command_line.finalise(_CONFIG.value) | {"workdir": _WORKDIR.value}))
    elif what == "value":
        raise ValueError("env 'sokobn': unknown\\nknown: sokoban")
    elif what == "user":
        raise command_line.UserError("model='x': no such model")
    elif what == "path":
        open("nowhere/config.json")
    elif what == "library":
        json.loads("{")
    elif what == "bug":
        raise KeyError("x")
    elif what == "jax":
        import jax.numpy as jnp
        jnp.broadcast_to(jnp.ones((2,)), (3,))
    else:
        raise KeyboardInterrupt


if __name__ == "__main__":
    command_line.run(main)
'''

CONFIG = """
from ml_collections import config_dict

def get_config(algo="turn_ppo"):
    if algo not in ("turn_ppo", "grpo"):
        raise ValueError(f"algo={algo!r}: known are turn_ppo, grpo")
    config = config_dict.ConfigDict()
    config.algo = algo
    config.seed = 1
    config.ppo = config_dict.ConfigDict(dict(gamma=0.9, clip=(0.2, 0.3)))
    config.value = config_dict.ConfigDict(dict(clip=0.2))
    config.limit = config_dict.placeholder(int)
    return config
"""


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    folder = tmp_path_factory.mktemp("command")
    (folder / "command.py").write_text(textwrap.dedent(COMMAND))
    (folder / "config.py").write_text(CONFIG)
    (folder / "empty.py").write_text("")
    (folder / "broken.py").write_text("import package_that_is_nowhere\n")

    def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "command.py", *arguments],
            cwd=folder,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return call


def test_config_with_argument_and_overrides_in_any_order(command):
    done = command(
        "--config.ppo.gamma=1",
        "--config=config.py:grpo",
        "--config.ppo.clip=(0.5,0.5)",
        "--config.limit=4",
        "--workdir=runs/x",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "algo": "grpo",
        "seed": 1,
        "ppo": {"gamma": 1.0, "clip": [0.5, 0.5]},
        "value": {"clip": 0.2},
        "limit": 4,
        "workdir": "runs/x",
    }


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--confg=config.py"], "error: Unknown command line flag 'confg'. Did you mean: config ?"),
        ([], "error: --config=FILE.py is missing"),
        (["--config=nowhere.py"], "error: no config file 'nowhere.py'"),
        (["--config=empty.py"], "error: the file of --config has no get_config()"),
        (["--config=broken.py"], "error: the config file cannot be loaded: No module named 'package_that_is_nowhere'"),
        (["--config=config.py:ppo"], "error: algo='ppo': known are turn_ppo, grpo"),
        (
            ["--config=config.py", "--config.ppo.gamme=1"],
            "error: unknown config field config.ppo.gamme; did you mean gamma?",
        ),
        (
            ["--config=config.py", "--config.zzz=1"],
            "error: unknown config field config.zzz; known: algo, limit, ppo, seed, value",
        ),
        # The section that has the field is not the one that is named.
        (
            ["--config.ppo.gamma=1", "--config.value.gamma=1", "--config=config.py:grpo"],
            "error: unknown config field config.value.gamma; known: clip",
        ),
        (
            ["--config=config.py", "--config.seed.gamma=1"],
            "error: unknown config field config.seed.gamma; known: none, it is a value",
        ),
        (
            ["--config=config.py", "--config.algo.name=1"],
            "error: unknown config field config.algo.name; known: none, it is a value",
        ),
        (
            ["--config=config.py", "--config.ppo.gamma=high"],
            "error: flag --config.ppo.gamma=high: could not convert string to float: 'high'",
        ),
        (["--config=config.py", "extra"], "error: unexpected argument 'extra'; options are written --name=value"),
        (["--config=config.py", "--what=value"], "error: env 'sokobn': unknown known: sokoban"),
        (["--config=config.py", "--what=user"], "error: model='x': no such model"),
        (["--config=config.py", "--what=path"], "error: No such file or directory: nowhere/config.json"),
    ],
)
def test_a_mistake_in_the_call_is_one_line_and_exit_code_2(command, arguments, line):
    done = command(*arguments)
    assert done.stderr == line + "\n"
    assert done.returncode == 2
    assert done.stdout == ""


@pytest.mark.parametrize(("what", "name"), [("library", "JSONDecodeError"), ("bug", "KeyError"), ("jax", "ValueError")])
def test_a_mistake_of_ours_shows_its_traceback(command, what, name):
    done = command("--config=config.py", f"--what={what}")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and name in done.stderr


def test_debug_shows_the_traceback_of_a_mistake_in_the_call_too(command):
    for done in (
        command("--config=config.py", "--what=user", "--debug"),
        command("--config=config.py", "--what=user", TURNPPO_DEBUG="1"),
        command("--config=nowhere.py", TURNPPO_DEBUG="1"),
    ):
        assert "Traceback" in done.stderr
        assert done.returncode != 0


def test_help_and_interrupt(command):
    done = command("--help")
    assert "A small command." in done.stdout and "--what" in done.stdout
    done = command("--config=config.py", "--what=stop")
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


class Shape(enum.StrEnum):
    ROUND = "round"
    SQUARE = "square"


@dataclasses.dataclass(frozen=True)
class Inner:
    rate: float = 0.5


@dataclasses.dataclass(frozen=True)
class Outer:
    size: int
    rate: float = 1.0
    name: str = ""
    on: bool = False
    limit: int | None = None
    pair: tuple[float, float] = (0.0, 0.0)
    names: tuple[str, ...] = ()
    kind: Literal["a", "b"] = "a"
    shape: Shape = Shape.ROUND
    inner: Inner = Inner()
    extra: dict[str, int] = dataclasses.field(default_factory=dict)


def test_build_makes_the_dataclass_that_a_section_describes():
    section = ml_collections.ConfigDict(
        {
            "size": 3,
            "rate": 2,
            "pair": [1, 2],
            "names": ("x", "y"),
            "kind": "b",
            "shape": "square",
            "inner": {"rate": 1},
            "extra": {"a": 1},
        }
    )
    built = command_line.build(Outer, section)
    assert built == Outer(3, 2.0, "", False, None, (1.0, 2.0), ("x", "y"), "b", Shape.SQUARE, Inner(1.0), {"a": 1})
    assert isinstance(built.rate, float) and isinstance(built.pair[0], float)
    assert command_line.build(Outer, {"size": 1, "limit": 7}) == Outer(1, limit=7)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, r"field config.a.size is missing \(int\)"),
        ({"size": 1, "sise": 2}, r"unknown field config.a.sise; known: extra, inner, .* size"),
        ({"size": 1.0}, r"config.a.size=1.0: needs int, got float"),
        ({"size": True}, r"config.a.size=True: needs int, got bool"),
        ({"size": 1, "rate": "1"}, r"config.a.rate='1': needs float, got str"),
        ({"size": 1, "rate": None}, r"config.a.rate=None: needs float, got NoneType"),
        ({"size": 1, "on": 1}, r"config.a.on=1: needs bool, got int"),
        ({"size": 1, "limit": "x"}, r"config.a.limit='x': needs int \| None, got str"),
        ({"size": 1, "pair": (1, 2, 3)}, r"config.a.pair=\(1, 2, 3\): needs tuple\[float, float\], got tuple"),
        ({"size": 1, "names": (1,)}, r"config.a.names\[0\]=1: needs str, got int"),
        ({"size": 1, "names": "xy"}, r"config.a.names='xy': needs tuple\[str, ...\], got str"),
        ({"size": 1, "kind": "c"}, r"config.a.kind='c': must be one of 'a', 'b'"),
        ({"size": 1, "shape": "flat"}, r"config.a.shape='flat': must be one of 'round', 'square'"),
        ({"size": 1, "inner": {"rat": 1}}, r"unknown field config.a.inner.rat; known: rate"),
    ],
)
def test_build_names_what_is_wrong(section, message):
    with pytest.raises(UserError, match=message):
        command_line.build(Outer, section, "config.a")


def test_finalise_resolves_references_and_refuses_what_no_file_can_hold():
    config = config_dict.ConfigDict({"a": 3, "shape": (1, 2)})
    config.double = config.get_oneway_ref("a") * 2
    config.a = 5
    assert command_line.finalise(config) == {"a": 5, "shape": [1, 2], "double": 10}
    with pytest.raises(UserError, match=r"config.section.f=.* got function"):
        command_line.finalise({"section": {"f": lambda: None}})
    with pytest.raises(UserError, match="required config field is not set"):
        command_line.finalise(config_dict.ConfigDict({"a": config_dict.required_placeholder(int)}))

"""The README is true: its Python blocks run, its file tree is complete, its commands exist."""

import functools
import importlib
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def test_the_example_environment_plays(tmp_path):
    code = next(block for block in blocks("python") if "class Guess" in block)
    (tmp_path / "my_game.py").write_text(code, encoding="utf-8")
    play = (
        "from envs import registry; env = registry.make('my_game:Guess'); env.reset(6); "
        "print(env.step('9')[:4], env.step('7')[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", play],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "('lower', 0.0, False, False) (1.0, True, False, {'success': True})"


def test_the_kernels_block_runs():
    import numpy as np

    code = next(block for block in blocks("python") if "kernels.turn_gae" in block)
    names = {
        "turn_rewards": np.float32([[-0.1, -0.2, 10.9]]),
        "turn_values": np.float32([[0.5, 0.8, 0.2]]),
        "turn_mask": np.ones((1, 3), bool),
        "logprobs": np.zeros((1, 6), np.float32),
        "old_logprobs": np.zeros((1, 6), np.float32),
        "turn_ids": np.int32([[0, 0, 1, 1, 2, 2]]),
    }
    exec(code, names)
    np.testing.assert_allclose(names["advantages"][0], [7.971945, 8.7317, 10.7], rtol=1e-6)
    assert np.isfinite(names["loss"])


def test_the_file_tree_names_every_file():
    tree = TEXT[TEXT.index("## Files") :]
    listed, folder = set(), ""
    for line in tree.splitlines():
        if line.startswith("  "):
            listed.add(folder + line.split()[0])
        elif line.split() and line.split()[0].endswith("/"):
            folder = line.split()[0]
    there = set()
    for top in ("turnppo_jax", "envs", "configs", "launch", "benchmarks"):
        for path in (ROOT / top).rglob("*"):
            empty = path.name == "__init__.py" and not path.read_text(encoding="utf-8").strip()
            if path.is_file() and path.suffix in (".py", ".sh", ".yaml", ".md", "") and not empty:
                there.add(path.relative_to(ROOT).as_posix())
    assert listed == there


@pytest.mark.parametrize("module", sorted(set(re.findall(r"python -m (turnppo_jax\.\w+)", TEXT))))
def test_every_command_explains_itself(module):
    done = subprocess.run([sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert any(flag in done.stdout for flag in ("--workdir", "--topology", "--out")), done.stderr


def test_paths_in_commands_exist():
    for path in re.findall(r"(?:bash |--config=)((?:launch|configs)/[\w/.]+)", TEXT):
        assert path == "configs/NAME.py" or (ROOT / path).is_file(), path


def test_fields_in_flags_exist():
    """Each `--config.a.b` that the README writes, in the configs that it may be given to."""
    fields = set(re.findall(r"--config\.([a-z][\w.]*\w)", TEXT))
    assert {"seed", "rollout.num_prompts", "env.kwargs.catalogue"} <= fields
    for field in fields:
        names = (
            ("webshop_quickstart", "paper.webshop") if field.startswith("env.kwargs.") else ("quickstart", "sokoban")
        )
        for name in names:
            config = importlib.import_module(f"configs.{name}").get_config()
            *sections, last = field.split(".")
            assert last in functools.reduce(lambda part, key: part[key], sections, config), (name, field)

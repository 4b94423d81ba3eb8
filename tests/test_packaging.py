"""`pip install .` makes the packages importable elsewhere; requirements are bounded and complete."""

import ast
import importlib.metadata
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("turnppo_jax", "envs", "configs")


def requirements() -> list[Requirement]:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_every_requirement_is_bounded_on_both_sides_and_met_here():
    for requirement in requirements():
        operators = {specifier.operator for specifier in requirement.specifier}
        assert operators == {">=", "<"}, requirement
        assert importlib.metadata.version(requirement.name) in requirement.specifier, requirement


def test_whatever_is_imported_is_required():
    # torch, wandb and spacy are imported where they are installed; no part needs them.
    optional = {"torch", "wandb", "spacy"}
    names = {name for requirement in requirements() for name in _modules_of(requirement.name)}
    known = names | optional | set(PACKAGES) | {"tests"} | set(sys.stdlib_module_names)
    strangers = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for module in _imports(path):
                if module not in known:
                    strangers.setdefault(module, str(path.relative_to(ROOT)))
    assert not strangers


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder into which the packages are installed, as pip would into site-packages; needs no network."""
    folder = tmp_path_factory.mktemp("install")
    source = folder / "source"  # a copy, because a build leaves files in the tree that it builds
    source.mkdir()
    for name in (*PACKAGES, "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "requirements.txt", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    target = folder / "site"
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
        + ["--disable-pip-version-check", "--target", str(target), str(source)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return target


def test_every_module_is_installed(installed):
    for package in PACKAGES:
        here = sorted(str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py"))
        there = sorted(str(path.relative_to(installed)) for path in (installed / package).rglob("*.py"))
        assert there == here
    assert not (installed / "tests").exists()


def test_the_installed_packages_import_elsewhere_and_start_no_device(installed, tmp_path):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import turnppo_jax, envs, configs\n"
        "from turnppo_jax import kernels\n"
        "from jax._src import xla_bridge\n"
        "print(turnppo_jax.__file__, envs.__file__, configs.__file__, bool(xla_bridge._backends))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(installed)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    *files, devices = done.stdout.split()
    assert all(file.startswith(str(installed)) for file in files)
    assert devices == "False"


def test_the_metadata_of_the_installed_package(installed):
    (distribution,) = importlib.metadata.distributions(path=[str(installed)])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert distribution.metadata["Name"] == "turnppo_jax"
    assert distribution.version == project["version"]
    assert distribution.metadata["Requires-Python"] == ">=3.11"
    plain = {str(Requirement(line)) for line in distribution.requires if "extra ==" not in line}
    assert plain == {str(requirement) for requirement in requirements()}


def _modules_of(distribution: str) -> set[str]:
    """Top-level modules that an installed distribution brings."""
    names = set()
    for file in importlib.metadata.files(distribution) or ():
        first = re.split(r"[/.]", str(file))[0]
        if first.isidentifier() and str(file).endswith((".py", ".so", ".pyd")):
            names.add(first)
    return names


def _imports(path: pathlib.Path) -> set[str]:
    """Top-level modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.split(".")[0])
    return names

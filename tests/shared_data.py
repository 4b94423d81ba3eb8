"""Where the shared reference data lies, for tests that compare with it."""

import os
import pathlib

import pytest

_DEFAULT = pathlib.Path(__file__).resolve().parents[2] / "shared"


def shared_path(*parts: str) -> pathlib.Path:
    """Path below the shared data folder; skips the calling test, saying why, where it is absent."""
    path = pathlib.Path(os.environ.get("TURNPPO_SHARED", _DEFAULT)).joinpath(*parts)
    if not path.exists():
        pytest.skip(f"shared reference data not found at {path.name}; set TURNPPO_SHARED to its folder")
    return path

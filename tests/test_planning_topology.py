"""Topologies by name, and models by name."""

import json

import pytest

from turnppo_jax.command_line import UserError
from turnppo_jax.models.sizes import SIZES
from turnppo_jax.planning import environment
from turnppo_jax.planning.model import model_sizes
from turnppo_jax.planning.topology import parse


@pytest.mark.parametrize(
    ("name", "devices", "hosts", "host", "wraps"),
    [
        ("v5e:4x4", 16, 4, "v5e:2x2", (False, False)),
        ("v5e:2x4", 8, 1, "v5e:2x4", (False, False)),
        ("v5e:1x1", 1, 1, "v5e:1x1", (False, False)),
        ("v5e:8x16", 128, 32, "v5e:2x2", (False, True)),
        ("v6e:16x16", 256, 64, "v6e:2x2", (True, True)),
        ("v5p:2x2x4", 16, 4, "v5p:2x2x1", (False, False, False)),
        ("v5p:4x4x8", 128, 32, "v5p:2x2x1", (True, True, True)),
        ("v4:4x4x2", 32, 8, "v4:2x2x1", (False, False, False)),
        ("tpu7x:2x2x1", 8, 1, "tpu7x:2x2x1", (False, False, False)),
    ],
)
def test_names(name, devices, hosts, host, wraps):
    one = parse(name)
    assert (one.num_devices, one.num_hosts, one.host.name, one.wraps) == (devices, hosts, host, wraps)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e-16", r"topology='v5e-16'; allowed: TYPE:XxY with TYPE v5e, v6e, or TYPE:XxYxZ with TYPE v4, v5p, tpu7x"),
        ("v9:2x2", r"topology='v9:2x2'; allowed"),
        ("v5e:4", r"topology='v5e:4'; allowed"),
        ("v5e:4x4x4", r"v5e has 2 axes; allowed: v5e:XxY"),
        ("v5p:4x4", r"v5p has 3 axes; allowed: v5p:XxYxZ"),
        ("v5e:3x4", r"not made of whole hosts of 2x2 chips; allowed: multiples, or 1x1, 2x2, 2x4"),
        ("v5e:0x4", r"not made of whole hosts"),
    ],
)
def test_wrong_names_say_what_is_allowed(name, message):
    with pytest.raises(UserError, match=message):
        parse(name)


def test_without_libtpu_one_line_names_the_package(monkeypatch):
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"package libtpu, which is not installed: pip install 'jax\[tpu\]'"):
        parse("v5e:2x2").devices()


def test_models_by_name(tmp_path):
    assert model_sizes("qwen2.5-3b") == SIZES["qwen2.5-3b"]
    assert model_sizes("Qwen/Qwen2.5-7B-Instruct") == SIZES["qwen2.5-7b"]
    assert model_sizes("Qwen/Qwen3-4B-Instruct-2507") == SIZES["qwen3-4b"]
    (tmp_path / "config.json").write_text(json.dumps(SIZES["qwen3-0.6b"].to_hf_config("bfloat16")))
    assert model_sizes(str(tmp_path)).num_parameters == SIZES["qwen3-0.6b"].num_parameters
    with pytest.raises(UserError, match=r"config.model.name='Qwen/Qwen9-1B'.*known: tiny-qwen2, .*qwen2.5-7b"):
        model_sizes("Qwen/Qwen9-1B")

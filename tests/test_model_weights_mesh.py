"""Weights on several devices and of several processes: each check runs in processes of its own."""

import os
import pathlib
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]


def start(module, devices, *arguments):
    # The number of devices is fixed at the first use of jax.
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def checks(process):
    """The lines that the program printed, once it has ended well."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-3000:]
    return [line for line in out.splitlines() if not line.startswith(("sharding:", "[Gloo]"))]


def test_weights_onto_meshes_and_back(tmp_path):
    done = checks(start("tests.weights_on_mesh", 8, tmp_path))
    assert done == ["rules qwen2", "rules qwen3", "rules llama", "any axes", "fresh weights", "policies"]


def test_two_processes_read_what_is_theirs_and_write_one_directory(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    both = [start("tests.weights_of_processes", 2, tmp_path, port, index) for index in range(2)]
    try:
        for process in both:
            assert checks(process) == [
                "each process reads its own half",
                "one directory of both",
                "errors of the first are those of both",
                "fresh weights",
            ]
    finally:
        for process in both:
            process.kill()

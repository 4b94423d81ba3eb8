"""Host memory while a checkpoint loads onto a mesh: peak of the anonymous memory beside the size of the files.

    python -m benchmarks.load_memory [--model=qwen2.5-3b] [--dtypes=bfloat16,float32] [--directory=DIR] [--write]

Writes a random bfloat16 checkpoint of that shape (qwen2.5-3b: 6.2 GB) to DIR (default: a temporary folder), loads it
in a fresh process for each dtype onto eight virtual CPU devices, fsdp=8, and deletes it. On CPU devices the arrays
themselves are host memory too: as bfloat16 they are once the size of the files, as float32 twice; what passes that is
what loading needs. Pages of the files count as RssFile; the system drops them when it needs room. With --write the
parameters are written again beside the files, and what that needs beside the arrays is shown too.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from turnppo_jax.models.sizes import ModelSizes, sizes_by_name
from turnppo_jax.models.tensor_files import INDEX_FILE, WRITTEN_DTYPES, write_tensors
from turnppo_jax.models.tensor_layout import Tensor, tensors_of

_DEVICES = 8
_FILES = 4


def write_checkpoint(directory: pathlib.Path, sizes: ModelSizes) -> int:
    """Writes config.json and bfloat16 weights in several files, random and never whole in memory; returns the bytes."""
    tensors = tensors_of(sizes)
    per_file = -(-len(tensors) // _FILES)
    weight_map: dict[str, str] = {}
    for number in range(_FILES):
        chosen = sorted(tensors[number * per_file : (number + 1) * per_file], key=lambda tensor: tensor.name)
        name = f"model-{number + 1:05d}-of-{_FILES:05d}.safetensors"
        shapes = [(tensor.name, tensor.shape) for tensor in chosen]
        dtype = WRITTEN_DTYPES["bfloat16"]
        write_tensors(directory / name, dtype, shapes, (_random(tensor, number) for tensor in chosen))
        weight_map |= dict.fromkeys((tensor.name for tensor in chosen), name)
    (directory / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(sizes.to_hf_config("bfloat16")))
    return sum((directory / name).stat().st_size for name in set(weight_map.values()))


def _random(tensor: Tensor, seed: int) -> np.ndarray:
    # Bits below 0x4000 are the positive numbers up to 2.
    bits = np.random.default_rng(seed).integers(0, 0x4000, tensor.shape, dtype=np.uint16)
    return bits.view(WRITTEN_DTYPES["bfloat16"])


class PeakMemory:
    """Watches the anonymous memory of this process from a thread: `baseline` and `peak`, in bytes."""

    def __init__(self):
        self.baseline = self.peak = memory("RssAnon")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, memory("RssAnon"))

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, memory("RssAnon"))


def memory(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no field {field} in /proc/self/status; this needs Linux")


def load_and_watch(directory: pathlib.Path, dtype: str, write: bool) -> dict[str, float]:
    """Loads the checkpoint in this process, which has the devices, and says what it took; bytes and seconds."""
    import jax

    from turnppo_jax.models.checkpoint_files import load_model_config, load_weights
    from turnppo_jax.models.decoder import decoder_shapes
    from turnppo_jax.models.weight_saving import save_weights
    from turnppo_jax.parallel.mesh import make_mesh
    from turnppo_jax.parallel.sharding import shardings

    sizes, _ = load_model_config(directory)
    places = shardings(make_mesh(fsdp=_DEVICES), decoder_shapes(sizes))
    # What the devices need to exist at all is not part of loading.
    jax.block_until_ready([jax.device_put(np.ones(8), device) for device in jax.devices()])
    started = time.perf_counter()
    with PeakMemory() as watched:
        params = jax.block_until_ready(load_weights(directory, sizes, dtype, places))
    row = {
        "seconds": time.perf_counter() - started,
        "peak": watched.peak - watched.baseline,
        "end": memory("RssAnon") - watched.baseline,
        "arrays": sum(part.data.nbytes for leaf in jax.tree.leaves(params) for part in leaf.addressable_shards),
        "high_water_mark": memory("VmHWM"),
    }
    if write:
        with PeakMemory() as watched:
            save_weights(params, sizes, directory / "written", "bfloat16")
        row["writing"] = watched.peak - watched.baseline
    return row


def measure(directory: pathlib.Path, dtype: str, write: bool = False) -> dict[str, float]:
    """`load_and_watch` in a fresh process with eight CPU devices."""
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={_DEVICES}",
    }
    command = [sys.executable, "-m", "benchmarks.load_memory", f"--measure={directory}", f"--dtypes={dtype}"]
    command += ["--write"] if write else []
    root = pathlib.Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"loading as {dtype} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line for each dtype; the ratio is the peak over the size of the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen2.5-3b")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--directory", type=pathlib.Path, default=None)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--measure", type=pathlib.Path, default=None, help=argparse.SUPPRESS)  # the child's part
    flags = parser.parse_args(arguments)
    dtypes = flags.dtypes.split(",")
    if flags.measure:
        print(json.dumps(load_and_watch(flags.measure, dtypes[0], flags.write)))
        return
    directory = pathlib.Path(tempfile.mkdtemp(prefix="load_memory_", dir=flags.directory))
    try:
        size = write_checkpoint(directory, sizes_by_name(flags.model))
        print(f"{flags.model}: {size / 1e9:.2f} GB of files (bfloat16), {_DEVICES} CPU devices, fsdp={_DEVICES}")
        print(
            f"{'loaded as':10}{'arrays':>10}{'peak':>10}{'peak/files':>12}{'VmHWM':>10}{'seconds':>10}{'writing':>10}"
        )
        for dtype in dtypes:
            row = measure(directory, dtype, flags.write)
            cells = [f"{row[name] / 1e9:8.2f}GB" for name in ("arrays", "peak", "high_water_mark")]
            cells.insert(2, f"{row['peak'] / size:12.3f}")
            cells.append(f"{row['seconds']:10.1f}")
            cells.append(f"{row['writing'] / 1e9:8.2f}GB" if flags.write else f"{'-':>10}")
            print(f"{dtype:10}" + "".join(cells), flush=True)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()

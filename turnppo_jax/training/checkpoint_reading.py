"""Reading checkpoints: which are whole, whether they fit, and their arrays on any mesh."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from turnppo_jax.models.sizes import ModelSizes


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read; the message is one line and says what to do."""


def usable_steps(workdir: str | pathlib.Path) -> list[int]:
    """The steps whose checkpoints are whole, in order; changes nothing, so that any process may ask."""
    return [step for step, missing in scan_steps(pathlib.Path(workdir).absolute() / "checkpoints") if missing is None]


def restore_actor_params(
    workdir: str | pathlib.Path,
    step: int | None = None,
    *,
    shardings: Callable[[Any], Any] | None = None,
) -> tuple[Any, ModelSizes, dict[str, Any]]:
    """Reads the actor's parameters of a run, for evaluation and export; no optimizer state is read.

    Args:
      workdir: the run's directory.
      step: the step, default the newest whole one.
      shardings: maps the tree of `jax.ShapeDtypeStruct` to a tree of shardings; default the first device.

    Returns:
      (params, sizes, config): nested dict of arrays in the dtype they were saved in, the model's sizes, and the
      finalised config as JSON types.

    Raises:
      CheckpointError: there is no such checkpoint, or it holds no sizes.
    """
    directory = pathlib.Path(workdir).absolute() / "checkpoints"
    known = usable_steps(workdir)
    if not known:
        raise CheckpointError(f"no checkpoint in {directory}; train with --workdir={workdir} first")
    step = known[-1] if step is None else step
    if step not in known:
        raise CheckpointError(f"no checkpoint of step {step} in {directory}; there are {known}")
    record = read_record(directory, step)
    if record["sizes"] is None:
        raise CheckpointError(f"checkpoint {directory / str(step)} holds no model sizes")
    with _Reader(directory / str(step), ocp.PyTreeCheckpointHandler) as reader:
        saved = reader.item_metadata("actor")["params"]
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype), saved)
        if shardings is None:
            first = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            placed = jax.tree.map(lambda _: first, shapes)
        else:
            placed = shardings(shapes)
        target = {
            "params": jax.tree.map(
                lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, placed
            )
        }
        params = reader.restore(
            actor=ocp.args.PyTreeRestore(
                item=target,
                restore_args=ocp.checkpoint_utils.construct_restore_args(target),
                partial_restore=True,
            )
        )["actor"]["params"]
    return params, ModelSizes(**record["sizes"]), record["config"]


class _Reader:
    """Reads items of one step directory; `arrays` is the class of Orbax handler for the model states."""

    def __init__(self, path: pathlib.Path, arrays: type):
        self._path = path
        handlers = {name: arrays() for name in _held(path)}
        self._checkpointer = ocp.Checkpointer(
            ocp.CompositeCheckpointHandler(config=ocp.JsonCheckpointHandler(), **handlers)
        )

    def item_metadata(self, name: str) -> Any:
        """Structure, shapes and dtypes of a saved item."""
        with self._clear_errors():
            return self._checkpointer.metadata(self._path).item_metadata[name].tree

    def restore(self, **arguments: Any) -> Any:
        """The named items."""
        with self._clear_errors():
            return self._checkpointer.restore(self._path, ocp.args.Composite(**arguments))

    @contextlib.contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError) as error:
            raise CheckpointError(
                f"checkpoint {self._path} cannot be read: {first_line(error)}; "
                "rename or remove it to continue from an older one"
            ) from error

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._checkpointer.close()


def _held(path: pathlib.Path) -> list[str]:
    """Names of the model states in a step directory."""
    return sorted(entry.name for entry in path.iterdir() if (entry / "_METADATA").is_file())


def read_record(directory: pathlib.Path, step: int) -> dict[str, Any]:
    """What stands beside the arrays: {"config", "sizes", "step", "score"}."""
    with _Reader(directory / str(step), ocp.StandardCheckpointHandler) as reader:
        return reader.restore(config=ocp.args.JsonRestore())["config"]


def restore_onto(directory: pathlib.Path, step: int, target: Mapping[str, Any], *, cast: bool) -> dict[str, Any]:
    """The model states of a step, on the shapes, dtypes and shardings of the target; see `Checkpoints.restore`."""
    path = directory / str(step)
    if not path.is_dir():
        raise CheckpointError(
            f"no checkpoint of step {step} in {directory}; there are {usable_steps(directory.parent)}"
        )
    missing = what_is_missing(path)
    if missing is not None:
        raise CheckpointError(f"checkpoint {path} is not whole: {missing}")
    wanted = sorted(name for name, value in target.items() if value is not None)
    if _held(path) != wanted:
        raise CheckpointError(
            f"checkpoint {path} holds {_held(path)} and this run needs {wanted}; "
            "continue with the config of that run, or choose another --workdir"
        )
    abstract = {name: placed_shapes(target[name]) for name in wanted}
    with _Reader(path, ocp.StandardCheckpointHandler) as reader:
        for name, tree in abstract.items():
            difference = _first_difference(reader.item_metadata(name), tree, cast=cast)
            if difference is not None:
                raise CheckpointError(
                    f"checkpoint {path} does not fit this run: {name}.{difference}; "
                    "continue with the config of that run, or choose another --workdir"
                )
        restored = reader.restore(**{name: ocp.args.StandardRestore(tree) for name, tree in abstract.items()})
    return {name: restored[name] if name in abstract else None for name in target}


def placed_shapes(tree: Any) -> Any:
    """Shapes, dtypes and shardings of a tree's leaves: a target to restore onto that holds no memory."""

    def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
        # A leaf without a sharding is placed whole on the first device, also where the checkpoint lay on a mesh.
        sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(abstract, tree)


def _first_difference(saved: Any, target: Any, *, cast: bool) -> str | None:
    """What differs first between the leaves in a checkpoint and those of the target, in the target's order."""
    found = {_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(saved)[0]}
    for path, leaf in jax.tree_util.tree_flatten_with_path(target)[0]:
        name = _name(path)
        other = found.pop(name, None)
        if other is None:
            return f"{name} {list(leaf.shape)} is not in the checkpoint"
        if tuple(other.shape) != tuple(leaf.shape):
            return f"{name} is {list(other.shape)} in the checkpoint and {list(leaf.shape)} here"
        if not cast and np.dtype(other.dtype) != np.dtype(leaf.dtype):
            return f"{name} is {np.dtype(other.dtype)} in the checkpoint and {np.dtype(leaf.dtype)} here"
    for name, other in found.items():
        return f"{name} {list(other.shape)} is in the checkpoint and not here"
    return None


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def first_line(error: BaseException) -> str:
    """The first line of an error, with its type."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text[:300]}"


def scan_steps(directory: pathlib.Path) -> list[tuple[int, str | None]]:
    """(step, what it lacks or None) of every step directory, in order of the steps."""
    if not directory.is_dir():
        return []
    steps = [(int(entry.name), entry) for entry in directory.iterdir() if entry.name.isdigit() and entry.is_dir()]
    return [(step, what_is_missing(path)) for step, path in sorted(steps)]


def what_is_missing(path: pathlib.Path) -> str | None:
    """The first part that a whole checkpoint has and this directory lacks."""
    if not any(path.iterdir()):
        return "it is empty"
    # Orbax writes these last, and `manifest.ocdbt` names the data files of an item.
    parts = ["_CHECKPOINT_METADATA", "config/metadata", "actor/_METADATA", "actor/manifest.ocdbt"]
    if (path / "critic").exists():
        parts += ["critic/_METADATA", "critic/manifest.ocdbt"]
    for part in parts:
        file = path / part
        if not file.is_file() or file.stat().st_size == 0:
            return f"{part} is missing or empty"
    for file in sorted(path.glob("*/d/*")):  # what a machine that lost power may leave of the data
        if file.stat().st_size == 0:
            return f"{file.relative_to(path)} is empty"
    return None

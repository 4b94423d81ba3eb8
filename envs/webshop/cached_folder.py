"""Folders that are built once and then only read, by any number of processes."""

import contextlib
import fcntl
import json
import os
import pathlib
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator

MANIFEST = "manifest.json"
# The content of files up to here is compared when a folder is opened; of larger ones the size is.
_CHECKED_BYTES = 1 << 22
_BUILDING = ".building-"  # in the names of unfinished folders


def default_cache() -> pathlib.Path:
    """Where folders lie when no place is named."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "turnppo_jax" / "webshop"


def seal(folder: pathlib.Path, about: dict[str, object]) -> None:
    """Writes the manifest: `about`, and size and check sum of every file; last, so that a folder with one is whole."""
    files = {path.name: _state(path, checked=True) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({**about, "files": files}, indent=1))


def fault(folder: pathlib.Path, about: dict[str, object]) -> str | None:
    """What keeps a folder from being the sealed one that says `about` of itself; None where nothing does."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = manifest["files"].items()
    except FileNotFoundError:
        return f"has no {MANIFEST}"
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"has a broken {MANIFEST} ({type(error).__name__})"
    for name, value in about.items():
        if manifest.get(name) != value:
            return f"has {name} {manifest.get(name)!r}, expected {value!r}"
    for name, state in files:
        path = folder / name
        if not path.is_file():
            return f"lacks {name}"
        checked = path.stat().st_size <= _CHECKED_BYTES
        if _state(path, checked)[: 1 + checked] != state[: 1 + checked]:
            return f"has a damaged {name}"
    return None


def _state(path: pathlib.Path, checked: bool) -> list[int]:
    check = 0
    with path.open("rb") as file:
        while checked and (chunk := file.read(1 << 20)):
            check = zlib.crc32(chunk, check)
    return [path.stat().st_size, check]


def built_folder(target: pathlib.Path, about: dict[str, object], build: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """`target`, built first where it does not exist or is damaged.

    Built beside its place and renamed, so that `target` is whole at any time. Of several processes one builds and the
    others wait for it. What a killed one left behind is removed by the next.

    Args:
      target: the folder.
      about: what its manifest must say; another answer is a reason to build.
      build: fills an empty folder; may raise.

    Raises:
      ValueError: the place cannot be written; one line that names it.
    """
    if fault(target, about) is None:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(target.with_name(target.name + ".lock")) as alone:
            if fault(target, about) is not None:
                if alone:
                    for left in target.parent.glob(f"{target.name}{_BUILDING}*"):
                        shutil.rmtree(left, ignore_errors=True)
                _build(target, about, build)
    except OSError as error:
        raise ValueError(f"cannot build {target}: {error.strerror or error}; name another cache folder") from error
    return target


def _build(target: pathlib.Path, about: dict[str, object], build: Callable[[pathlib.Path], None]) -> None:
    prefix = f"{target.name}{_BUILDING}"
    folder = pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        build(folder)
        seal(folder, about)
        folder.chmod(0o755)  # temporary folders are private, a cache may be shared
        if fault(target, about) is None:
            return  # another process was faster, where there are no locks
        if target.exists():
            # Processes that have the damaged one open keep what they have mapped.
            damaged = pathlib.Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
            target.rename(damaged / "damaged")
            shutil.rmtree(damaged)
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _only_one(path: pathlib.Path) -> Iterator[bool]:
    """Waits until no other process is inside; false where the file system has no locks: then each builds for itself."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True

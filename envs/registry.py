"""Environment ids and how to make the environment behind one.

An id is a registered name (`sokoban`) or `module:Class`, which needs no registration and is found
like any import, the current directory included. Modules are imported when an environment is made.
"""

import dataclasses
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from envs.base import TextEnv


@dataclasses.dataclass(frozen=True)
class _Entry:
    entry_point: str | Callable[..., TextEnv]
    kwargs: dict[str, Any]


_ENTRIES: dict[str, _Entry] = {}


def register(env_id: str, entry_point: str | Callable[..., TextEnv], **kwargs: Any) -> None:
    """Gives an environment a name.

    Args:
      env_id: the name; without a colon.
      entry_point: `"module:Class"`, imported only when the environment is made, or the class itself.
        A worker process knows only what the modules it imports register, so environments that shall
        run in workers are named `module:Class` or registered below.
      **kwargs: default arguments; those given to `make` win.

    Raises:
      ValueError: the name is taken, or holds a colon.
    """
    if ":" in env_id:
        raise ValueError(f"environment id {env_id!r} must not hold ':' (that is the form module:Class)")
    if env_id in _ENTRIES:
        raise ValueError(f"environment id {env_id!r} is already registered")
    _ENTRIES[env_id] = _Entry(entry_point, kwargs)


def known_ids() -> tuple[str, ...]:
    """All registered ids, sorted."""
    return tuple(sorted(_ENTRIES))


def check_id(env_id: str) -> None:
    """Raises ValueError, naming the known ids, unless the id is registered or of the form module:Class."""
    if env_id in _ENTRIES:
        return
    module, colon, attribute = env_id.partition(":")
    if not (colon and module and attribute):
        raise ValueError(f"unknown environment id {env_id!r}; known: {', '.join(known_ids())}, or module:Class")


def make(env_id: str, **kwargs: Any) -> TextEnv:
    """Makes an environment.

    Args:
      env_id: a registered id or `module:Class`.
      **kwargs: arguments of the environment; they win over the registered defaults.

    Raises:
      ValueError: unknown id, module or class not found, unknown or missing argument, or an argument
        that the environment refuses. One line that names it.
    """
    check_id(env_id)
    entry = _ENTRIES.get(env_id, _Entry(env_id, {}))
    factory = _load(env_id, entry.entry_point) if isinstance(entry.entry_point, str) else entry.entry_point
    arguments = {**entry.kwargs, **kwargs}
    _check_arguments(env_id, factory, arguments)
    return factory(**arguments)


def _load(env_id: str, entry_point: str) -> Callable[..., TextEnv]:
    module_name, _, attribute = entry_point.partition(":")
    if os.getcwd() not in sys.path:  # already there under `python -m`, not under `python script.py`
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"environment {env_id!r}: cannot import module {module_name!r} ({error})") from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise ValueError(f"environment {env_id!r}: module {module_name!r} has no {attribute!r}") from error


def _check_arguments(env_id: str, factory: Callable[..., TextEnv], arguments: dict[str, Any]) -> None:
    parameters = inspect.signature(factory).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        known = [p.name for p in named]
        for name in arguments:
            if name not in known:
                listed = ", ".join(known) or "none"
                raise ValueError(f"environment {env_id!r} has no argument {name!r}; known: {listed}")
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in arguments:
            raise ValueError(f"environment {env_id!r} needs the argument {parameter.name!r}")


register("sokoban", "envs.sokoban.env:SokobanEnv")
# The larger room of RAGEN's experiments (8x8, two boxes, reverse play of at most 10 moves).
register("sokoban-2box", "envs.sokoban.env:SokobanEnv", height=8, width=8, num_boxes=2, search_depth=10)
# Boxoban levels take four boxes and some 50 moves; the limits allow for detours.
register("sokoban-boxoban", "envs.sokoban.env:BoxobanEnv", max_actions=120, max_turns=24, actions_per_turn=5)
register("webshop", "envs.webshop.env:WebShopEnv")
# RAGEN's limit of turns.
register("webshop-ragen", "envs.webshop.env:WebShopEnv", max_turns=9)
register("bandit", "envs.bandit.env:BanditEnv")
register("countdown", "envs.countdown.env:CountdownEnv")
register("echo", "envs.small:EchoEnv")
register("parity", "envs.small:ParityEnv")

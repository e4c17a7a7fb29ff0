"""User classes with an instance per trajectory: tools with state, or an environment with ``step``.

The class has ``__init__(**environment_kwargs)``, and optionally ``reset(row, seed)``, ``score()`` and ``close()``. Its
public methods are tools (if any are marked by `rltrain.tool`, only these); or it has ``step(text)`` and no tools.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from rltrain.agents import verl_stubs
from rltrain.agents.functions import ToolFunction, tools_by_name
from rltrain.agents.marks import mark_of
from rltrain.common.errors import ConfigError
from rltrain.common.plugin import is_plugin, load_plugin

ENVIRONMENT = "actor_rollout_ref.rollout.multi_turn.environment"
_HOOKS = frozenset(("reset", "step", "score", "close"))


def load_class(place: str) -> type:
    """Load the class ``place`` (FILE.py:NAME). Raises ConfigError if it cannot be imported or is not a class."""
    if not is_plugin(place):
        raise ConfigError(f"{ENVIRONMENT}={place} does not name a class. Write FILE.py:NAME, or package.module:NAME.")
    with verl_stubs.importable():
        kind = load_plugin(ENVIRONMENT, place)
    if not inspect.isclass(kind):
        raise ConfigError(
            f"{ENVIRONMENT}={place} is not a class. Functions are tools of multi_turn.function_tool_path."
        )
    return kind


def methods_of(place: str, kind: type) -> dict[str, ToolFunction]:
    """Return the methods of a class that are tools, by the names that the model sees; {} if it has ``step``.

    Raises ConfigError for a class with neither tools nor ``step``, and for one with both ``step`` and marked tools.
    """
    where = f"{ENVIRONMENT}={place}"
    methods = _public(kind)
    marked = {name: method for name, method in methods.items() if mark_of(method)}
    if hasattr(kind, "step"):
        if marked:
            raise ConfigError(
                f"{where}: step gets the model's whole turn, so {', '.join(marked)} would never be called. Remove "
                "step, or the decorators."
            )
        return {}
    if not methods:
        raise ConfigError(f"{where}: the class has neither step nor public methods, which would be tools.")
    return tools_by_name(where, marked or methods)


def _public(kind: type) -> dict[str, Callable[..., Any]]:
    """Return methods by name, base classes first, without the argument ``self``. They are for schemas, never called."""
    names = dict.fromkeys(name for base in reversed(kind.__mro__[:-1]) for name in vars(base))
    methods: dict[str, Callable[..., Any]] = {}
    for name in names:
        method = inspect.getattr_static(kind, name)
        if name.startswith("_") or name in _HOOKS:
            continue
        if inspect.isfunction(method):
            methods[name] = MethodType(method, object())
        elif isinstance(method, staticmethod | classmethod):
            methods[name] = getattr(kind, name)
    return methods

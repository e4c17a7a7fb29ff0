"""Decorator that marks a function as a tool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_MARK = "__rltrain_tool__"


@dataclass(frozen=True)
class Mark:
    """Name and schema of a tool for the model; None: as in its file."""

    name: str | None
    schema: Any


def tool(function: Any = None, /, *, name: str | None = None, schema: Any = None) -> Any:
    """Mark a function as a tool. Unmarked functions of the same file or class are then not tools.

    ``@tool``, ``@tool("name")`` or ``@tool(name=..., schema=...)``: the name that the model sees, if not the
    function's, and the JSON schema, if not generated from types and docstring.
    """
    if not callable(function):
        return lambda marked: _marked(marked, Mark(name or function, schema))
    return _marked(function, Mark(name, schema))


def _marked(function: Any, mark: Mark) -> Any:
    setattr(getattr(function, "__func__", function), _MARK, mark)
    return function


def mark_of(function: Any) -> Mark | None:
    """Return the mark of a function; None if it is unmarked."""
    return getattr(function, _MARK, None)

"""Tools that are functions of a user's file, and their schemas for the model.

A tool is a typed function with a docstring of its arguments, as transformers reads them. All public functions that the
file defines are tools, or, if some are marked by `tool` (or verl's ``function_tool``), only those.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rltrain.agents import verl_stubs
from rltrain.agents.marks import Mark, mark_of, tool
from rltrain.common.errors import ConfigError
from rltrain.common.plugin import load_module

FUNCTIONS = "actor_rollout_ref.rollout.multi_turn.function_tool_path"
_ADVICE = (
    "Give each argument a type and a line under Args: in the docstring, or mark the tool with "
    "@rltrain.tool(schema={...})."
)


@dataclass(frozen=True)
class ToolFunction:
    """A function that the model may call."""

    where: str
    """The setting, for error messages."""
    own_name: str
    """Name in its file or class."""
    function: Callable[..., Any]

    @cached_property
    def name(self) -> str:
        """The name that the model sees."""
        mark = mark_of(self.function) or Mark(None, None)
        written = self._written(mark.schema)["function"]["name"] if mark.schema is not None else None
        # The function's __name__ is not used, because for a wrapped function it may be the wrapper's.
        return mark.name or written or self.own_name

    @cached_property
    def schema(self) -> dict[str, Any]:
        """JSON, as chat templates show it. Raises ConfigError for a function without types or docstring.

        Created on demand, because it imports transformers, which tool processes do not need.
        """
        mark = mark_of(self.function) or Mark(None, None)
        if mark.schema is not None:
            schema = self._written(mark.schema)
        else:
            schema = _inferred(f"{self.where}: {self.own_name} has no schema for the model", self.function)
        schema["function"]["name"] = self.name
        return schema

    def _written(self, schema: Any) -> dict[str, Any]:
        return as_json(f"{self.where}: {self.own_name}", schema)


def tools_of(place: str) -> dict[str, ToolFunction]:
    """Return the tools of a file or module by name, in its order.

    Raises ConfigError if it cannot be imported, or has no tools, or two of the same name.
    """
    with verl_stubs.importable():
        module = load_module(FUNCTIONS, place)
    own, marked = {}, {}
    for name, value in vars(module).items():
        if mark_of(value):
            marked[name] = value
        elif inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
            own[name] = value
    marked |= _registered(module.__name__)
    if not (marked or own):
        raise ConfigError(f"{FUNCTIONS}={place} defines no function. Write a function with types and a docstring.")
    return tools_by_name(f"{FUNCTIONS}={place}", marked or own)


def _registered(module: str) -> dict[str, Callable[..., Any]]:
    """Return the functions of a module that are registered with an installed verl, because its decorator leaves no
    mark."""
    registry = getattr(sys.modules.get("verl.tools.function_tool"), "FUNCTION_TOOL_REGISTRY", {})
    own = [entry for entry in registry.values() if entry.fn.__module__ == module]
    return {entry.fn.__name__: tool(name=entry.name, schema=entry.tool_schema)(entry.fn) for entry in own}


def tools_by_name(where: str, functions: Mapping[str, Callable[..., Any]]) -> dict[str, ToolFunction]:
    """Return functions by the names that the model sees. functions: mapping from names in the file. where: the setting,
    for messages.

    Raises ConfigError if two have the same name.
    """
    tools: dict[str, ToolFunction] = {}
    for own_name, function in functions.items():
        tool = ToolFunction(where, own_name, function)
        earlier = tools.setdefault(tool.name, tool)
        if earlier.function is not function:
            raise ConfigError(
                f"{where}: {earlier.own_name} and {own_name} are both the tool {tool.name!r}. Rename one."
            )
    return tools


def _inferred(where: str, function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    many = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    variadic = [str(parameter) for parameter in parameters if parameter.kind in many]
    if variadic:
        raise ConfigError(
            f"{where}: a schema cannot describe {', '.join(variadic)}. Name each argument, or use a list."
        )
    try:
        return as_json(where, get_json_schema(function))
    except Exception as error:  # transformers raises several types of errors
        raise ConfigError(f"{where}: {error}. {_ADVICE}") from error


def as_json(where: str, schema: Any) -> dict[str, Any]:
    """Return a copy of a schema in verl's order of keys, so that prompts equal verl's, token by token.

    schema: a dictionary, or an object of verl. Raises ConfigError if it names no function.
    """
    if hasattr(schema, "model_dump"):
        schema = schema.model_dump(exclude_unset=True, exclude_none=True)
    function = schema.get("function") if isinstance(schema, dict) else None
    if not (isinstance(function, dict) and isinstance(function.get("name"), str) and function["name"]):
        raise ConfigError(
            f"{where}: its schema must be {{'type': 'function', 'function': {{'name': …, 'description': …, "
            f"'parameters': …}}}} (got {schema!r:.200})."
        )
    schema = copy.deepcopy(schema)
    function = _ordered(schema["function"], "name", "description", "parameters", "strict", others=False)
    if isinstance(function.get("parameters"), dict):
        parameters = function["parameters"] = _ordered(function["parameters"], "type", "properties", "required")
        if isinstance(parameters.get("properties"), dict):
            parameters["properties"] = {
                name: _ordered(value, "type", "description", "enum") if isinstance(value, dict) else value
                for name, value in parameters["properties"].items()
            }
    return {"type": schema.get("type", "function"), "function": function}


def _ordered(values: dict[str, Any], *names: str, others: bool = True) -> dict[str, Any]:
    """Return ``values`` with the keys ``names`` first, in verl's order, because chat templates keep the order. others:
    append the remaining keys.
    """
    first = {name: values[name] for name in names if name in values}
    return first | ({name: value for name, value in values.items() if name not in first} if others else {})

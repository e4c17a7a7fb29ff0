"""Tools that the policy may call: functions of a user's file, and the schemas of them that a chat template shows.

A tool is a typed function with a docstring of its arguments, as transformers reads them. Every public function that
the file defines is one, or, where some are marked by `tool`, only those.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

from rltrain.base.errors import ConfigError
from rltrain.base.plugin import load_module
from rltrain.config.schema import Config

KEY = "actor_rollout_ref.rollout.multi_turn.function_tool_path"
_MARK = "__rltrain_tool__"


def tool(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function as a tool: the others of its file are none."""
    setattr(function, _MARK, True)
    return function


def tools_of(place: str) -> dict[str, Callable[..., Any]]:
    """The tools of a file or module, by name. Raises ConfigError where it cannot be imported or has none."""
    module = load_module(KEY, place)
    own: dict[str, Callable[..., Any]] = {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }
    marked = {value.__name__: value for value in vars(module).values() if getattr(value, _MARK, False)}
    if not (marked or own):
        raise ConfigError(f"{KEY}={place} defines no function. Write one with types and a docstring for each tool.")
    return marked or own


def tool_schemas(cfg: Config) -> list[dict[str, Any]]:
    """JSON schemas of the tools of a run, in the order of the file; none without tools.

    Raises ConfigError for a function without types or a docstring of its arguments.
    """
    turns = cfg.actor_rollout_ref.rollout.multi_turn
    return [_schema(turns.place, function) for function in tools_of(turns.place).values()] if turns.place else []


def _schema(place: str, function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(function)
    except Exception as error:  # transformers raises several kinds, for missing types, docstrings, arguments
        raise ConfigError(
            f"{KEY}={place}: {function.__name__} cannot be shown to the model: {error}. A tool has a type for each of "
            "its arguments, and a docstring with a line about each of them under Args:."
        ) from error


class ToolCalls:
    """The tools of ``place``, to be called by name. Raises ConfigError where they cannot be imported."""

    def __init__(self, place: str) -> None:
        self._tools = tools_of(place)

    async def __call__(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """``text``: what the model reads; ``reward``: what the tool says of the call, 0 where it says nothing.

        A tool returns a text, a dictionary (as JSON), or (either of them, reward) or (either, reward, metrics).
        """
        returned = self._tools[name](**arguments)
        returned = await returned if inspect.isawaitable(returned) else returned
        said, reward, *_ = (*returned, 0.0) if isinstance(returned, tuple) else (returned, 0.0)
        text = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False, default=str)
        return {"text": text, "reward": float(reward)}

"""Tools of a YAML file in verl's format: a list of classes with ``create``, ``execute`` and ``release``.

One object of each class serves all trajectories of a process, identified by the name that ``create`` returns. Unlike in
verl, where every call is enclosed by create and release, a trajectory calls ``create`` before its first call and
``release`` at its end, so a tool keeps its state between calls. As in verl, ``calc_reward`` is never called: rewards
come from ``execute`` and from scorers.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rltrain.agents import verl_stubs
from rltrain.agents.calling import call_user, convert_result
from rltrain.agents.functions import as_json
from rltrain.common.errors import ConfigError
from rltrain.common.plugin import is_plugin, load_plugin, user_traceback

# Objects in creation or created, by name.
_Creations = dict[str, asyncio.Task[Any]]
TOOL_CONFIG = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
logger = logging.getLogger(__name__)


@dataclass(eq=False)
class ConfiguredTool:
    """A class of the file, whose object is created with the first call."""

    kind: type
    config: dict[str, Any]
    schema: dict[str, Any]
    """JSON, as chat templates show it."""
    tool: Any = None
    """The object, once it is created."""
    _creation: _Creations = field(default_factory=dict)

    async def get(self) -> Any:
        """Return the object; create it on the first call."""
        if self.tool is None:
            self.tool = await _once(self._creation, "", lambda: call_user(_make, self.kind, self.config, self.schema))
        return self.tool


def configured_tools(path: str) -> dict[str, ConfiguredTool]:
    """Load the tools of a YAML file, by the names that the model sees.

    Raises ConfigError for a file that cannot be read or is not such a list, a class that cannot be imported or has no
    ``execute``, and tools of an unsupported kind.
    """
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OSError, yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"{TOOL_CONFIG}={path} cannot be read: {error}") from error
    entries = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(
            f"{TOOL_CONFIG}={path} has no list of tools. Write tools: and below it, for each tool, class_name, config "
            "(type: native) and tool_schema."
        )
    tools: dict[str, ConfiguredTool] = {}
    with verl_stubs.importable():
        for number, entry in enumerate(entries):
            tool = _tool(f"{TOOL_CONFIG}={path}: tools[{number}]", entry)
            name = tool.schema["function"]["name"]
            if name in tools:
                raise ConfigError(f"{TOOL_CONFIG}={path} has two tools {name!r}. Rename one of them.")
            tools[name] = tool
    return tools


def _tool(where: str, entry: Any) -> ConfiguredTool:
    name = entry.get("class_name") if isinstance(entry, dict) else None
    if not isinstance(name, str):
        raise ConfigError(f"{where} has no class_name. Give the class of the tool, such as package.module.NAME.")
    config = entry.get("config") or {}
    if not isinstance(config, dict):
        raise ConfigError(f"{where}.config is {config!r:.80}; it must hold names and values, type: native among them.")
    if (origin := config.get("type", "native")) != "native":
        of_servers = "call the server in a function tool (multi_turn.function_tool_path)"
        instead = of_servers if origin == "mcp" else "use type: native"
        raise ConfigError(f"{where}.config.type={origin}: only native tools are in this version; {instead}.")
    if not is_plugin(name):
        name = ":".join(name.rsplit(".", 1)) if "." in name else f"builtins:{name}"
    kind = load_plugin(f"{where}.class_name", name)
    if not (inspect.isclass(kind) and callable(getattr(kind, "execute", None))):
        raise ConfigError(f"{where}.class_name={entry['class_name']}: the class has no method `execute`.")
    if entry.get("tool_schema") is not None:
        return ConfiguredTool(kind, config, as_json(f"{where}.tool_schema", entry["tool_schema"]))
    try:
        tool = _make(kind, config, None)
        schema = getattr(tool, "tool_schema", None) or tool.get_openai_tool_schema()
    except Exception as error:  # errors of user code
        raise ConfigError(f"{where} has no tool_schema, and its class raised:\n{user_traceback(error)}") from error
    return ConfiguredTool(kind, config, as_json(f"{where}: {entry['class_name']}", schema), tool)


def _make(kind: type, config: dict[str, Any], schema: dict[str, Any] | None) -> Any:
    from importlib import import_module

    if schema is None:
        return kind(config=dict(config), tool_schema=None)
    record = import_module("verl.tools.schemas").OpenAIFunctionToolSchema
    return kind(config=dict(config), tool_schema=record.model_validate(schema))


class ConfiguredSession:
    """The tools of a YAML file in one trajectory."""

    def __init__(self, tools: dict[str, ConfiguredTool], tools_kwargs: dict[str, Any]) -> None:
        self._tools, self._kwargs = tools, tools_kwargs
        self._ids: _Creations = {}
        # verl passes such an object to each call of a trajectory, for tools that share state.
        self._data = SimpleNamespace(
            request_id=uuid4().hex, tools_kwargs=tools_kwargs, extra_fields={}, metrics={}, messages=[]
        )

    async def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Call a tool and return its result as `calling.convert_result` does. Raises the tool's exception."""
        tool = await self._tools[name].get()
        kwargs = self._kwargs.get(name) or {}
        instance = await _once(self._ids, name, lambda: self._create(tool, kwargs.get("create_kwargs") or {}))
        more = {"agent_data": self._data, **(kwargs.get("execute_kwargs") or {})}
        returned = await call_user(tool.execute, instance, arguments, **_accepted(tool.execute, more))
        return convert_result(tuple(returned) if isinstance(returned, list) else returned)

    async def _create(self, tool: Any, kwargs: dict[str, Any]) -> Any:
        if not hasattr(tool, "create"):
            return uuid4().hex
        create = tool.create
        # Older classes declare their arguments, newer ones read them from ``create_kwargs``.
        named = {name: value for name, value in kwargs.items() if name in inspect.signature(create).parameters}
        created = await call_user(create, **_accepted(create, {"create_kwargs": kwargs}), **named)
        return created[0] if isinstance(created, tuple | list) else created

    @property
    def extra_fields(self) -> dict[str, Any]:
        """Fields that the tools stored for the scorer."""
        return dict(self._data.extra_fields)

    async def release(self) -> None:
        """Release the tools at the end of the trajectory. Their exceptions are logged."""
        while self._ids:
            name, instance = self._ids.popitem()
            if release := getattr(self._tools[name].tool, "release", None):
                try:
                    await call_user(release, await instance)
                except Exception as error:  # noqa: BLE001 - user code
                    logger.warning("release of the tool %s raised:\n%s", name, user_traceback(error))


async def _once(creations: _Creations, name: str, make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Return the result of ``make``, shared by all callers.

    If a caller is cancelled, ``make`` keeps running for the next caller, which would otherwise start over and time out
    too. A failed ``make`` is repeated.
    """
    if name not in creations:
        creations[name] = task = asyncio.ensure_future(make())
        task.add_done_callback(lambda _: creations.pop(name, None) if task.cancelled() or task.exception() else 0)
    return await asyncio.shield(creations[name])


def _accepted(function: Any, named: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function accepts."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return named
    return {name: value for name, value in named.items() if name in parameters}

"""The tools of a run from all sources, and the tools of a trajectory.

Functions of a file, tools of verl's YAML file and methods of a class form one list of names for the model. A `Toolbox`
loads them, in any process. A `Session` is for one trajectory: an instance of the class, and the state of the YAML
file's tools.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections import defaultdict
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rltrain.agents import verl_stubs
from rltrain.agents.calling import call_user, convert_arguments, convert_result
from rltrain.agents.configured import TOOL_CONFIG, ConfiguredSession, configured_tools
from rltrain.agents.environments import ENVIRONMENT, load_class, methods_of
from rltrain.agents.functions import FUNCTIONS, tools_of
from rltrain.common.env import shipped
from rltrain.common.errors import ConfigError
from rltrain.common.plugin import user_traceback
from rltrain.runtime.slots.program import asks_for_programs, check_isolation

if TYPE_CHECKING:
    from rltrain.config.schema.rollout import MultiTurnConfig

_ALLOW = "actor_rollout_ref.rollout.multi_turn.allow_code_execution"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ToolSources:
    """Sources of a run's tools."""

    functions: str | None = None
    """FILE.py or package.module."""
    tool_config: str | None = None
    """verl's YAML file."""
    environment: str | None = None
    """FILE.py:NAME of a class."""
    environment_kwargs: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, turns: MultiTurnConfig) -> ToolSources:
        """Return the sources of the configuration; empty with ``multi_turn.enable=False``."""
        if turns.enable is False:
            return cls()
        return cls(
            turns.function_tool_path or None,
            turns.tool_config_path or None,
            turns.environment or None,
            dict(turns.environment_kwargs),
        )


class Toolbox:
    """The loaded tools of ``sources``. Raises ConfigError if loading fails or two have the same name."""

    def __init__(self, sources: ToolSources) -> None:
        self._sources = sources
        self.functions = tools_of(sources.functions) if sources.functions else {}
        self.configured = configured_tools(sources.tool_config) if sources.tool_config else {}
        self._class = load_class(sources.environment) if sources.environment else None
        self.methods = methods_of(sources.environment or "", self._class) if self._class else {}
        self.has_step = hasattr(self._class, "step")
        """True if the class is an environment, which replies to whole turns."""
        self.scores = self.has_step or hasattr(self._class, "score")
        """True if a trajectory scores itself."""
        groups: list[tuple[str, dict[str, Any]]] = [
            (f"{FUNCTIONS}={sources.functions}", self.functions),
            (f"{TOOL_CONFIG}={sources.tool_config}", self.configured),
            (f"{ENVIRONMENT}={sources.environment}", self.methods),
        ]
        origins: dict[str, str] = {}
        for source, tools in groups:
            for name in tools:
                if name in origins:
                    raise ConfigError(f"the tool {name!r} is in {origins[name]} and in {source}. Rename one of them.")
                origins[name] = source
        self.names = list(origins)
        """Names that the model sees: functions, tools of the YAML file, methods."""

    @cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """JSON schemas, as chat templates show them, in the order of the names.

        Raises ConfigError for a function without a schema. Imports transformers.
        """
        return [tool.schema for tools in (self.functions, self.configured, self.methods) for tool in tools.values()]

    def check_programs(self, allowed: bool, unsandboxed: bool) -> None:
        """Raise ConfigError for a tool that runs programs of the model (`runtime.slots.program.needs_programs`), unless
        they are allowed and the kernel isolates them."""
        for tools in (self.functions, self.methods):
            for name, tool in tools.items():
                if asks_for_programs(tool.function):
                    if allowed:
                        check_isolation(unsandboxed)
                        continue
                    place = self._sources.functions if tools is self.functions else self._sources.environment
                    key = FUNCTIONS if tools is self.functions else ENVIRONMENT
                    raise ConfigError(
                        f"{key}={place}: the tool {name!r} runs programs that the model wrote. Read "
                        f"{shipped('docs/security.md')}, then set {_ALLOW}=True, or remove the tool."
                    )

    async def open(self, row: dict[str, Any], seed: int) -> Session:
        """Open the session of a trajectory, with a new instance of the class, which is reset.

        row: data_source, extra_info, ground_truth. Raises exceptions of the user's code, after closing the session.
        """
        with ExitStack() as stack:
            # The stubs stay importable until the context ends, because a tool may import verl's names when it is
            # called.
            stack.enter_context(verl_stubs.importable())
            kwargs = copy.deepcopy(self._sources.environment_kwargs)
            environment = await call_user(self._class, **kwargs) if self._class else None
            session = Session(self, row, environment, stack.pop_all())
        if reset := getattr(environment, "reset", None):
            try:
                await call_user(reset, row, seed)
            except BaseException:
                await session.close()
                raise
        return session


class Session:
    """The tools of one trajectory."""

    def __init__(self, toolbox: Toolbox, row: dict[str, Any], environment: Any, stack: ExitStack) -> None:
        extra = row.get("extra_info") or {}
        self._toolbox, self._stack = toolbox, stack
        self._configured = ConfiguredSession(toolbox.configured, extra.get("tools_kwargs") or {})
        chosen = frozenset(extra.get("tool_selection") or toolbox.names)
        self.names = [name for name in toolbox.names if name in chosen]
        """The tools that the model may call."""
        self.stateless = environment is None and not toolbox.configured
        """True if calls have no lasting effect."""
        self.environment = environment
        """The instance of the class; None without one."""
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def alone(self, name: str) -> AbstractAsyncContextManager[None]:
        """Lock the object that a tool changes: its calls run one after the other, in the order of their requests.

        Methods of the class share its instance. Functions have no state and run concurrently.
        """
        if name in self._toolbox.functions:
            return nullcontext()
        return self._locks[name if name in self._toolbox.configured else ENVIRONMENT]

    async def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Call a tool. Return ``content``, ``reward`` (default 0) and ``metrics``.

        Calls may run concurrently. Raises LookupError for a tool that is not available in the row, and the tool's
        exceptions.
        """
        box = self._toolbox
        if name not in self.names:
            raise LookupError(f"there is no tool {name!r}; the tools are {', '.join(sorted(self.names))}")
        if name in box.configured:
            return await self._configured.call(name, arguments)
        function = (
            box.functions[name].function
            if name in box.functions
            else getattr(self.environment, box.methods[name].own_name)
        )
        return convert_result(await call_user(function, **convert_arguments(function, arguments)))

    @property
    def extra_fields(self) -> dict[str, Any]:
        """Fields that verl tools stored for the scorer (``agent_data.extra_fields``)."""
        return self._configured.extra_fields

    async def close(self) -> None:
        """Close the session: ``close`` of the instance and ``release`` of verl's tools. Their exceptions are logged."""
        with self._stack:
            if close := getattr(self.environment, "close", None):
                try:
                    await call_user(close)
                except Exception as error:  # noqa: BLE001 - user code
                    logger.warning("close of %s raised:\n%s", type(self.environment).__name__, user_traceback(error))
            self.environment = None
            await self._configured.release()


def toolbox_of(turns: MultiTurnConfig) -> Toolbox:
    """Load the tools of a run.

    Raises ConfigError as `Toolbox` does, and for a tool that runs programs if they are not allowed or not isolated.
    """
    toolbox = Toolbox(ToolSources.of(turns))
    toolbox.check_programs(turns.allow_code_execution, turns.allow_unsandboxed_code)
    return toolbox

"""Stubs for names of verl that tool files import, if the package verl is not installed.

A tool file written for verl only imports a decorator, a base class and schema records. So that it works unchanged,
small replacements are importable under these names while the file is loaded and while its tools may be called. If verl
is installed, its classes are used.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar
from uuid import uuid4

from rltrain.agents.marks import tool

# Number of active users of the modules.
_users: list[object] = []


@contextmanager
def importable() -> Iterator[None]:
    """Make the names importable within the context. Threads of one process may overlap."""
    user = object()
    if not (_users or "verl" in sys.modules or importlib.util.find_spec("verl")):
        sys.modules.update(_modules())
    _users.append(user)
    try:
        yield
    finally:
        _users.remove(user)
        if not _users:
            for name, module in _modules().items():
                if sys.modules.get(name) is module:
                    del sys.modules[name]


class _Record:
    """A few fields by name; missing ones are None."""

    _records: ClassVar[dict[str, Any]] = {}
    """Field -> record class of its value; [class]: record class of the values of its dictionary."""

    def __init__(self, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(self, name, self._as_record(name, value))

    def _as_record(self, name: str, value: Any) -> Any:
        kind = self._records.get(name)
        if isinstance(kind, list) and isinstance(value, dict):
            return {key: kind[0].model_validate(item) for key, item in value.items()}
        return kind.model_validate(value) if kind and isinstance(value, dict) else value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return None

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    @classmethod
    def model_validate(cls, value: Any) -> Any:
        """Return the record of a dictionary; a record is returned unchanged."""
        return value if isinstance(value, cls) else cls(**value)

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        """Return plain values, without fields that were not given."""

        def plain(value: Any) -> Any:
            if isinstance(value, _Record):
                return value.model_dump(exclude_none=exclude_none)
            return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value

        return {name: plain(value) for name, value in vars(self).items() if not (exclude_none and value is None)}


class OpenAIFunctionPropertySchema(_Record):
    """``type``, ``description``, ``enum`` and other JSON schema keys of an argument."""


class OpenAIFunctionParametersSchema(_Record):
    """``type``, ``properties``, ``required``."""

    _records: ClassVar[dict[str, Any]] = {"properties": [OpenAIFunctionPropertySchema]}


class OpenAIFunctionSchema(_Record):
    """``name``, ``description``, ``parameters``."""

    _records: ClassVar[dict[str, Any]] = {"parameters": OpenAIFunctionParametersSchema}


class OpenAIFunctionToolSchema(_Record):
    """``type``, ``function``."""

    _records: ClassVar[dict[str, Any]] = {"function": OpenAIFunctionSchema}


class ToolResponse(_Record):
    """``text``, ``image``, ``video``."""


class BaseTool:
    """A tool in verl's YAML format: ``create``, ``execute`` and ``release`` are awaited."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ValueError(f"{type(self).__name__} has no schema: give tool_schema in the YAML file.")
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        """Return the schema that is shown to the model."""
        return getattr(self, "tool_schema", None)

    async def create(self, instance_id: str | None = None, **_: Any) -> tuple[str, ToolResponse]:
        """Return a name for the tool's state of a trajectory."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **_: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Return the tool's result of a call, its reward, and metrics."""
        raise NotImplementedError(f"{type(self).__name__} has no execute.")

    async def calc_reward(self, instance_id: str, **_: Any) -> float:
        """Return 0. Never called, as in verl."""
        return 0.0

    async def release(self, instance_id: str, **_: Any) -> None:
        """Discard the tool's state of a trajectory."""


def rollout_trace_op(function: Any) -> Any:
    """Return a function unchanged: tracing is not supported."""
    return function


@cache
def _modules() -> dict[str, ModuleType]:
    schemas = (
        *(OpenAIFunctionToolSchema, OpenAIFunctionSchema, OpenAIFunctionParametersSchema),
        *(OpenAIFunctionPropertySchema, ToolResponse),
    )
    names: dict[str, dict[str, Any]] = {
        "verl": {},
        "verl.tools": {},
        "verl.tools.function_tool": {"function_tool": tool},
        "verl.tools.schemas": {kind.__name__: kind for kind in schemas},
        "verl.tools.base_tool": {kind.__name__: kind for kind in (BaseTool, *schemas)},
        "verl.utils": {},
        "verl.utils.rollout_trace": {"rollout_trace_op": rollout_trace_op},
    }
    modules = {}
    for name, content in names.items():
        is_package = not content
        module = modules[name] = ModuleType(name, __doc__)
        module.__spec__ = ModuleSpec(name, None, is_package=is_package)
        vars(module).update(content, **({"__path__": []} if is_package else {}))
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    return modules

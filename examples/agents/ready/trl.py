"""Adapter for environments in the format of TRL 1.16's ``environment_factory``.

TRL creates an environment without arguments, calls ``reset(**row)``, shows all its other public methods as tools, and
calls ``get_reward()`` if it exists. TRL appends the return value of ``reset`` to the prompt when it generates. Here
prompts are complete before the run, so the row must already contain that text.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rltrain.agents.calling import call_user
from rltrain.agents.marks import tool
from rltrain.common.errors import DataError

_RESET, _REWARD = "reset", "get_reward"


def adapted(factory: Callable[[], Any]) -> type:
    """Return a class for ``multi_turn.environment``: ``Env = adapted(TheirEnvironment)`` in a file, named FILE.py:Env.

    factory: a class in TRL's format, or a function that creates an instance. Raises TypeError if it has no ``reset``.
    """
    kind = factory if inspect.isclass(factory) else type(factory())
    methods = dict(inspect.getmembers(kind, predicate=inspect.isfunction))
    if _RESET not in methods:
        raise TypeError(f"{kind.__name__} has no reset(**row), so it is not an environment in TRL's format.")
    # Prefixed, because a TRL tool may be called step, score or close.
    members: dict[str, Any] = {
        f"tool_{name}": tool(_delegate(name, method), name=name)
        for name, method in methods.items()
        if not name.startswith("_") and name not in (_RESET, _REWARD)
    }
    if _REWARD in methods:
        members["score"] = _delegate(_REWARD, methods[_REWARD])
    return type(kind.__name__, (_Adapted,), {**members, "factory": staticmethod(factory), "__doc__": kind.__doc__})


class _Adapted:
    factory: Callable[[], Any]

    def __init__(self) -> None:
        self._theirs = self.factory()

    async def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Reset with the fields of ``extra_info``, data_source, ground_truth and seed that the TRL environment accepts.

        Raises DataError if it returns a text that ``extra_info.observation`` does not hold.
        """
        extra = dict(row.get("extra_info") or {})
        observation = await call_user(self._theirs.reset, **_accepted_values(self._theirs.reset, row, extra, seed))
        if observation is not None and observation != extra.get("observation"):
            raise DataError(
                f"reset of {type(self).__name__} returned {observation!r:.200}, which the policy would not see: put "
                "it at the end of the row's prompt, and as extra_info.observation."
            )


def _accepted_values(
    reset: Callable[..., Any], row: Mapping[str, Any], extra: dict[str, Any], seed: int
) -> dict[str, Any]:
    values = {"seed": seed, "data_source": row.get("data_source"), "ground_truth": row.get("ground_truth"), **extra}
    parameters = inspect.signature(reset).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return values
    return {name: value for name, value in values.items() if name in parameters}


def _delegate(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls the TRL method and has its arguments, types and docstring."""

    @functools.wraps(method)
    def delegate(self: _Adapted, *arguments: Any, **named: Any) -> Any:
        return getattr(self._theirs, name)(*arguments, **named)

    return delegate

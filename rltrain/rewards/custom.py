"""The user's own reward function: ``custom_reward_function``, loaded from a Python file and called as verl calls it."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltrain.errors import RewardError
from rltrain.plugin import NotPythonError, import_file

if TYPE_CHECKING:
    from rltrain.config.schema import Config

_MODULE = "rltrain_custom_reward"
_MAX_TRACEBACK_CHARS = 4000
# Packages between a process's own loop and the first frame of the user's code.
_MACHINERY = ("importlib", "rltrain", "rltrain.rewards", "rltrain.rewards.processes")


@dataclass(frozen=True)
class CustomReward:
    """``custom_reward_function``: function ``name`` of the Python file ``path``; ``kwargs`` are further keyword arguments.

    With ``batch`` the function takes lists (data_sources, solution_strs, ground_truths, extra_infos) and returns one result
    per answer.
    """

    path: str
    name: str = "compute_score"
    kwargs: dict[str, Any] = field(default_factory=dict)
    batch: bool = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the function's arguments, as verl has them."""
        names = ("data_source", "solution_str", "ground_truth", "extra_info")
        return tuple(f"{name}s" for name in names) if self.batch else names


def custom_reward(cfg: Config) -> CustomReward | None:
    """The user's own function, None where the built-in scorers decide."""
    custom, batch = cfg.custom_reward_function, cfg.reward_model.reward_manager == "batch"
    return CustomReward(custom.path, custom.name, dict(custom.reward_kwargs), batch) if custom.path else None


def load_custom(custom: CustomReward) -> Callable[..., Any]:
    """The function as one of four positional arguments. An ``async`` function is awaited.

    Raises RewardError with the traceback where the file cannot be imported or the function cannot be called so.
    """
    path = Path(custom.path).expanduser()
    if not path.is_file():
        raise RewardError(f"custom_reward_function.path={custom.path!r} is not a file (looked at {path.absolute()}).")
    module = _import_file(path, custom.path)
    function = getattr(module, custom.name, None)
    if not callable(function):
        members = inspect.getmembers(module, inspect.isfunction)
        names = [name for name, value in members if value.__module__ == module.__name__]
        raise RewardError(
            f"{custom.path!r} has no function custom_reward_function.name={custom.name!r}; "
            f"it defines {', '.join(names) or 'none'}."
        )
    _check_signature(function, custom)

    def call(*values: Any) -> Any:
        value = function(**dict(zip(custom.arguments, values, strict=True)), **custom.kwargs)
        return _event_loop().run_until_complete(value) if inspect.isawaitable(value) else value

    return call


@cache
def _event_loop() -> Any:
    """One loop for all answers, so that an ``async`` function can keep its connections from answer to answer."""
    import asyncio

    return asyncio.new_event_loop()


def _import_file(path: Path, shown: str) -> Any:
    try:
        return import_file(path, _MODULE)
    except NotPythonError:
        raise RewardError(f"custom_reward_function.path={shown!r} is not a Python file (.py).") from None
    except BaseException as error:  # noqa: BLE001 - user code; whatever it raises is reported with its traceback
        raise RewardError(
            f"custom_reward_function.path={shown!r} cannot be imported:\n{user_traceback(error)}"
        ) from None


def _check_signature(function: Callable[..., Any], custom: CustomReward) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in callables have none
        return
    arguments = dict.fromkeys(custom.arguments)
    try:
        signature.bind(**arguments, **custom.kwargs)
    except TypeError as error:
        names = ", ".join([*arguments, *custom.kwargs])
        raise RewardError(
            f"{custom.name}{signature} in {custom.path!r} cannot be called with {names} by keyword: {error}. "
            f"Write def {custom.name}({', '.join(custom.arguments)}, **kwargs)."
        ) from None


def user_traceback(error: BaseException) -> str:
    """The traceback from the first frame of the user's code on, bounded. A syntax error has no frame but names its place."""
    first = error.__traceback__
    while first and first.tb_frame.f_globals.get("__package__") in _MACHINERY:
        first = first.tb_next
    return "".join(traceback.format_exception(type(error), error, first))[-_MAX_TRACEBACK_CHARS:].rstrip()

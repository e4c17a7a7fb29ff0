"""The user's own reward function: ``custom_reward_function``, loaded from a Python file and called as verl calls it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from rltrain.errors import ConfigError
from rltrain.plugin import load_plugin

if TYPE_CHECKING:
    from rltrain.config.schema import Config


@dataclass(frozen=True)
class CustomReward:
    """``custom_reward_function``: function ``name`` of the Python file ``path``, and further keyword arguments.

    With ``batch`` the function takes lists (data_sources, solution_strs, ground_truths, extra_infos) and returns one
    result per answer.
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
    """The function, to be called with four positional arguments. An ``async`` function is awaited.

    Raises ConfigError with the traceback where the file cannot be imported or the function cannot be called so.
    """
    function = load_plugin("custom_reward_function", f"{custom.path}:{custom.name}")
    _check_signature(function, custom)

    def call(*values: Any) -> Any:
        # By keyword, as verl calls it: the order of a function's arguments is its own.
        value = function(**dict(zip(custom.arguments, values, strict=True)), **custom.kwargs)
        return _event_loop().run_until_complete(value) if inspect.isawaitable(value) else value

    return call


@cache
def _event_loop() -> Any:
    """One loop for all answers, so that an ``async`` function can keep its connections from answer to answer."""
    import asyncio

    return asyncio.new_event_loop()


def _check_signature(function: Callable[..., Any], custom: CustomReward) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in callables have none
        return
    arguments = dict.fromkeys(custom.arguments)
    try:
        # Looked at here, so that a wrong signature is one error before training and not a failure per answer.
        signature.bind(**arguments, **custom.kwargs)
    except TypeError as error:
        names = ", ".join([*arguments, *custom.kwargs])
        raise ConfigError(
            f"{custom.name}{signature} in {custom.path!r} cannot be called with {names} by keyword: {error}. "
            f"Write def {custom.name}({', '.join(custom.arguments)}, **kwargs)."
        ) from None

"""The user's own reward function, ``custom_reward_function``: loaded from a file or a module, called as in verl."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from rltrain.base.errors import ConfigError
from rltrain.base.plugin import load_plugin

if TYPE_CHECKING:
    from rltrain.config.schema import Config


# What verl adds to every extra_info: an answer of one turn has two messages, and no agent has scored it before.
_TOLD: dict[str, Any] = {"num_turns": 2, "rollout_reward_scores": {}}
_OF_REWARD_LOOP = ("reward_router_address", "reward_model_tokenizer")
_BEAT_S = 0.05


@dataclass(frozen=True)
class CustomReward:
    """``custom_reward_function``: function ``name`` of the Python file or module ``path``, and keyword arguments.

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


class Late(Exception):
    """An answer has no score in time."""


class RewardFunction:
    """The user's function, to be called with four positional arguments. An ``async`` function is awaited.

    Raises ConfigError with the traceback where the file cannot be imported or the function cannot be called so.
    """

    def __init__(self, custom: CustomReward):
        self._custom = custom
        self._function = load_plugin("custom_reward_function", f"{custom.path}:{custom.name}")
        _check_signature(self._function, custom)
        self.is_async = inspect.iscoroutinefunction(self._function)

    def __call__(self, *values: Any) -> Any:
        """What the function returns for one answer, or for lists of them (``batch``)."""
        returned = self._begin(values)
        return _event_loop().run_until_complete(returned) if inspect.isawaitable(returned) else returned

    def together(self, calls: Sequence[Sequence[Any]], timeout_s: float) -> list[Any]:
        """What an ``async`` function returns for several answers that are under way at once; for one that fails the
        exception, and `Late` after ``timeout_s``."""
        return _event_loop().run_until_complete(self._gather(calls, timeout_s))

    async def _gather(self, calls: Sequence[Sequence[Any]], timeout_s: float) -> list[Any]:
        import asyncio

        tasks = [asyncio.ensure_future(self._begin(call)) for call in calls]
        late = set(tasks)
        # Beats and not seconds: an answer that blocks the loop must not use up the time of the others.
        for _ in range(math.ceil(timeout_s / _BEAT_S)):
            _, late = await asyncio.wait(late, timeout=_BEAT_S)
            if not late:
                break
        for task in late:
            task.cancel()
        returned = await asyncio.gather(*(task for task in tasks if task not in late), return_exceptions=True)
        in_time = iter(returned)
        said = f"no score after {timeout_s:g} s (reward.timeout_s)"
        return [Late(said) if task in late else next(in_time) for task in tasks]

    def _begin(self, values: Sequence[Any]) -> Any:
        arguments = dict(zip(self._custom.arguments, values, strict=True))
        *_, name = arguments
        told = arguments[name]
        arguments[name] = [each | _TOLD for each in told] if self._custom.batch else told | _TOLD
        # By keyword, as verl calls it: the order of a function's arguments is its own. reward_kwargs win, as in verl.
        return self._function(**arguments | self._custom.kwargs)


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
    arguments = dict.fromkeys(custom.arguments) | custom.kwargs
    where = f"{custom.name}{signature} in {custom.path!r}"
    no_default = {name for name, each in signature.parameters.items() if each.default is each.empty}
    if served := [name for name in _OF_REWARD_LOOP if name in no_default - arguments.keys()]:
        raise ConfigError(
            f"{where} needs {' and '.join(served)}, which verl gives to a function beside a generative reward model "
            "that it serves. None is served here: serve it yourself, give these arguments a default, and hand its "
            "address over with +custom_reward_function.reward_kwargs.NAME=http://host:port."
        )
    try:
        # Looked at here, so that a wrong signature is one error before training and not a failure per answer.
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{where} cannot be called with {', '.join(arguments)} by keyword: {error}. "
            f"Write def {custom.name}({', '.join(custom.arguments)}, **kwargs)."
        ) from None

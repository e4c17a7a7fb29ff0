"""Reward functions of the user, ``custom_reward_function``: loaded from a file or a module, called as in verl."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rltrain.common.errors import ConfigError
from rltrain.common.plugin import load_plugin
from rltrain.runtime.slots.child import finished

if TYPE_CHECKING:
    from rltrain.config.schema import ScoringConfig


# Keys that verl adds to every extra_info. A single-turn response has two messages and no earlier score. A response with
# tool calls has other values (`AnswerText`).
DEFAULT_INFO: dict[str, Any] = {"num_turns": 2, "rollout_reward_scores": {}, "tool_rewards": []}
_OF_REWARD_LOOP = ("reward_router_address", "reward_model_tokenizer")


@dataclass(frozen=True)
class CustomReward:
    """``custom_reward_function``: function ``name`` of the Python file or module ``path``, and keyword arguments.

    With ``batch`` the function takes lists (data_sources, solution_strs, ground_truths, extra_infos) and returns one
    result per response.
    """

    path: str
    name: str = "compute_score"
    kwargs: dict[str, Any] = field(default_factory=dict)
    batch: bool = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the function's arguments, as in verl."""
        names = ("data_source", "solution_str", "ground_truth", "extra_info")
        return tuple(f"{name}s" for name in names) if self.batch else names


def custom_reward(cfg: ScoringConfig) -> CustomReward | None:
    """Return the user's reward function, or None if the built-in scorers are used."""
    custom, batch = cfg.custom_reward_function, cfg.reward_model.reward_manager == "batch"
    return CustomReward(custom.path, custom.name, dict(custom.reward_kwargs), batch) if custom.path else None


class RewardFunction:
    """The user's function, to be called with four positional arguments.

    Raises ConfigError with the traceback if the file cannot be imported or the signature does not fit.
    """

    def __init__(self, custom: CustomReward):
        self._custom = custom
        self._function = load_plugin("custom_reward_function", f"{custom.path}:{custom.name}")
        _check_signature(self._function, custom)
        self.is_async = inspect.iscoroutinefunction(self._function)

    def __call__(self, *values: Any) -> Any:
        """Return the function's result for one response, or for lists of them (``batch``). An ``async`` function is
        awaited."""
        return finished(self.begin(*values))

    def begin(self, *values: Any) -> Any:
        """Return the function's result, or an awaitable if the function is ``async``."""
        arguments = dict(zip(self._custom.arguments, values, strict=True))
        *_, name = arguments
        extra = arguments[name]
        arguments[name] = (
            [DEFAULT_INFO | row_info for row_info in extra] if self._custom.batch else DEFAULT_INFO | extra
        )
        # Arguments are passed by keyword, so that users can choose their order, and reward_kwargs take precedence, both
        # as in verl.
        return self._function(**arguments | self._custom.kwargs)


def _check_signature(function: Callable[..., Any], custom: CustomReward) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in callables have no signature
        return
    arguments = dict.fromkeys(custom.arguments) | custom.kwargs
    where = f"{custom.name}{signature} in {custom.path!r}"
    no_default = {name for name, parameter in signature.parameters.items() if parameter.default is parameter.empty}
    if missing := [name for name in _OF_REWARD_LOOP if name in no_default - arguments.keys()]:
        raise ConfigError(
            f"{where} needs {' and '.join(missing)}, which verl passes if it serves a generative reward model. "
            "rltrain serves none: serve the model yourself, give these arguments a default, and pass its "
            "address with +custom_reward_function.reward_kwargs.NAME=http://host:port."
        )
    try:
        # The signature is checked here, so that a wrong one is a single error before training.
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"{where} cannot be called with {', '.join(arguments)} by keyword: {error}. "
            f"Write def {custom.name}({', '.join(custom.arguments)}, **kwargs)."
        ) from None

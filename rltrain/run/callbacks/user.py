"""User callbacks on steps, validations and checkpoints. docs/plugins.md has an example.

A callback must not end a long run. So method names, signatures and imports are checked before the run starts. An error
during the run is logged once per kind with its traceback, and counted afterwards.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rltrain.common.errors import ConfigError
from rltrain.common.plugin import load_plugin
from rltrain.run.callbacks.callback import Callback
from rltrain.trainer.metrics.step import Answered, Metrics

log = logging.getLogger(__name__)
# Methods of a callback with their arguments. on_step may omit the last one.
HOOKS = {"on_step": ("step", "metrics", "samples"), "on_validation": ("step", "metrics"), "on_save": ("step", "folder")}


def callback_problems(names: Sequence[str]) -> Iterator[str]:
    """Yield the problems of ``trainer.callbacks`` that are visible before a class is instantiated."""
    for name in names:
        try:
            yield from (
                f"trainer.callbacks={name}: {misfit}" for misfit in _misfits(load_plugin("trainer.callbacks", name))
            )
        except ConfigError as error:
            yield str(error)


class UserCallbacks(Callback):
    """The callbacks of ``trainer.callbacks`` and ``objects``. Classes are instantiated without arguments.

    Raises ConfigError.
    """

    def __init__(self, names: Sequence[str] = (), objects: Sequence[Any] = ()) -> None:
        problems = [*callback_problems(names)]
        problems += [f"callbacks={instance!r}: {problem}" for instance in objects for problem in _misfits(instance)]
        if problems:
            raise ConfigError("\n".join(problems))
        self._logged_errors: set[tuple[str, str, type]] = set()
        self._num_errors = 0
        self._hooks: list[tuple[str, str, Callable[..., Any]]] = []
        loaded = [(name, load_plugin("trainer.callbacks", name)) for name in names]
        for name, callback in [*loaded, *((type(instance).__name__, instance) for instance in objects)]:
            try:
                callback = callback() if isinstance(callback, type) else callback
            except Exception as error:  # user code; any error is reported with its traceback
                # The last frames are the user's; rltrain's frames above would hide them.
                trace = traceback.format_exc(limit=-2)
                raise ConfigError(f"trainer.callbacks={name} cannot be created:\n{trace}") from error
            self._hooks += [(name, hook, function) for hook, function in _hooks_of(callback).items()]

    def on_step(self, made: Answered) -> Metrics:
        """Return the metrics of the callbacks. They receive the numbers of each response as arrays [n]."""
        return self._call("on_step", made.metrics, made.step, made.metrics, made.samples.numbers)

    def on_validation(self, made: Answered) -> Metrics:
        return self._call("on_validation", made.metrics, made.step, made.metrics)

    def on_save(self, step: int, folder: Path, seconds: float) -> Metrics:
        return self._call("on_save", {}, step, folder)

    def _call(self, hook: str, existing: Metrics, *arguments: Any) -> Metrics:
        metrics: Metrics = {}
        hooks = [(name, function) for name, of, function in self._hooks if of == hook]
        for name, function in hooks:
            # Copies, so that a callback cannot change what others see.
            given = [dict(argument) if isinstance(argument, Mapping) else argument for argument in arguments]
            try:
                # Duplicate names are refused, also between callbacks, because none may replace a metric of the run.
                metrics |= _numbers(
                    function(*(given if _takes(function, len(given)) else given[:-1])), existing | metrics
                )
            except Exception as error:  # noqa: BLE001 - user code must not end the run
                self._num_errors += 1
                kind = (name, hook, type(error))
                if kind not in self._logged_errors:
                    log.warning(
                        "trainer.callbacks=%s: %s failed; the run continues, and further errors (%s) of it are only "
                        "counted (callbacks/errors).\n%s",
                        name, hook, type(error).__name__, traceback.format_exc(limit=-3).rstrip(),
                    )  # fmt: skip
                self._logged_errors.add(kind)
        return metrics | {"callbacks/errors": float(self._num_errors)} if hooks else metrics


def _hooks_of(callback: Any) -> dict[str, Callable[..., Any]]:
    """Return the hooks of an object or a class. A plain function is an on_step."""
    # Do not test `callable`, because an object with `__call__` may also have hooks, and these take precedence.
    if inspect.isfunction(callback):
        return {"on_step": callback}
    return {name: getattr(callback, name) for name in dir(callback) if name.startswith("on_")}


def _misfits(callback: Any) -> Iterator[str]:
    """Yield the problems of a function, a class or an instance."""
    hooks, is_class = _hooks_of(callback), isinstance(callback, type)
    if not hooks:
        yield f"it has none of the methods {', '.join(HOOKS)}."
    if is_class and not _takes(callback, 0):
        yield f"the class is created without arguments, but it takes {inspect.signature(callback)}."
    for name, function in hooks.items():
        if name not in HOOKS:
            near = difflib.get_close_matches(name, HOOKS, n=1)
            yield f"rltrain calls no method {name}." + (
                f" Did you mean {near[0]}?" if near else f" There are {', '.join(HOOKS)}."
            )
            continue
        # A plain method of a class also takes ``self``.
        size = len(HOOKS[name]) + (is_class and inspect.isfunction(inspect.getattr_static(callback, name)))
        if not _takes(function, size) and not (name == "on_step" and _takes(function, size - 1)):
            yield f"{name} must take ({', '.join(HOOKS[name])}); it takes {inspect.signature(function)}."


def _takes(function: Callable[..., Any], num_arguments: int) -> bool:
    try:
        # `bind` handles defaults, `*args` and keyword-only arguments, unlike counting parameters.
        inspect.signature(function).bind(*range(num_arguments))
    except (TypeError, ValueError):
        return False
    return True


def _numbers(returned: Any, existing: Metrics) -> Metrics:
    """Return the result of a hook as metrics. Raises TypeError or ValueError."""
    if returned is None:
        return {}
    if not isinstance(returned, Mapping):
        raise TypeError(f"a hook must return None or a dict of numbers, not {returned!r}")
    if clashes := sorted(str(name) for name in returned if name in existing):
        raise ValueError(f"{clashes[0]} is already a metric; name yours callbacks/{clashes[0]}, for example")
    return {str(name): float(value) for name, value in returned.items()}

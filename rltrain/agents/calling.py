"""Calls of user code, and conversion of the tools' return values."""

import contextlib
import inspect
import json
import math
import numbers
import types
import typing
from collections.abc import Callable
from typing import Any

from rltrain.agents.content import Content, content_of, is_image, with_images
from rltrain.agents.threads import in_thread

# Exceptions that would end an event loop, or leave the tasks that wait for it without a result.
_ENDS_LOOPS = (SystemExit, KeyboardInterrupt, StopIteration)


async def call_user(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """Call a user's function: an ``async`` one on the event loop, any other in a thread.

    Raises the function's exception, or a RuntimeError in place of exceptions that would end the event loop, such as
    SystemExit.
    """

    def blocking() -> Any:
        try:
            return function(*arguments, **named)
        except _ENDS_LOOPS as error:
            raise _loop_safe(error) from error

    try:
        is_async = inspect.iscoroutinefunction(function)
        returned = function(*arguments, **named) if is_async else await in_thread(blocking)
        return await returned if inspect.isawaitable(returned) else returned
    except _ENDS_LOOPS as error:
        raise _loop_safe(error) from error


def _loop_safe(error: BaseException) -> RuntimeError:
    return RuntimeError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


_JSON = (str, float, int, bool, list, dict, types.NoneType)


def convert_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call, converted to the function's type hints.

    Raises TypeError that names a missing, unknown or wrongly typed argument.
    """
    try:
        signature = inspect.signature(function)
        hints = typing.get_type_hints(function)
    except Exception:  # noqa: BLE001 - hints may be any expressions of the user's
        return arguments
    signature.bind(**arguments)
    converted = dict(arguments)
    for name in arguments.keys() & hints.keys() & signature.parameters.keys():
        value, hint = arguments[name], hints[name]
        try:
            converted[name] = None if value is signature.parameters[name].default is None else _convert(value, hint)
        except ValueError:
            expected = inspect.formatannotation(hint)
            actual = f"{type(value).__name__}: {value!r:.80}"
            raise TypeError(f"the argument {name} must be {expected}, not {actual}") from None
    return converted


def _convert(value: Any, hint: Any, reads: bool = True) -> Any:
    """Return a JSON value, converted to a type hint. Raises ValueError if it has another type.

    reads: a string for another type is read as JSON. Hints for non-JSON types accept every value.
    """
    kind, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        for choice, reads_text in [(choice, text) for text in (False, reads) for choice in inner]:
            with contextlib.suppress(ValueError):
                return _convert(value, choice, reads_text)
    if kind in _JSON and kind is not str and isinstance(value, str) and reads:
        value = json.loads(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    is_kind = type(value) is kind or (kind is float and type(value) is int)
    is_literal = kind is typing.Literal and any(value == choice and type(value) is type(choice) for choice in inner)
    is_checked = kind in (*_JSON, typing.Union, types.UnionType, typing.Literal)
    if is_checked and (not (is_kind or is_literal) or (kind is float and not math.isfinite(value))):
        raise ValueError(value)
    if kind is list and inner:
        return [_convert(item, inner[0], reads) for item in value]
    return {key: _convert(value[key], inner[1], reads) for key in value} if kind is dict and inner else value


def convert_result(returned: Any) -> dict[str, Any]:
    """Convert a tool's return value to ``content`` for the model (`content.Content`), ``reward`` (default 0),
    ``metrics``.

    returned: a text; an image, or a list of images and texts; another dictionary or list, which becomes JSON; verl's
    ToolResponse; or a tuple of (any of them, reward, metrics), whose last two may be omitted or None. Raises TypeError
    for a longer tuple or a video, and ValueError for a reward that is not a finite number or an unreadable image.
    """
    parts = returned if isinstance(returned, tuple) else (returned,)
    if not 1 <= len(parts) <= 3:
        raise TypeError(
            f"the tool returned a tuple of {len(parts)}: it must be (text,), (text, reward) or (text, reward, metrics)."
        )
    response, reward, metrics = (*parts, None, None)[:3]
    number = 0.0 if reward is None else float(reward)
    if not math.isfinite(number):
        raise ValueError(f"the tool returned the reward {reward}: it must be a finite number.")
    plain = {str(name): _plain(value) for name, value in (metrics or {}).items()}
    return {"content": _content(response), "reward": number, "metrics": plain}


def _content(response: Any) -> Content:
    if isinstance(response, str):
        return response
    # Images are handled first, because a Pillow image may have an attribute ``text``, too.
    if any(map(is_image, response if isinstance(response, list) else [response])):
        return content_of(response) or ""
    if getattr(response, "video", None):
        # Only an attribute ``text`` counts, as in verl's ToolResponse, because the keys of a dictionary are the user's
        # data.
        raise TypeError("the tool returned videos, which are not in this version: it must return text or images.")
    if hasattr(response, "text"):
        images = getattr(response, "image", None)
        return with_images(images, response.text or "") if images else response.text or ""
    if isinstance(response, dict | list):
        return json.dumps(response, ensure_ascii=False, default=str)
    return str(response)


def _plain(value: Any) -> Any:
    """Return a value of metrics in a form that JSON can hold."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return float(value) if isinstance(value, numbers.Real) else str(value)

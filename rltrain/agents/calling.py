"""Calls of a user's code, whatever it does, and what its tools return."""

import inspect
import json
import math
import numbers
from collections.abc import Callable
from typing import Any

from rltrain.agents.content import Content, content_of, is_image, with_images
from rltrain.agents.threads import in_thread

# Raised into an event loop, these would end it, or leave who waits without an answer.
_ENDS_LOOPS = (SystemExit, KeyboardInterrupt, StopIteration)


async def called(function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
    """What a function of a user's returns: an ``async`` one is run on the event loop, any other in a thread.

    Raises what it raises; for what would end the event loop, such as SystemExit, a RuntimeError that names it.
    """

    def blocking() -> Any:
        try:
            return function(*arguments, **named)
        except _ENDS_LOOPS as error:
            raise _told(error) from error

    try:
        is_async = inspect.iscoroutinefunction(function)
        returned = function(*arguments, **named) if is_async else await in_thread(blocking)
        return await returned if inspect.isawaitable(returned) else returned
    except _ENDS_LOOPS as error:
        raise _told(error) from error


def _told(error: BaseException) -> RuntimeError:
    return RuntimeError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def result(returned: Any) -> dict[str, Any]:
    """What a tool says of a call: ``content`` for the model (`content.Content`), ``reward``, 0 where it says nothing of
    one, ``metrics``.

    returned: a text; an image, or a list of images and texts; another dictionary or list, which becomes JSON; verl's
    ToolResponse; or a tuple of (any of them, reward, metrics), of which the last two may be left out or None. Raises
    TypeError for a longer tuple or a video, and ValueError for a reward that is no finite number, and for an image that
    cannot be read.
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
    # One of Pillow's may have a text of its own.
    if any(map(is_image, response if isinstance(response, list) else [response])):
        return content_of(response) or ""
    if getattr(response, "video", None):
        # Of verl's ToolResponse; the keys of a dictionary are the user's own.
        raise TypeError("the tool returned videos, which are not in this version: it must return text or images.")
    if hasattr(response, "text"):
        images = getattr(response, "image", None)
        return with_images(images, response.text or "") if images else response.text or ""
    if isinstance(response, dict | list):
        return json.dumps(response, ensure_ascii=False, default=str)
    return str(response)


def _plain(value: Any) -> Any:
    """A value of metrics as JSON can hold it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return float(value) if isinstance(value, numbers.Real) else str(value)

"""The process behind a slot: reads calls from a socket, makes them, and writes back a line of JSON per request.

Requests arrive as pickles, because arguments may hold anything. Replies never do: whatever a function does to this
process, the other side only ever parses numbers and text. Neither torch nor Ray is imported here.
"""

import faulthandler
import inspect
import json
import logging
import math
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from rltrain.base import stacks
from rltrain.base.errors import RltrainError
from rltrain.base.plugin import user_traceback
from rltrain.slots.limits import impose
from rltrain.slots.service import MAX_REPLY_BYTES, Service

MAX_ERROR_CHARS = 4000
_BEAT_S = 0.05
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Rejected(Exception):
    """A function has returned something that is no result; the text says why."""


class _Late(Exception):
    """A call has no result in time."""


def main(descriptor: int, parent: int) -> None:
    """Serve requests until the other end closes. ``parent`` is the process id of the one that started this one.

    A request is the name of a function and the calls to make (their arguments), or None to import it.
    """
    _die_with(parent)
    # A copy of the stderr that the slot keeps apart, made before prints are turned to the pipe.
    faulthandler.enable(file=os.dup(2))
    stacks.offer()
    _print_by_lines()
    channel = socket.socket(fileno=descriptor)
    requests = channel.makefile("rb")
    # Before any code of the user's runs: memory that an import takes counts too.
    limits = pickle.load(requests)
    impose(limits)
    service: Service = pickle.load(requests)
    functions: dict[str, Callable[..., Any]] = {}
    pid = os.getpid()
    with suppress(EOFError, ConnectionError):
        while True:
            name, calls = pickle.load(requests)
            if calls is None:
                reply = _prepare(name, service, functions)
            else:
                reply = {"results": _results(functions[name], calls, service, limits.timeout_s)}
            if os.getpid() != pid:  # the function forked; a second reply would be taken for that to the next request
                os._exit(0)
            channel.sendall(_line(reply, service))


def failure(error: BaseException) -> dict[str, Any]:
    """The result of a call that has raised ``error``."""
    if isinstance(error, _Late | Rejected):
        status = "timeout" if isinstance(error, _Late) else "rejected"
        return {"status": status, "error": str(error)[:MAX_ERROR_CHARS]}
    failed = {"status": "crashed", "error": user_traceback(error), "kind": type(error).__name__}
    return failed | ({"exhausted": True} if isinstance(error, MemoryError) else {})


def finished(returned: Any) -> Any:
    """What a function has returned, once it is there: that of an ``async`` function is awaited."""
    return _event_loop().run_until_complete(returned) if inspect.isawaitable(returned) else returned


def _prepare(name: str, service: Service, functions: dict[str, Callable[..., Any]]) -> dict[str, Any]:
    """Import the function; not part of any call's deadline."""
    try:
        function = functions[name] = service.open(name)
    except RltrainError as error:
        return {"error": str(error)[:MAX_ERROR_CHARS]}
    except BaseException as error:  # noqa: BLE001 - the import of a user's library may raise anything
        return {"error": f"cannot import {name}:\n{user_traceback(error)}"}
    return {"is_async": inspect.iscoroutinefunction(function) or bool(getattr(function, "is_async", False))}


def _results(
    function: Callable[..., Any], calls: Sequence[Sequence[Any]], service: Service, timeout_s: float
) -> list[dict[str, Any]]:
    """Several calls at once of an ``async`` function, or the one call of any other."""
    try:
        if len(calls) > 1:
            returned = finished(_together(function, calls, service.late(timeout_s), timeout_s))
        else:
            returned = [finished(function(*calls[0]))]
    except BaseException as error:  # noqa: BLE001 - user code: sys.exit and KeyboardInterrupt must not end the process
        return [failure(error) | {"broken": len(calls) > 1}] * len(calls)
    return [
        failure(value) if isinstance(value, BaseException) else {"status": "ok", "value": value} for value in returned
    ]


async def _together(
    function: Callable[..., Any], calls: Sequence[Sequence[Any]], late_words: str, timeout_s: float
) -> list[Any]:
    """What calls of an ``async`` function return that are under way at once; for one that fails the exception, and
    `_Late` after ``timeout_s``."""
    import asyncio

    async def call(arguments: Sequence[Any]) -> Any:
        return await function(*arguments)

    tasks = [asyncio.ensure_future(call(arguments)) for arguments in calls]
    late = set(tasks)
    # Beats and not seconds: a call that blocks the loop must not use up the time of the others.
    for _ in range(math.ceil(timeout_s / _BEAT_S)):
        _, late = await asyncio.wait(late, timeout=_BEAT_S)
        if not late:
            break
    for task in late:
        task.cancel()
    returned = await asyncio.gather(*(task for task in tasks if task not in late), return_exceptions=True)
    in_time = iter(returned)
    return [_Late(late_words) if task in late else next(in_time) for task in tasks]


@cache
def _event_loop() -> Any:
    """One loop for all calls, so that an ``async`` function can keep its connections from call to call."""
    import asyncio

    return asyncio.new_event_loop()


def _line(reply: dict[str, Any], service: Service) -> bytes:
    try:
        line = json.dumps(reply).encode() + b"\n"
    except Exception:  # noqa: BLE001 - a returned object may raise anything when it is looked at
        return _line({"results": [_json(result, service) for result in reply["results"]]}, service)
    if len(line) <= MAX_REPLY_BYTES:
        return line
    too_long = Rejected(f"{service.function} returned {len(line):,} bytes; {MAX_REPLY_BYTES:,} are taken")
    return json.dumps({"results": [failure(too_long)] * len(reply["results"])}).encode() + b"\n"


def _json(result: dict[str, Any], service: Service) -> dict[str, Any]:
    try:
        json.dumps(result)
    except Exception as error:  # noqa: BLE001
        kind = type(result["value"]).__name__
        return failure(Rejected(f"{service.function} returned {kind}, which is not JSON: {error}"))
    return result


def _print_by_lines() -> None:
    """Errors go where prints go, and nothing waits in a buffer: this process may be killed at any time."""
    os.dup2(1, 2)
    style: dict[str, Any] = {"buffering": 1, "encoding": "utf-8", "errors": "backslashreplace", "closefd": False}
    sys.stdout, sys.stderr = open(1, "w", **style), open(2, "w", **style)  # noqa: SIM115 - for the life of the process
    # INFO and above, unless the reward file sets up logging itself.
    logging.lastResort = logging.StreamHandler()
    logging.getLogger().setLevel(logging.INFO)
    with suppress(OSError, ValueError, AttributeError):  # libraries in C have a buffer of their own
        import ctypes

        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 1, 0)


def _die_with(parent: int) -> None:
    """Three favours of Linux: end when the thread that started this process ends, even inside an endless loop; be the
    first to go when the machine runs out of memory; and stay the ancestor of what is started here."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # The parent may have ended before prctl took effect, and then no signal comes.
    if os.getppid() != parent:
        os._exit(1)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="utf-8") as stream:
        stream.write("900")

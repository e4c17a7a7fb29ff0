"""The process of a slot: reads calls from a socket, runs them, and writes a line of JSON per result.

Requests arrive as pickles, because arguments may be any objects. Replies are never pickles: even if a function
compromises this process, the other side only parses numbers and text. Imports neither torch nor Ray.
"""

import ctypes
import faulthandler
import inspect
import json
import logging
import math
import os
import pickle
import resource
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, BinaryIO

from rltrain.common.errors import RltrainError
from rltrain.common.plugin import user_traceback
from rltrain.runtime import stacks
from rltrain.runtime.slots.limits import PROGRAMS_FOLDER, Limits, adopt_orphans, impose, kill_below, remove_folder
from rltrain.runtime.slots.proc import descendants
from rltrain.runtime.slots.service import MAX_RESULT_BYTES, Service

MAX_ERROR_CHARS = 4000
_BEAT_S = 0.05


class Rejected(Exception):
    """A function returned an invalid result; the text is the reason."""


class _Late(Exception):
    """A call has timed out."""


def main(descriptor: int, parent: int) -> None:
    """Serve requests until the other end closes. ``parent`` is the process id of the parent process.

    A request is the name of a function and the calls to run (their arguments), or None to import it.
    """
    channel, requests, limits = opened(descriptor, parent)
    service: Service = pickle.load(requests)
    functions: dict[str, Callable[..., Any]] = {}
    pid = os.getpid()
    with suppress(EOFError, ConnectionError):
        while True:
            name, calls = pickle.load(requests)
            if calls is None:
                results = [_prepare(name, service, functions)]
            else:
                results = _results(functions[name], calls, service, limits.timeout_s)
            if os.getpid() != pid:  # the function forked; a second reply would be mistaken for that of the next request
                os._exit(0)
            channel.sendall(b"".join(_line(result, service) for result in results))


def opened(descriptor: int, parent: int) -> tuple[socket.socket, BinaryIO, Limits]:
    """Make this process killable with all its descendants, then receive and apply the limits. Return the connection,
    the stream of requests, and the limits.
    """
    if sys.platform.startswith("linux"):
        fork_below(parent, descriptor)
        # Make the OOM killer choose this process first.
        with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="utf-8") as stream:
            stream.write("900")
    # faulthandler writes to a copy of stderr, which the slot reads separately. The copy is made before output is
    # redirected to the pipe.
    faulthandler.enable(file=os.dup(2))
    stacks.offer()
    _print_by_lines()
    channel = socket.socket(fileno=descriptor)
    requests = channel.makefile("rb")
    # Limits are set before any user code runs, because memory for imports counts too.
    limits: Limits = pickle.load(requests)
    impose(limits)
    return channel, requests, limits


def failure(error: BaseException) -> dict[str, Any]:
    """Return the result of a call that raised ``error``."""
    if isinstance(error, _Late | Rejected):
        status = "timeout" if isinstance(error, _Late) else "rejected"
        return {"status": status, "error": str(error)[:MAX_ERROR_CHARS]}
    failed = {"status": "crashed", "error": user_traceback(error), "kind": type(error).__name__}
    return failed | ({"exhausted": True} if isinstance(error, MemoryError) else {})


def finished(returned: Any) -> Any:
    """Return a function's result; an ``async`` function's is awaited."""
    return _event_loop().run_until_complete(returned) if inspect.isawaitable(returned) else returned


def _prepare(name: str, service: Service, functions: dict[str, Callable[..., Any]]) -> dict[str, Any]:
    """Import the function, outside of any call's deadline."""
    try:
        function = functions[name] = service.open(name)
    except RltrainError as error:
        return {"status": "crashed", "error": str(error)[:MAX_ERROR_CHARS]}
    except BaseException as error:  # noqa: BLE001 - the import of a user's library may raise anything
        return {"status": "crashed", "error": f"cannot import {name}:\n{user_traceback(error)}"}
    is_async = inspect.iscoroutinefunction(function) or bool(getattr(function, "is_async", False))
    return {"status": "ok", "value": is_async}


def _results(
    function: Callable[..., Any], calls: Sequence[Sequence[Any]], service: Service, timeout_s: float
) -> list[dict[str, Any]]:
    """Run the calls: several for an ``async`` function or one that takes lists, a single call for any other."""
    takes_lists = getattr(function, "takes_lists", False)
    try:
        if takes_lists:
            returned = finished(function(*calls))
        elif len(calls) > 1:
            returned = finished(_together(function, calls, service.late(timeout_s), timeout_s))
        else:
            returned = [finished(function(*calls[0]))]
    except BaseException as error:  # noqa: BLE001 - user code: sys.exit and KeyboardInterrupt must not end the process
        return [failure(error) | {"broken": len(calls) > 1 and not takes_lists}] * len(calls)
    return [
        failure(value) if isinstance(value, BaseException) else {"status": "ok", "value": value} for value in returned
    ]


async def _together(
    function: Callable[..., Any], calls: Sequence[Sequence[Any]], late_words: str, timeout_s: float
) -> list[Any]:
    """Return the results of concurrent calls of an ``async`` function.

    A failed call's result is its exception, and `_Late` after ``timeout_s``.
    """
    import asyncio

    async def call(arguments: Sequence[Any]) -> Any:
        return await function(*arguments)

    tasks = [asyncio.ensure_future(call(arguments)) for arguments in calls]
    late = set(tasks)
    # Counted in small steps, so that a call that blocks the loop does not use up the time of others.
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
    """Return the event loop, shared by all calls so that an ``async`` function can keep connections between calls."""
    import asyncio

    return asyncio.new_event_loop()


def _line(result: dict[str, Any], service: Service) -> bytes:
    try:
        line = json.dumps(result).encode() + b"\n"
        if len(line) <= MAX_RESULT_BYTES:
            return line
        problem = f"{len(line):,} bytes; the limit is {MAX_RESULT_BYTES:,}"
    except Exception as error:  # noqa: BLE001 - a returned object may raise anything when it is looked at
        problem = f"{type(result.get('value')).__name__}, which is not JSON: {error}"
    return json.dumps(failure(Rejected(f"{service.function} returned {problem}"))).encode() + b"\n"


def _print_by_lines() -> None:
    """Redirect stderr to stdout and flush every line, because this process may be killed at any time."""
    os.dup2(1, 2)
    style: dict[str, Any] = {"buffering": 1, "encoding": "utf-8", "errors": "backslashreplace", "closefd": False}
    sys.stdout, sys.stderr = open(1, "w", **style), open(2, "w", **style)  # noqa: SIM115 - for the life of the process
    # Log INFO and above, unless the reward file configures logging itself.
    logging.lastResort = logging.StreamHandler()
    logging.getLogger().setLevel(logging.INFO)
    with suppress(OSError, ValueError, AttributeError):  # libraries in C have a separate buffer
        import ctypes

        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 1, 0)


_PR_SET_PDEATHSIG = 1


def fork_below(parent: int, channel: int) -> None:
    """Fork, and return in the child. The parent (this process) ends all remaining descendants, and then itself like the
    child.

    Only the ancestor that adopts a process whose parent has died can find it (a subreaper in Linux). The process that
    runs the functions cannot be that ancestor, because it may die itself, and waiting for any child would take away
    exit codes of a function's processes. If the subreaper itself is killed (SIGKILL), processes in another session
    survive. The other processes of the slot and programs of models do not.

    parent: process id of the parent. When its thread that started this process ends, or on SIGTERM, everything ends.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an ignored signal, which a parent may have set, would never arrive
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    adopt_orphans()
    _end_with(parent, signal.SIGTERM)
    own, child = os.getpid(), os.fork()
    if not child:
        _end_with(own, signal.SIGKILL)  # even inside an endless loop
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    os.close(channel)  # the other end must notice when the last descendant is gone
    pid, status = -1, 0
    while pid != child and signal.sigwait((signal.SIGTERM, signal.SIGCHLD)) == signal.SIGCHLD:
        pid = -1
        while pid not in (0, child):  # one signal may represent several ended processes
            pid, status = os.waitpid(-1, os.WNOHANG)
    code = os.waitstatus_to_exitcode(status) if pid == child else -signal.SIGTERM
    kill_below(own)
    while descendants(own):
        os.wait()
    remove_folder(os.environ.get(PROGRAMS_FOLDER, ""))
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has already written its core dump
        if code != -signal.SIGKILL:  # SIGKILL has no handler to reset
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(own, -code)
    os._exit(code)


def _end_with(parent: int, number: int) -> None:
    """Request a signal for when the thread that started this process ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    # The parent may have ended before prctl took effect, and then no signal is sent.
    if os.getppid() != parent:
        os._exit(1)

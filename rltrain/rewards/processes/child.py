"""The process behind a slot: reads answers to score from a socket and writes back a line of JSON per request.

Requests arrive as pickles, because ground truths may hold anything. Replies never do: whatever an answer or a reward
function does to this process, the other side only ever parses numbers and text. Neither torch nor Ray is imported here.
"""

import faulthandler
import json
import logging
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rltrain.base import stacks
from rltrain.base.errors import RltrainError
from rltrain.base.plugin import user_traceback
from rltrain.rewards.custom import CustomReward, Late, RewardFunction
from rltrain.rewards.jail.limits import impose
from rltrain.rewards.processes.score import MAX_ERROR_CHARS, ScorerCall, read_returned
from rltrain.rewards.scorers.registry import find_scorer

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_NAMELESS = (
    "\nThe reward function was given as an object, so other processes cannot find its functions by their names: write "
    "them into a file and give FILE.py:NAME."
)

Functions = dict[str, Callable[..., Any]]


def main(descriptor: int, parent: int) -> None:
    """Serve requests until the other end closes. ``parent`` is the process id of the one that started this one.

    A request is a data source and the calls to score, or None to import what scores the data source.
    """
    _die_with(parent)
    # A copy of the stderr that the slot keeps apart, made before prints are turned to the pipe.
    faulthandler.enable(file=os.dup(2))
    stacks.offer()
    _print_by_lines()
    channel = socket.socket(fileno=descriptor)
    requests = channel.makefile("rb")
    custom, limits = pickle.load(requests)
    # Before any code of the user's runs: memory that an import takes counts too.
    impose(limits)
    own = os.getpid()
    functions: Functions = {}
    with suppress(EOFError):
        while True:
            source, calls = pickle.load(requests)
            if calls is None:
                reply = _prepare(source, custom, functions)
            else:
                reply = _score(functions[source], calls, custom, limits.timeout_s)
            if os.getpid() != own:  # the reward function forked; a second reply would be taken for the next answer's
                os._exit(0)
            channel.sendall(json.dumps(reply).encode() + b"\n")


def _prepare(source: str, custom: CustomReward | None, functions: Functions) -> dict[str, Any]:
    """Import what scores ``source``; not part of any answer's deadline."""
    try:
        if custom is not None:
            # One import for all sources: a reward file may keep a table or a model in memory.
            functions[source] = next(iter(functions.values())) if functions else RewardFunction(custom)
        else:
            scorer = find_scorer(source)
            functions[source] = lambda _, solution, truth, extra: scorer(solution, truth, extra)
    except RltrainError as error:
        return {"status": "refused", "error": str(error)[:MAX_ERROR_CHARS]}
    except BaseException as error:  # noqa: BLE001 - the import of a reward library may raise anything
        return {"status": "refused", "error": f"cannot import what scores {source!r}:\n{user_traceback(error)}"}
    return {"status": "ok", "is_async": getattr(functions[source], "is_async", False)}


def _score(
    function: Callable[..., Any], calls: list[ScorerCall], custom: CustomReward | None, timeout_s: float
) -> dict[str, Any]:
    """One call of a function that takes lists (reward_manager=batch), several at once of an ``async`` one, or the one
    call of any other."""
    try:
        if custom is not None and custom.batch:
            returned = list(function(*map(list, zip(*calls, strict=True))))
        elif isinstance(function, RewardFunction) and len(calls) > 1:
            returned = function.together(calls, timeout_s)
        else:
            returned = [function(*calls[0])]
    except BaseException as error:  # noqa: BLE001 - user code: sys.exit and KeyboardInterrupt must not end the process
        failed = _failed(error)
        if custom is not None and custom.path.endswith(".pkl") and isinstance(error, pickle.PicklingError):
            failed["error"] += _NAMELESS
        return failed
    if len(returned) != len(calls):
        said = f"the reward function returned {len(returned)} results for {len(calls)} answers"
        return {"status": "rejected", "error": said}
    return {"status": "ok", "scores": [_read(call[0], each) for call, each in zip(calls, returned, strict=True)]}


def _failed(error: BaseException) -> dict[str, Any]:
    failed = {"status": "crashed", "error": user_traceback(error), "kind": type(error).__name__}
    return failed | ({"exhausted": True} if isinstance(error, MemoryError) else {})


def _read(source: str, returned: Any) -> dict[str, Any]:
    if isinstance(returned, Late):
        return {"status": "timeout", "error": str(returned)}
    if isinstance(returned, BaseException):
        return _failed(returned)
    try:
        value, extras = read_returned(returned)
    except Exception as error:  # noqa: BLE001 - a returned object may raise anything when it is looked at
        return {"status": "rejected", "error": f"data_source={source!r}: {error}"[:MAX_ERROR_CHARS]}
    return {"status": "ok", "value": value, "extras": extras}


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

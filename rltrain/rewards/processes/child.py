"""The process behind a slot: reads answers to score from a socket, writes what came of them.

It speaks JSON back, never pickle: whatever an answer or a reward function does to this process, the other side only ever
parses numbers and text. Neither torch nor Ray is imported here.
"""

import faulthandler
import json
import logging
import math
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rltrain.errors import RewardError
from rltrain.rewards.custom import CustomReward, load_custom, user_traceback
from rltrain.rewards.processes.limits import impose
from rltrain.rewards.registry import find_scorer

MAX_ERROR_CHARS = 4000
_MAX_EXTRAS = 64
_MAX_TEXT_CHARS = 256
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(descriptor: int, parent: int) -> None:
    """Serve requests until the other end closes. ``parent`` is the process id of the one that started this one."""
    _die_with(parent)
    faulthandler.enable(file=os.dup(2))
    _print_by_lines()
    channel = socket.socket(fileno=descriptor)
    custom, limits = pickle.loads(receive(channel) or b"")
    impose(limits)
    own = os.getpid()
    scorers: dict[str, Callable[..., Any]] = {}
    while (request := receive(channel)) is not None:
        answer = _answer(pickle.loads(request), custom, scorers)
        if os.getpid() != own:  # the reward function forked; a second reply would be taken for the next answer's
            os._exit(0)
        send(channel, json.dumps(answer).encode())


def send(channel: socket.socket, body: bytes) -> None:
    """One frame: eight bytes of length, then the body."""
    channel.sendall(len(body).to_bytes(8, "big") + body)


def receive(channel: socket.socket) -> bytes | None:
    """The next frame, or None where the other end has closed."""
    head = _receive_exactly(channel, 8)
    return None if head is None else _receive_exactly(channel, int.from_bytes(head, "big"))


def _receive_exactly(channel: socket.socket, size: int) -> bytes | None:
    parts, missing = [], size
    while missing:
        part = channel.recv(min(missing, 1 << 20))
        if not part:
            return None
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _answer(request: tuple, custom: CustomReward | None, scorers: dict[str, Callable[..., Any]]) -> dict[str, Any]:
    source = request[0]
    if len(request) == 1:
        return _prepare(source, custom, scorers)
    if len(request) == 2:
        return _answer_all(request[1], scorers[source])
    try:
        value = scorers[source](*request)
    except BaseException as error:  # noqa: BLE001 - user code: sys.exit and KeyboardInterrupt must not end the process
        return _crash(error)
    return _verdict(source, value)


def _crash(error: BaseException) -> dict[str, Any]:
    said = {"status": "crashed", "error": user_traceback(error)[-MAX_ERROR_CHARS:], "kind": type(error).__name__}
    return said | ({"exhausted": True} if isinstance(error, MemoryError) else {})


def _answer_all(calls: list[tuple], function: Callable[..., Any]) -> dict[str, Any]:
    """Several answers in one call of a function that takes lists (reward_manager=batch)."""
    try:
        values = list(function(*(list(column) for column in zip(*calls, strict=True))))
    except BaseException as error:  # noqa: BLE001 - user code: sys.exit and KeyboardInterrupt must not end the process
        return _crash(error)
    if len(values) != len(calls):
        return {
            "status": "rejected",
            "error": f"the reward function returned {len(values)} verdicts for {len(calls)} answers",
        }
    return {"status": "ok", "verdicts": [_verdict(call[0], value) for call, value in zip(calls, values, strict=True)]}


def _verdict(source: str, value: Any) -> dict[str, Any]:
    try:
        score, extras = judge(value)
    except Exception as error:  # noqa: BLE001 - a returned object may raise anything when it is looked at
        return {"status": "rejected", "error": f"data_source={source!r}: {error}"[:MAX_ERROR_CHARS]}
    return {"status": "ok", "value": score, "extras": extras}


def _prepare(source: str, custom: CustomReward | None, scorers: dict[str, Callable[..., Any]]) -> dict[str, Any]:
    """Import what scores ``source``; not part of any answer's deadline."""
    try:
        if custom is not None:
            # One import for all sources: a reward file may keep a table or a model in memory.
            scorers[source] = next(iter(scorers.values())) if scorers else load_custom(custom)
        else:
            function = find_scorer(source)
            scorers[source] = lambda _, solution, truth, extra: function(solution, truth, extra)
    except RewardError as error:
        return {"status": "refused", "error": str(error)[:MAX_ERROR_CHARS]}
    except BaseException as error:  # noqa: BLE001 - the import of a reward library may raise anything
        return {"status": "refused", "error": f"cannot import what scores {source!r}:\n{user_traceback(error)}"}
    return {"status": "ready"}


def judge(value: Any) -> tuple[float, dict[str, float | str]]:
    """Score and extras of what a reward function returned. ValueError unless the score is one finite number."""
    if not isinstance(value, dict):
        return _finite(value, "the reward function returned"), {}
    if "score" not in value:
        raise ValueError(f"the reward function returned a dict without 'score': {sorted(map(str, value))}")
    extras: dict[str, float | str] = {}
    for name, extra in list(value.items())[:_MAX_EXTRAS]:
        if name == "score":
            continue
        if isinstance(extra, str):
            extras[str(name)] = extra[:_MAX_TEXT_CHARS]
        else:
            with suppress(ValueError, TypeError):
                extras[str(name)] = _finite(extra, str(name))
    return _finite(value["score"], "the reward function returned score"), extras


def _finite(value: Any, what: str) -> float:
    number = value
    if not isinstance(value, (bool, int, float)) and getattr(value, "ndim", None) == 0:  # NumPy and torch scalars
        number = value.item()
    if not isinstance(number, (bool, int, float)):
        raise ValueError(f"{what} {type(value).__name__} {value!r:.200}; it must be one number, or a dict with 'score'")
    if not math.isfinite(number):
        raise ValueError(f"{what} {number}; it must be finite")
    return float(number)


def _print_by_lines() -> None:
    """Errors go where prints go, and nothing waits in a buffer: this process may be killed at any time."""
    os.dup2(1, 2)
    style: dict[str, Any] = {"buffering": 1, "encoding": "utf-8", "errors": "backslashreplace", "closefd": False}
    sys.stdout, sys.stderr = open(1, "w", **style), open(2, "w", **style)  # noqa: SIM115 - for as long as the process lives
    # For who has not set up any logging: INFO and above.
    logging.lastResort = logging.StreamHandler()
    logging.getLogger().setLevel(logging.INFO)
    with suppress(OSError, ValueError, AttributeError):  # libraries in C have a buffer of their own
        import ctypes

        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 1, 0)


def _die_with(parent: int) -> None:
    """End when the thread that started this process ends, even inside an endless loop; be the first to go when the
    machine runs out of memory; and stay the ancestor of what is started here. All are favours of Linux."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        os._exit(1)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as stream:
        stream.write("900")

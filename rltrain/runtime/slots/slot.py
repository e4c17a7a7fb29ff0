"""Slot: one process that runs one call at a time, and is killed and replaced when a call takes too long.

A user's function may not terminate: a regular expression may hold the interpreter lock for hours, a library may crash
or leak, and processes that it started may outlive it. Neither a thread nor a signal can stop that. So the function runs
in another process, which is killed with all its descendants by its parent (subreaper.py), or by this process if that
takes too long. It is a new interpreter, because a fork would inherit threads and locks of Ray. `multiprocessing` and
pebble were not used because they unpickle the replies of the process and leave grandchildren running.
"""

import json
import pickle
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

from rltrain.common.errors import replace_surrogates
from rltrain.runtime.slots.limits import Limits
from rltrain.runtime.slots.output import Printed, lost_process
from rltrain.runtime.slots.process import START_TIMEOUT_S, ChildProcess
from rltrain.runtime.slots.service import MAX_RESULT_BYTES, Outcome, Service

# Kind of an outcome if the process waited for a dead multiprocessing child.
ORPHANED = "lost process"
_CRASH_CHARS = 2000
# Maximum concurrent calls of an ``async`` function in a process.
_AT_ONCE = 16
_STATUSES = ("ok", "timeout", "crashed", "rejected")


class _Expired(Exception):
    """No reply within the deadline."""


class _Died(Exception):
    """The process ended, or sent an invalid reply."""


class Slot:
    """Calls the functions of a service in a separate process, at most ``limits.timeout_s`` per call.

    A call for which the process exceeds ``limits.memory_mb`` counts as crashed. The process has a separate session and
    ends with the thread that started it. Not thread-safe.
    """

    def __init__(self, service: Service, limits: Limits | None = None):
        self._service = service
        self._limits = limits or Limits()
        self._process: ChildProcess | None = None
        self._printed = Printed()
        self._start()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the subreaper above the process; None once closed."""
        return None if self._process is None else self._process.pid

    def call(self, name: str, *arguments: Any, timeout_s: float | None = None) -> Outcome:
        """Call the function ``name``. timeout_s: timeout of this call, instead of the limits' timeout.

        Raises the service's error only if there is no such function.
        """
        return self._ask(name, [arguments], timeout_s or self._limits.timeout_s)[0][0]

    def call_all(self, name: str, calls: Sequence[Sequence[Any]]) -> list[Outcome]:
        """Call the function ``name`` once per entry (its arguments), one by one; with an ``async`` function, several
        concurrently."""
        if not calls or not self.prepare(name):
            return [self.call(name, *arguments) for arguments in calls]
        groups = [calls[first : first + _AT_ONCE] for first in range(0, len(calls), _AT_ONCE)]
        return [outcome for group in groups for outcome in self._call_together(name, group)]

    def call_list(self, name: str, calls: Sequence[Sequence[Any]]) -> list[Outcome]:
        """Call a function that takes lists once, for all entries, with the sum of their time limits."""
        return self._ask(name, calls, self._limits.timeout_s * len(calls))[0]

    def prepare(self, name: str, may_repeat: bool = True) -> bool:
        """Import the function ``name``, outside of any call's deadline. Return True if it is ``async``.

        may_repeat: retry after SIGKILL or SIGTERM. Raises the service's error if the import fails.
        """
        if self._process is None:
            raise RuntimeError("the slot is closed")
        if self._awaits_reply:  # an interrupt preceded the reply, and the next call would mistake the reply for its own
            self._restart()
        elif self._process.has_ended:  # died since the last call, so it must not fail this one
            self._printed.add(
                f"{self._replace_dead()[0]['error']}\nbetween two {self._service.call}s; restarted\n".encode()
            )
        if name in self._prepared:
            return self._prepared[name]
        try:
            reply = self._exchange((name, None), START_TIMEOUT_S)[0]
        except _Expired:
            self._restart()
            reply = {"error": f"importing {self._service.function} took more than {START_TIMEOUT_S:g} s"}
        except _Died:
            reply, is_killed = self._replace_dead()
            if is_killed and may_repeat:
                return self.prepare(name, may_repeat=False)
        if "error" in reply:
            raise self._service.error(str(reply["error"]))
        self._prepared[name] = bool(reply.get("value"))
        return self._prepared[name]

    def take_printed(self) -> str:
        """Return and clear the output of the process and its descendants."""
        return self._printed.take()

    def close(self) -> None:
        """End the process and its descendants now."""
        if self._process is None:
            return
        self._process.close()
        self._process = None

    def _call_together(self, name: str, calls: Sequence[Sequence[Any]]) -> list[Outcome]:
        # The process itself enforces the deadline of each call.
        outcomes, is_lost = self._ask(name, calls, self._limits.timeout_s * len(calls), may_repeat=len(calls) == 1)
        if is_lost and len(calls) > 1 and self._service.may_repeat:
            # One of the calls blocks or ends the process. If they run alone, each has a separate deadline and does not
            # affect others.
            return [self._ask(name, [arguments], self._limits.timeout_s, False)[0][0] for arguments in calls]
        return outcomes

    def _ask(
        self, name: str, calls: Sequence[Sequence[Any]], timeout_s: float, may_repeat: bool = True, left_s: float = 0.0
    ) -> tuple[list[Outcome], bool]:
        """Return the outcomes of the calls, within ``timeout_s`` in total, and True if the process was lost.

        After SIGKILL or SIGTERM a new process repeats the calls, if service and caller allow it (``may_repeat``). It
        gets only the rest of the deadline (``left_s``), because the caller does not wait longer.
        """
        self.prepare(name)
        end = time.monotonic() + (left_s or timeout_s)
        before = self._printed.total
        try:
            results = self._exchange((name, list(calls)), left_s or timeout_s)
        except _Expired:
            self._restart()
            failure = {"status": "timeout", "error": self._service.late(timeout_s)}
            if lost := lost_process(self._printed.since(before)):
                # Every call would wait for a reply that never arrives, so the cause is reported.
                failure["error"] += f"; a process that it started with multiprocessing ended with an error:\n{lost}"
                failure |= {"status": "crashed", "kind": ORPHANED}
            return [outcome_of(failure)] * len(calls), True
        except _Died:
            failure, is_killed = self._replace_dead()
            if is_killed and may_repeat and self._service.may_repeat and (left := end - time.monotonic()) > 0:
                return self._ask(name, calls, timeout_s, False, left)
            return [outcome_of(failure)] * len(calls), True
        for result in results:
            if result.get("exhausted"):
                result["error"] = f"more memory than {self._service.memory_key} allows:\n{result.get('error')}"
        is_lost = any(result.get("exhausted") or result.get("broken") for result in results)
        if is_lost:  # the rest of its memory, or its event loop, cannot be trusted
            self._restart()
        return [outcome_of(result) for result in results], is_lost

    def _start(self) -> None:
        self._awaits_reply = False
        self._prepared: dict[str, bool] = {}  # name of a function -> whether it is ``async``
        # A large service (reward_kwargs) may fill the socket, and an interpreter that fails to start never reads it.
        opening = pickle.dumps(self._limits) + pickle.dumps(self._service)
        self._process = ChildProcess("rltrain.runtime.slots.child", opening, self._printed)

    def _restart(self) -> None:
        self.close()
        self._start()

    def _exchange(self, request: tuple[str, list[Sequence[Any]] | None], timeout_s: float) -> list[dict[str, Any]]:
        assert self._process is not None
        channel, deadline = self._process.channel, time.monotonic() + timeout_s
        num_results = 1 if request[1] is None else len(request[1])
        reply = bytearray()
        self._awaits_reply = True
        try:
            channel.settimeout(timeout_s)
            channel.sendall(pickle.dumps(request))
            # The deadline covers all parts of a reply, because a timeout per read would restart with every byte.
            while reply.count(b"\n") < num_results:
                if (remaining := deadline - time.monotonic()) <= 0:
                    raise _Expired
                ready = wait([channel, self._printed.reader], remaining)
                self._printed.drain()  # a full pipe would block the process
                if channel in ready:
                    received = channel.recv(MAX_RESULT_BYTES)
                    reply += received
                    if not received or len(reply) > num_results * MAX_RESULT_BYTES:
                        raise _Died
            results = [self._result(line) for line in reply.splitlines()]
        except TimeoutError:
            raise _Expired from None
        except (OSError, ValueError):
            raise _Died from None
        # A function can write to the connection too, so a reply is validated like any other input.
        are_results = (isinstance(result, dict) and result.get("status") in _STATUSES for result in results)
        if len(results) != num_results or not all(are_results):
            raise _Died
        self._awaits_reply = False
        return results

    def _result(self, line: bytearray) -> Any:
        try:
            return json.loads(line)
        except RecursionError:
            return {"status": "rejected", "error": f"{self._service.function} returned a too deeply nested value"}

    def _replace_dead(self) -> tuple[dict[str, str], bool]:
        """Replace a process that has ended. Return the failure, and True for SIGKILL or SIGTERM."""
        assert self._process is not None
        how, is_killed = self._process.end()
        self._start()
        return {"status": "crashed", "error": f"{self._service.function}{how}"}, is_killed


def outcome_of(result: dict[str, Any]) -> Outcome:
    """Convert a result from the process to an outcome."""
    if result["status"] == "ok":
        return Outcome("ok", result.get("value"))
    return Outcome(
        result["status"], None, replace_surrogates(str(result.get("error"))), str(result.get("kind", ""))[:_CRASH_CHARS]
    )

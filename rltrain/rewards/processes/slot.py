"""A slot: one process that scores one answer at a time, killed and replaced when an answer takes too long."""

import json
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rltrain.env import scorer_environment
from rltrain.errors import RewardError
from rltrain.rewards.custom import CustomReward
from rltrain.rewards.processes.child import send
from rltrain.rewards.processes.limits import Limits, kill_tree
from rltrain.rewards.processes.output import Printed
from rltrain.rewards.registry import FORMS

START_TIMEOUT_S = 120.0

Call = tuple[str, str, Any, dict[str, Any]]

_MAX_REPLY_BYTES = 1 << 20
_CRASH_CHARS = 2000
_SHOWN_CHARS = 400
_COMMAND = "import sys; sys.path[:] = {path!r}; from rltrain.rewards.processes.child import main; main({fd}, {parent})"


@dataclass(frozen=True)
class Score:
    """What came of one answer. ``value`` is None unless ``status`` is ``ok``; ``error`` then says what happened.

    ``kind``: the name of the exception, where there is one. ``call``: data source, answer and ground truth of an answer that
    failed, shortened, where they are known.
    """

    value: float | None
    status: Literal["ok", "timeout", "crashed", "rejected"]
    error: str | None = None
    extras: dict[str, float | str] = field(default_factory=dict)
    kind: str = ""
    call: tuple[str, str, str] | None = None

    def of(self, call: Call) -> "Score":
        """The same; where it failed, with what was to be scored."""
        if self.status == "ok":
            return self
        source, answer, truth = call[0], repr(call[1][:_SHOWN_CHARS]), f"{call[2]!r:.{_SHOWN_CHARS}}"
        if len(call[1]) > _SHOWN_CHARS:
            answer += f"… ({len(call[1]):,} characters)"
        return replace(self, call=(source, answer, truth))

    def report(self) -> str:
        """What happened to an answer that failed, to which answer, and where in the user's code."""
        about = "" if self.call is None else "data_source={!r}\n  answer: {}\n  ground truth: {}\n".format(*self.call)
        return f"{about}  {self.status}: {self.error}"


class _Expired(Exception):
    """No reply within the deadline."""


class _Died(Exception):
    """The process ended, or sent something that is no reply."""


class Slot:
    """Scores answers in a process of its own: at most ``timeout_s`` each, whatever the reward function does.

    An answer for which the process outgrows ``memory_limit_mb`` (0: no limit) counts as crashed.

    The process is an interpreter started afresh (not a fork), in a session of its own; what it prints can be had with
    `take_printed`. It ends with the thread that started it. Not for use from several threads at once.
    """

    def __init__(
        self,
        custom: CustomReward | None = None,
        timeout_s: float = 5.0,
        memory_limit_mb: int = 4096,
        allow_code_execution: bool = False,
    ):
        self.custom = custom
        self.timeout_s = timeout_s
        self.limits = Limits(timeout_s, memory_limit_mb, allow_code_execution)
        self._process: subprocess.Popen | None = None
        self._printed = Printed()
        self._start()

    def __enter__(self) -> "Slot":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the process that scores, None once closed."""
        return None if self._process is None else self._process.pid

    def score(self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Score:
        """Score one answer. Raises RewardError only where no answer could be scored: no scorer, failing imports."""
        call = (data_source, solution_str, ground_truth, extra_info)
        if self.custom and self.custom.batch:
            return self.score_all([call])[0]
        return _score(self._ask(call, self.timeout_s)).of(call)

    def score_all(self, calls: Sequence[Call]) -> list[Score]:
        """Score answers one after the other, or with a function that takes lists all in one call, which has their time together."""
        if not (self.custom and self.custom.batch):
            return [self.score(*call) for call in calls]
        reply = self._ask((calls[0][0], list(calls)), self.timeout_s * len(calls))
        if reply["status"] == "ok":
            return [_score(verdict).of(call) for verdict, call in zip(reply["verdicts"], calls, strict=True)]
        return [_score(reply).of(call) for call in calls]

    def _ask(self, request: tuple, timeout_s: float) -> dict[str, Any]:
        """What the process says, or what happened to it; it is whole again afterwards."""
        self._prepare(request[0])
        try:
            reply = self._exchange(request, timeout_s)
        except _Expired:
            self._restart()
            return {"status": "timeout", "error": f"no score after {timeout_s:g} s (reward.timeout_s)"}
        except _Died:
            error = self._obituary()
            self._restart()
            return {"status": "crashed", "error": error}
        if reply.get("exhausted"):  # what is left of its memory is not enough to trust
            self._restart()
            reply["error"] = f"more memory than reward.memory_limit_mb allows:\n{reply['error']}"
        return reply

    def check(self, call: Call) -> Score:
        """Score a ground truth as the answer before training; where that fails, in the other `FORMS` until one does not.

        Like ``score``, it raises only where nothing could be scored.
        """
        score = self.score(*call)
        for form in FORMS[1:]:
            if score.status not in ("crashed", "rejected"):
                break
            other = self.score(call[0], form.format(call[1]), *call[2:])
            score = other if other.status == "ok" else score
        return score

    def take_printed(self) -> str:
        """What the process, and those it started, have printed since the last call."""
        return self._printed.take()

    def close(self) -> None:
        """End the process, and those it started, now."""
        if self._process is not None:
            self._stop()
            self._printed.close()

    def _stop(self) -> None:
        assert self._process is not None
        self._events.close()
        self._channel.close()
        kill_tree(self._process.pid)
        self._process.wait()
        self._printed.drain()  # its last words
        self._process = None
        self._crash_log.close()

    def _start(self) -> None:
        self._channel, far_end = socket.socketpair()
        self._crash_log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._prepared: set[str] = set()
        self._events = selectors.DefaultSelector()
        self._events.register(self._channel, selectors.EVENT_READ)
        self._events.register(self._printed.reader, selectors.EVENT_READ)
        with far_end:
            code = _COMMAND.format(path=sys.path, fd=far_end.fileno(), parent=os.getpid())
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=self._printed.writer,
                stderr=self._crash_log,
                pass_fds=[far_end.fileno()],
                start_new_session=True,
                env=scorer_environment(),
            )
        self._channel.settimeout(START_TIMEOUT_S)
        send(self._channel, pickle.dumps((self.custom, self.limits)))

    def _restart(self) -> None:
        self._stop()
        self._start()

    def _prepare(self, data_source: str) -> None:
        if self._process is None:
            raise RuntimeError("the slot is closed")
        if self._process.poll() is not None:  # since the last answer, so it must not cost this one
            self._printed.add(f"{self._obituary()}\nbetween two answers; it was started again\n".encode())
            self._restart()
        if data_source in self._prepared:
            return
        try:
            reply = self._exchange((data_source,), START_TIMEOUT_S)
        except _Expired:
            self._restart()
            reply = {"status": "refused", "error": f"importing what scores it took more than {START_TIMEOUT_S:g} s"}
        except _Died:
            reply = {"status": "refused", "error": self._obituary()}
            self._restart()
        if reply["status"] != "ready":
            raise RewardError(reply["error"])
        self._prepared.add(data_source)

    def _exchange(self, request: tuple, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        try:
            self._channel.settimeout(timeout_s)
            send(self._channel, pickle.dumps(request))
            size = int.from_bytes(self._read(8, deadline), "big")
            if size > _MAX_REPLY_BYTES:
                raise _Died
            reply = json.loads(self._read(size, deadline))
        except TimeoutError:
            raise _Expired from None
        except (OSError, ValueError):
            raise _Died from None
        if not isinstance(reply, dict) or reply.get("status") not in ("ready", "refused", "ok", "crashed", "rejected"):
            raise _Died
        return reply

    def _read(self, size: int, deadline: float) -> bytes:
        data = b""
        while len(data) < size:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            ready = {key.fileobj for key, _ in self._events.select(remaining)}
            self._printed.drain()
            if self._channel not in ready:
                continue
            self._channel.settimeout(remaining)
            part = self._channel.recv(size - len(data))
            if not part:
                raise _Died
            data += part
        return data

    def _obituary(self) -> str:
        """How the process ended, and where in the user's code if it could still say so."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return "the reward function broke the connection to its process"
        how = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        self._crash_log.seek(0)
        last_words = self._crash_log.read(_CRASH_CHARS).decode(errors="replace").strip()
        return f"the reward function's process {how}" + (f":\n{last_words}" if last_words else "")


def _score(reply: dict[str, Any]) -> Score:
    if reply["status"] == "ok":
        return Score(float(reply["value"]), "ok", None, reply["extras"])
    return Score(None, reply["status"], reply["error"], kind=str(reply.get("kind", ""))[:_CRASH_CHARS])

"""A slot: one process that scores one answer at a time, killed and replaced when an answer takes too long.

A reward function is code that the trainer cannot trust to end: a regular expression may hold the interpreter lock for
hours, a library may crash or leak, and what it started may outlive it. A thread or a signal stops none of that, so an
answer is scored in another process, which is killed with everything it started. The process is an interpreter started
afresh: a fork would inherit the threads and locks of Ray. `multiprocessing` and pebble were left out because they
unpickle what the process sends back, and because they leave grandchildren running.
"""

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

from rltrain.base.env import scorer_environment
from rltrain.base.errors import RewardError, storable
from rltrain.rewards.custom import CustomReward
from rltrain.rewards.jail.limits import ScoringLimits, kill_tree
from rltrain.rewards.processes.output import Printed, lost_process
from rltrain.rewards.processes.score import Score, ScorerCall
from rltrain.rewards.scorers.registry import FORMS

START_TIMEOUT_S = 120.0
_MAX_REPLY_BYTES = 1 << 20
_CRASH_CHARS = 2000
# Answers of an ``async`` function that are under way at once in a process.
_AT_ONCE = 16
_ORPHANED = "lost process"
# The parent's own sys.path, since it may have been changed by the command or a plugin; -c and not -m, so that it is set
# before anything of rltrain is imported.
_COMMAND = "import sys; sys.path[:] = {path!r}; from rltrain.rewards.processes.child import main; main({fd}, {parent})"


class _Expired(Exception):
    """No reply within the deadline."""


class _Died(Exception):
    """The process ended, or sent something that is no reply."""


class Slot:
    """Scores answers in a process of its own: at most ``timeout_s`` per answer, whatever the reward function does.

    An answer for which the process outgrows ``memory_limit_mb`` (0: unlimited) counts as crashed. The process is in a
    session of its own and ends with the thread that started it. Not for use from several threads at once.
    """

    def __init__(
        self,
        custom: CustomReward | None = None,
        timeout_s: float = 5.0,
        memory_limit_mb: int = 4096,
        allow_code_execution: bool = False,
    ):
        self._custom = custom
        self._limits = ScoringLimits(timeout_s, memory_limit_mb, allow_code_execution)
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
        return self._score([(data_source, solution_str, ground_truth, extra_info)])[0]

    def score_all(self, calls: Sequence[ScorerCall]) -> list[Score]:
        """Score answers one by one; those of an ``async`` function at the same time, some at once. A function that
        takes lists gets them in one call, with their time together."""
        if self._custom and self._custom.batch:
            return self._score(calls)
        self.prepare(calls[0][0])
        if not self._is_async:
            return [self.score(*call) for call in calls]
        groups = [calls[first : first + _AT_ONCE] for first in range(0, len(calls), _AT_ONCE)]
        return [score for group in groups for score in self._score_together(group)]

    def check(self, call: ScorerCall) -> Score:
        """Score a ground truth as the answer; where that fails, in the other `FORMS` until one does not.

        Like ``score``, it raises only where nothing could be scored.
        """
        score = self.score(*call)
        for form in FORMS[1:]:
            # After a timeout no other form is tried: each could cost another deadline.
            if score.status not in ("crashed", "rejected") or score.kind == _ORPHANED:
                break
            other = self.score(call[0], form.format(call[1]), *call[2:])
            score = other if other.status == "ok" else score
        return score

    def prepare(self, data_source: str) -> None:
        """Import what scores ``data_source``, outside any answer's deadline. Raises RewardError where that fails."""
        if self._process is None:
            raise RuntimeError("the slot is closed")
        if self._process.poll() is not None:  # since the last answer, so it must not cost this one
            self._printed.add(f"{self._obituary()}\nbetween two answers; it was started again\n".encode())
            self._restart()
        if data_source in self._prepared:
            return
        try:
            reply = self._exchange((data_source, None), START_TIMEOUT_S)
        except _Expired:
            self._restart()
            reply = {"status": "refused", "error": f"importing what scores it took more than {START_TIMEOUT_S:g} s"}
        except _Died:
            reply = {"status": "refused", "error": self._obituary()}
            self._restart()
        if reply["status"] != "ok":
            raise RewardError(reply["error"])
        self._is_async = bool(reply.get("is_async"))
        self._prepared.add(data_source)

    def take_printed(self) -> str:
        """What the process, and those it started, have printed since the last call."""
        return self._printed.take()

    def close(self) -> None:
        """End the process, and those it started, now."""
        if self._process is not None:
            self._stop()
            self._printed.close()

    def _score_together(self, calls: Sequence[ScorerCall]) -> list[Score]:
        reply = self._ask(calls)
        if len(calls) > 1 and (reply["status"] != "ok" or any(each.get("exhausted") for each in reply["scores"])):
            # One of them holds up or ends the process. Alone, each has its own deadline and takes no other along.
            self._restart()
            return [self.score(*call) for call in calls]
        return _scores(reply, calls)

    def _score(self, calls: Sequence[ScorerCall]) -> list[Score]:
        return _scores(self._ask(calls), calls)

    def _ask(self, calls: Sequence[ScorerCall], left_s: float = 0.0) -> dict[str, Any]:
        """The reply. After a signal such as anybody may send a new process is asked, once: it has what was left of the
        deadline (``left_s``), as whoever waits for the reply waits no longer."""
        self.prepare(calls[0][0])
        # Of several calls in one request the process keeps the deadlines itself, or they share one (lists).
        timeout_s = self._limits.timeout_s * len(calls)
        end = time.monotonic() + (left_s or timeout_s)
        before = self._printed.total
        try:
            reply = self._exchange((calls[0][0], list(calls)), left_s or timeout_s)
        except _Expired:
            self._restart()
            reply = {"status": "timeout", "error": f"no score after {timeout_s:g} s (reward.timeout_s)"}
            if lost := lost_process(self._printed.since(before)):
                # It waits for what never comes, answer after answer: told as the error that it is.
                reply["error"] += f"; a process that it started by multiprocessing ended by an error:\n{lost}"
                reply |= {"status": "crashed", "kind": _ORPHANED}
        except _Died:
            reply = {"status": "crashed", "error": self._obituary()}
            killed = self._process is not None and self._process.returncode in (-signal.SIGKILL, -signal.SIGTERM)
            self._restart()
            if killed and not left_s and (left := end - time.monotonic()) > 0:
                return self._ask(calls, left)
        if reply.get("exhausted"):  # what is left of its memory is not enough to trust
            self._restart()
            reply["error"] = f"more memory than reward.memory_limit_mb allows:\n{reply['error']}"
        return reply

    def _start(self) -> None:
        self._channel, far_end = socket.socketpair()
        # Gets the interpreter's first words and faulthandler's last ones. The child soon turns its stderr to the pipe,
        # so that prints do not bury them.
        self._crash_log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._prepared: set[str] = set()
        with far_end:
            code = _COMMAND.format(path=sys.path, fd=far_end.fileno(), parent=os.getpid())
            # A process group of its own, which `kill_tree` can end as one.
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=self._printed.writer,
                stderr=self._crash_log, pass_fds=[far_end.fileno()], start_new_session=True, env=scorer_environment(),
            )  # fmt: skip
        # Large reward_kwargs may fill the socket, and an interpreter that fails to start never reads them.
        self._channel.settimeout(START_TIMEOUT_S)
        self._channel.sendall(pickle.dumps((self._custom, self._limits)))

    def _stop(self) -> None:
        assert self._process is not None
        self._channel.close()
        # Before `wait`: once it is waited for, its id may belong to another process.
        kill_tree(self._process.pid)
        self._process.wait()
        self._printed.drain()  # its last words
        self._process = None
        self._crash_log.close()

    def _restart(self) -> None:
        self._stop()
        self._start()

    def _exchange(self, request: tuple[str, list[ScorerCall] | None], timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        line = b""
        try:
            self._channel.settimeout(timeout_s)
            self._channel.sendall(pickle.dumps(request))
            # The deadline is over all parts of a reply: one timeout per read would begin anew with every byte.
            while not line.endswith(b"\n"):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise _Expired
                ready = wait([self._channel, self._printed.reader], remaining)
                self._printed.drain()  # a full pipe would block the process
                if self._channel in ready:
                    received = self._channel.recv(_MAX_REPLY_BYTES)
                    line += received
                    if not received or len(line) > _MAX_REPLY_BYTES:
                        raise _Died
            reply = json.loads(line)
        except TimeoutError:
            raise _Expired from None
        except (OSError, ValueError):
            raise _Died from None
        # The reward function can write into this connection too, so a reply is checked like any other input.
        if not isinstance(reply, dict) or reply.get("status") not in ("refused", "ok", "crashed", "rejected"):
            raise _Died
        return reply

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


def _scores(reply: dict[str, Any], calls: Sequence[ScorerCall]) -> list[Score]:
    scores = reply["scores"] if reply["status"] == "ok" else [reply] * len(calls)
    return [_score_of(each).about(call) for each, call in zip(scores, calls, strict=True)]


def _score_of(reply: dict[str, Any]) -> Score:
    if reply["status"] == "ok":
        return Score(float(reply["value"]), "ok", None, reply["extras"])
    return Score(None, reply["status"], storable(reply["error"]), kind=str(reply.get("kind", ""))[:_CRASH_CHARS])

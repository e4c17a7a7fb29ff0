"""Executor: one process that runs many trajectories concurrently, and their recovery when it dies. A tool may hold the
interpreter's lock, end its process or use up its memory, but other trajectories of the process must not be affected. So
the process is replaced, and each trajectory restarts in the new one with its previous turns (`Chat`). Trajectories that
were active at the crash are run one by one; one that ends a process again is at fault and fails.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any

from rltrain.agents.chat import Message, TrajectoryStart, Turn, TurnLimits
from rltrain.agents.content import MOST_IMAGE_BYTES
from rltrain.agents.toolbox import ToolSources
from rltrain.runtime.slots.limits import Limits
from rltrain.runtime.slots.output import Printed
from rltrain.runtime.slots.process import START_TIMEOUT_S, ChildProcess
from rltrain.runtime.slots.service import MAX_RESULT_BYTES

_PING_S = 1.0
# Seconds that the process gets in addition to the time limit of a call.
_SILENT_S = 5.0
_MOST_STARTS = 4
# Maximum bytes of one message of a trajectory.
_MOST_LINE_BYTES = MAX_RESULT_BYTES + MOST_IMAGE_BYTES


@dataclass(eq=False)
class Trajectory:
    """A trajectory and its progress."""

    number: int
    start: TrajectoryStart
    turns: list[Turn | None] = field(default_factory=list)
    """Turns so far; None after the last turn."""
    messages: list[list[Message]] = field(default_factory=list)
    """The messages after each turn."""
    rewards: list[list[float]] = field(default_factory=list)
    """The rewards after each turn."""


class _Unusable(Exception):
    """No trajectory can be run; the text is the reason."""


@dataclass(frozen=True)
class TrajectoryMessage:
    """A message of a trajectory."""

    number: int
    line: dict[str, Any]
    """``request`` (messages for the policy), ``end`` (the trajectory's numbers) or ``failed`` (the reason).

    The first two include ``counts`` and ``rewards``.
    """


class Executor:
    """A process, and the thread that communicates with it. messages: gets `TrajectoryMessage`, or an error text."""

    def __init__(
        self,
        sources: ToolSources,
        turn_limits: TurnLimits,
        limits: Limits,
        messages: SimpleQueue[TrajectoryMessage | str],
    ) -> None:
        self._settings = pickle.dumps(limits) + pickle.dumps((sources, turn_limits))
        self._silent_s = turn_limits.timeout_s + _SILENT_S
        self._messages = messages
        self._orders: SimpleQueue[tuple[str, Trajectory] | None] = SimpleQueue()
        self._waking = Lock()
        self._wake_reader, wake = os.pipe()
        os.set_blocking(wake, False)
        self._wake: int | None = wake
        self._printed, self._printing = Printed(), Lock()
        self._started: set[int] = set()
        self._pending: dict[int, Trajectory] = {}
        # Trajectories to run alone, trajectories that wait until these have ended, and the trajectory that is running
        # alone.
        self._suspects: deque[Trajectory] = deque()
        self._later: deque[Trajectory] = deque()
        self._alone: Trajectory | None = None
        self._is_ready, self._failed_starts = False, 0
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def send_turn(self, trajectory: Trajectory) -> None:
        """Send the last turn of the trajectory."""
        self._order(("turn", trajectory))

    def close(self, trajectory: Trajectory) -> None:
        """Cancel the trajectory."""
        self._order(("close", trajectory))

    def end(self) -> None:
        """End the process, with all its trajectories, and the thread."""
        self._order(None)

    def join(self) -> None:
        """Wait for the thread's end."""
        self._thread.join()

    def _order(self, order: tuple[str, Trajectory] | None) -> None:
        self._orders.put(order)
        with self._waking:
            if self._wake is not None:
                with suppress(BlockingIOError):  # the pipe already contains enough wake-ups
                    os.write(self._wake, b".")

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._start()
            while self._execute_orders():
                self._poll()
        except _Unusable as error:
            self._messages.put(str(error))
        except BaseException as error:  # noqa: BLE001 - a thread that ended silently would be waited for without end
            self._messages.put(f"{type(error).__name__}: {error}")
        finally:
            self._process.close()
            with self._waking:  # because the number of the descriptor may soon be reused for another file
                wake, self._wake = self._wake, None
                for end in (self._wake_reader, wake):
                    if end is not None:
                        os.close(end)

    def _start(self) -> None:
        self._process = ChildProcess("rltrain.agents.executor_main", self._settings, self._printed)
        self._buffer = bytearray()
        self._started, self._pending, self._is_ready = set(), {}, False
        self._last_reply = self._last_ping = time.monotonic()
        self._stuck_s = 0.0

    def _execute_orders(self) -> bool:
        """Execute the queued commands. Return False at the command to end."""
        with suppress(Empty):
            while True:
                order = self._orders.get_nowait()
                if order is None:
                    return False
                name, trajectory = order
                if name == "close":
                    self._remove(trajectory)
                else:
                    self._later.append(trajectory)
        self._next_suspect()
        return True

    def _remove(self, trajectory: Trajectory) -> None:
        if trajectory.number in self._started:
            self._started.discard(trajectory.number)
            self._pending.pop(trajectory.number, None)
            self._send(("close", trajectory.number))
        for queue in (self._suspects, self._later):
            with suppress(ValueError):
                queue.remove(trajectory)
        if self._alone is trajectory:
            self._alone = None

    def _next_suspect(self) -> None:
        if not self._is_ready:  # the process does not read yet, so a request could fill the socket
            return
        while not self._alone and self._suspects and not self._pending:
            self._alone = self._suspects.popleft()
            self._send_turn(self._alone)
        while self._later and not self._suspects and not self._alone:
            self._send_turn(self._later.popleft())

    def _send_turn(self, trajectory: Trajectory) -> None:
        if not self._pending:
            # without a pending turn the process sends nothing, so silence is not counted
            self._last_reply = time.monotonic()
        self._pending[trajectory.number] = trajectory
        if trajectory.number in self._started:
            self._send(("turn", trajectory.number, trajectory.turns[-1]))
        else:
            self._started.add(trajectory.number)
            turns = [turn for turn in trajectory.turns if turn]
            self._send(("start", trajectory.number, trajectory.start, turns, trajectory.messages, trajectory.rewards))

    def _send(self, request: tuple[Any, ...]) -> None:
        # Ignore the error: the next read detects a dead process, and a process that received only part of a request
        # fails at the next one.
        with suppress(OSError):
            self._process.channel.settimeout(self._silent_s)
            self._process.channel.sendall(pickle.dumps(request))

    def _poll(self) -> None:
        """Read new messages, for at most a second; replace a process that died or is silent."""
        ready = wait([self._process.channel, self._printed.reader, self._wake_reader], _PING_S)
        with self._printing:
            self._printed.drain()  # a full pipe would block the process
        if self._wake_reader in ready:
            os.read(self._wake_reader, 1 << 16)
        now = time.monotonic()
        if self._process.channel in ready:
            received = self._received()
            if not received:
                self._replace_process("")
                return
            self._last_reply = now
            self._buffer += received
            *lines, self._buffer = self._buffer.split(b"\n")
            if len(self._buffer) > _MOST_LINE_BYTES or not all(map(self._handle_line, lines)):
                self._replace_process(" sent an invalid reply")
        elif now - self._last_reply > (self._silent_s if self._is_ready else START_TIMEOUT_S):
            if self._pending or not self._is_ready:
                self._replace_process(f" has sent nothing for {now - self._last_reply:.0f} s")
        # Cancelled calls keep running in threads that never end, and slow down all others.
        elif self._stuck_s > (self._silent_s if self._pending else 0):
            self._replace_process(" had calls that never ended")
        elif now - self._last_ping > _PING_S and self._is_ready:
            self._last_ping = now
            self._send(("ping",))

    def _received(self) -> bytes:
        try:
            return self._process.channel.recv(1 << 20)
        except OSError:
            return b""

    def _handle_line(self, text: bytearray) -> bool:
        """Handle a line from the process. Return False if it is invalid."""
        try:
            line = json.loads(text)
            if "pong" in line:
                self._stuck_s = float(line["pong"])
                return True
            if "unusable" in line:
                raise _Unusable(line["unusable"])
            if "ready" in line:
                self._is_ready, self._failed_starts = True, 0
                return True
            number, is_over = int(line["number"]), "request" not in line
        except (ValueError, TypeError, KeyError):
            return False
        trajectory = self._pending.pop(number, None)
        if is_over:
            self._started.discard(number)
        if trajectory:
            if self._alone is trajectory:
                self._alone = None
            self._messages.put(TrajectoryMessage(number, line))
        return True

    def _replace_process(self, how: str) -> None:
        """Replace the process; then rerun its active trajectories one by one. how: "" if it has died."""
        with self._printing:
            ended = how or self._process.end()[0]
            self._process.close()
        self._failed_starts += not self._is_ready
        if self._failed_starts > _MOST_STARTS:  # some deaths may be due to external signals
            raise _Unusable(f"tools, environments and agents cannot be started: the agent{ended}")
        lost = list(self._pending.values())
        self._start()
        if self._alone:
            self._messages.put(TrajectoryMessage(self._alone.number, {"failed": f"the agent{ended}"}))
            self._alone = None
        else:
            self._suspects.extend(lost)

    def take_printed(self) -> str:
        """Return and clear the printed output."""
        with self._printing:
            return self._printed.take()

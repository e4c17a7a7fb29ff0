"""A host: one process in which many trajectories are answered at the same time, and what becomes of them when it dies.

A tool may hold the interpreter's lock, end its process or take all of its memory, and then the trajectories beside it
must go on as if nothing had happened. So the process is replaced, and each trajectory begins again in the new one,
with the turns that it had (`Chat`). Those that were at work when it died come one by one: the one that ends a second
process, alone, is at fault and is given up.
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

from rltrain.agents.chat import Message, Start, Terms, Turn
from rltrain.agents.content import MOST_IMAGE_BYTES
from rltrain.agents.toolbox import Places
from rltrain.slots.limits import Limits
from rltrain.slots.output import Printed
from rltrain.slots.process import START_TIMEOUT_S, ChildProcess
from rltrain.slots.service import MAX_RESULT_BYTES

_PING_S = 1.0
# Beyond the limit of a call: for what the process does itself.
_SILENT_S = 5.0
_MOST_STARTS = 4
# Of what a trajectory says at once.
_MOST_LINE_BYTES = MAX_RESULT_BYTES + MOST_IMAGE_BYTES


@dataclass(eq=False)
class Held:
    """A trajectory, as far as it is."""

    number: int
    start: Start
    turns: list[Turn | None] = field(default_factory=list)
    """None behind the last: there is no room for another."""
    said: list[list[Message]] = field(default_factory=list)
    """The messages behind each turn that was answered."""
    paid: list[list[float]] = field(default_factory=list)
    """Rewards, likewise."""


class _Unusable(Exception):
    """No trajectory can be answered; the text says why."""


@dataclass(frozen=True)
class News:
    """What a trajectory has to say."""

    number: int
    line: dict[str, Any]
    """``ask`` (messages; the policy is to answer), ``end`` (its own numbers) or ``failed`` (why); with the first two
    ``counts`` and ``rewards``."""


class Host:
    """A process, and the thread that speaks with it. news: gets `News`, or the text of why nothing can be answered."""

    def __init__(self, places: Places, terms: Terms, limits: Limits, news: SimpleQueue[News | str]) -> None:
        self._opening = pickle.dumps(limits) + pickle.dumps((places, terms))
        self._silent_s = terms.timeout_s + _SILENT_S
        self._news = news
        self._orders: SimpleQueue[tuple[str, Held] | None] = SimpleQueue()
        self._waking = Lock()
        self._heard, wake = os.pipe()
        os.set_blocking(wake, False)
        self._wake: int | None = wake
        self._printed, self._printing = Printed(), Lock()
        self._there: set[int] = set()
        self._asked: dict[int, Held] = {}
        # Trajectories to be answered alone, those that wait until that is done, and the one that it is done with.
        self._suspects: deque[Held] = deque()
        self._later: deque[Held] = deque()
        self._alone: Held | None = None
        self._is_ready, self._failed_starts = False, 0
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def ask(self, held: Held) -> None:
        """Its last turn is to be answered."""
        self._order(("ask", held))

    def close(self, held: Held) -> None:
        """Nobody waits for the trajectory any more."""
        self._order(("close", held))

    def end(self) -> None:
        """End the process, with all that is in it, and the thread."""
        self._order(None)

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join()

    def _order(self, order: tuple[str, Held] | None) -> None:
        self._orders.put(order)
        with self._waking:
            if self._wake is not None:
                with suppress(BlockingIOError):  # it has been woken often enough
                    os.write(self._wake, b".")

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._start()
            while self._obey():
                self._look()
        except _Unusable as error:
            self._news.put(str(error))
        except BaseException as error:  # noqa: BLE001 - a thread that ended in silence would be waited for without end
            self._news.put(f"{type(error).__name__}: {error}")
        finally:
            self._process.close()
            with self._waking:  # the number may be that of another file soon
                wake, self._wake = self._wake, None
                for end in (self._heard, wake):
                    if end is not None:
                        os.close(end)

    def _start(self) -> None:
        self._process = ChildProcess("rltrain.agents.child", self._opening, self._printed)
        self._buffer = bytearray()
        self._there, self._asked, self._is_ready = set(), {}, False
        self._last_heard = self._last_ping = time.monotonic()
        self._stuck_s = 0.0

    def _obey(self) -> bool:
        """Carry out what was ordered; whether to go on."""
        with suppress(Empty):
            while True:
                order = self._orders.get_nowait()
                if order is None:
                    return False
                name, held = order
                if name == "close":
                    self._forget(held)
                else:
                    self._later.append(held)
        self._next_suspect()
        return True

    def _forget(self, held: Held) -> None:
        if held.number in self._there:
            self._there.discard(held.number)
            self._asked.pop(held.number, None)
            self._send(("close", held.number))
        for line in (self._suspects, self._later):
            with suppress(ValueError):
                line.remove(held)
        if self._alone is held:
            self._alone = None

    def _next_suspect(self) -> None:
        if not self._is_ready:  # nobody reads yet, and what is sent has to wait somewhere
            return
        while not self._alone and self._suspects and not self._asked:
            self._alone = self._suspects.popleft()
            self._send_turn(self._alone)
        while self._later and not self._suspects and not self._alone:
            self._send_turn(self._later.popleft())

    def _send_turn(self, held: Held) -> None:
        if not self._asked:
            self._last_heard = time.monotonic()  # who is not asked is silent
        self._asked[held.number] = held
        if held.number in self._there:
            self._send(("turn", held.number, held.turns[-1]))
        else:
            self._there.add(held.number)
            turns = [turn for turn in held.turns if turn]
            self._send(("begin", held.number, held.start, turns, held.said, held.paid))

    def _send(self, request: tuple[Any, ...]) -> None:
        # One that has died is seen where it is read from; one that has got half a request ends with what follows.
        with suppress(OSError):
            self._process.channel.settimeout(self._silent_s)
            self._process.channel.sendall(pickle.dumps(request))

    def _look(self) -> None:
        """Read what has come, within a second; replace a process that has died or says nothing."""
        ready = wait([self._process.channel, self._printed.reader, self._heard], _PING_S)
        with self._printing:
            self._printed.drain()  # a full pipe would block the process
        if self._heard in ready:
            os.read(self._heard, 1 << 16)
        now = time.monotonic()
        if self._process.channel in ready:
            received = self._received()
            if not received:
                self._bury("")
                return
            self._last_heard = now
            self._buffer += received
            *lines, self._buffer = self._buffer.split(b"\n")
            if len(self._buffer) > _MOST_LINE_BYTES or not all(map(self._take, lines)):
                self._bury(" said what is no reply")
        elif now - self._last_heard > (self._silent_s if self._is_ready else START_TIMEOUT_S):
            if self._asked or not self._is_ready:
                self._bury(f" has said nothing for {now - self._last_heard:.0f} s")
        elif self._is_spoilt():
            self._bury(" had calls that never ended")
        elif now - self._last_ping > _PING_S and self._is_ready:
            self._last_ping = now
            self._send(("ping",))

    def _received(self) -> bytes:
        try:
            return self._process.channel.recv(1 << 20)
        except OSError:
            return b""

    def _is_spoilt(self) -> bool:
        """Whether calls that were given up run on: threads that compute without end take the time of all others."""
        return self._stuck_s > (self._silent_s if self._asked else 0)

    def _take(self, text: bytearray) -> bool:
        """A line that has come; whether it is one."""
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
            number, is_over = int(line["number"]), "ask" not in line
        except (ValueError, TypeError, KeyError):
            return False
        held = self._asked.pop(number, None)
        if is_over:
            self._there.discard(number)
        if held:
            if self._alone is held:
                self._alone = None
            self._news.put(News(number, line))
        return True

    def _bury(self, how: str) -> None:
        """Begin anew with another process, one by one with those that were at work. how: "" where it has died."""
        with self._printing:
            ended = how or self._process.end()[0]
            self._process.close()
        self._failed_starts += not self._is_ready
        if self._failed_starts > _MOST_STARTS:  # some may be somebody else's signals
            raise _Unusable(f"tools, environments and agents cannot be started: the agent{ended}")
        lost = list(self._asked.values())
        self._start()
        if self._alone:
            self._news.put(News(self._alone.number, {"failed": f"the agent{ended}"}))
            self._alone = None
        else:
            self._suspects.extend(lost)

    def printed(self) -> str:
        """What was printed since the last call."""
        with self._printing:
            return self._printed.take()

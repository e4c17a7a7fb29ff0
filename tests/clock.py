"""Time in tests. A house rule forbids tests to read the machine's clock or to sleep for a fixed time; only this file
does both.
"""

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rltrain.common.clock import Clock

T = TypeVar("T")
# Timeout for events that must occur, on a machine with ten other programs. Only a failing test waits that long.
PATIENCE_S = 180.0


class VirtualClock(Clock):
    """asked: the seconds of all sleeps and waits so far, in order."""

    def __init__(self, now: float = 1000.0, manual: bool = False) -> None:
        self._now, self._manual = now, manual
        self._moved = threading.Condition()
        self._ends: list[tuple[float, asyncio.AbstractEventLoop, asyncio.Event]] = []
        self.asked: list[float] = []

    def monotonic(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Advance the time, and wake the waiting threads."""
        with self._moved:
            self._now += seconds
            self._moved.notify_all()
            for end, loop, over in self._ends:
                if end <= self._now:
                    loop.call_soon_threadsafe(over.set)

    def sleep(self, seconds: float) -> None:
        self.wait(threading.Event(), seconds)

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        if seconds is None:
            return event.wait(PATIENCE_S)
        self.asked.append(seconds)
        if event.is_set():
            return True
        if not self._manual:
            self.advance(seconds)
            return event.is_set()
        end = self._now + seconds
        with self._moved:
            while not event.is_set() and self._now < end:
                self._moved.wait(0.01)  # an event does not wake a condition
        return event.is_set()

    async def pause(self, seconds: float) -> None:
        self.asked.append(seconds)
        end = self._now + seconds
        if not self._manual:
            self.advance(seconds)
        await self._until(end)
        for _ in range(10):  # deadlines that have passed come first
            await asyncio.sleep(0)

    async def within(self, awaitable: Awaitable[T], seconds: float | None) -> T:
        task = asyncio.ensure_future(awaitable)
        passing = asyncio.ensure_future(self._until(self._now + (math.inf if seconds is None else seconds)))
        try:
            await asyncio.wait({task, passing}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise asyncio.TimeoutError
            return task.result()
        finally:
            passing.cancel()
            task.cancel()
            await asyncio.wait({task})

    async def _until(self, end: float) -> None:
        mine = (end, asyncio.get_running_loop(), asyncio.Event())
        with self._moved:
            self._ends.append(mine)
        try:
            if self._now < end:
                await mine[2].wait()
        finally:
            with self._moved:
                self._ends.remove(mine)


def eventually(condition: Callable[[], T], what: str = "", limit_s: float = PATIENCE_S) -> T:
    """Poll until condition() is true, and return its value. Raises AssertionError with ``what`` after the limit."""
    if not (value := Clock().poll(condition, limit_s, 0.02)):
        raise AssertionError(f"{what or condition}: not within {limit_s:.0f} s")
    return value


def hang() -> None:
    """Wait until this process is killed, like a program that never replies. It ends only long after a test
    has failed."""
    time.sleep(10 * PATIENCE_S)

"""Time for code that waits, measures or retries. Such code takes a `Clock`, so that tests can control the time."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


class Clock:
    """System clock. All times are in seconds."""

    def monotonic(self) -> float:
        """Return seconds since a fixed moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        """Wait until the event is set, for at most ``seconds`` (None: no limit). Returns whether it is set."""
        return event.wait(seconds)

    def poll(self, condition: Callable[[], T], within_s: float, every_s: float = 0.1) -> T:
        """Call condition() until it returns a true value. Returns that value, or after within_s the last false
        value."""
        end = self.monotonic() + within_s
        while not (value := condition()) and self.monotonic() < end:
            self.sleep(every_s)
        return value

    async def pause(self, seconds: float) -> None:
        """Sleep in a coroutine."""
        await asyncio.sleep(seconds)

    async def within(self, awaitable: Awaitable[T], seconds: float | None) -> T:
        """Return the result of an awaitable. Cancels it and raises asyncio.TimeoutError after ``seconds``."""
        return await asyncio.wait_for(awaitable, seconds)


SYSTEM = Clock()


@dataclass(frozen=True)
class Backoff:
    """Exponential backoff: the pause doubles with every failure in a row, up to ``longest_s``."""

    first_s: float
    longest_s: float
    jitter: float = 0.0
    """Share by which a pause varies at random, so that requests that failed together are not retried together."""

    def pause_s(self, failures: int) -> float:
        """Return the seconds to wait after this number of failures in a row."""
        pause_s = min(self.first_s * 2.0 ** min(max(failures - 1, 0), 60), self.longest_s)
        return pause_s * random.uniform(1 - self.jitter, 1 + self.jitter)

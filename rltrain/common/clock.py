"""Time for code that waits or measures. Such code takes a `Clock`, so that tests can control the time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
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
        """Call condition() until it returns a true value, and return it, or after within_s the last false value."""
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

"""Time, for code that waits or measures: it takes a `Clock`, so that tests can pass one that they move themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Clock:
    """The machine's clock. Seconds everywhere."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def wait(self, event: threading.Event, seconds: float | None) -> bool:
        """Wait until the event is set, at most so long (None: without limit). Returns whether it is set."""
        return event.wait(seconds)

    def poll(self, condition: Callable[[], T], within_s: float, every_s: float = 0.1) -> T:
        """Call condition() until it returns something true, and return that; after within_s, the last false value."""
        end = self.monotonic() + within_s
        while not (value := condition()) and self.monotonic() < end:
            self.sleep(every_s)
        return value


SYSTEM = Clock()

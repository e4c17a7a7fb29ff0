"""Jobs that storage may hold up, in a thread of their own while the rest goes on.

A call of storage that does not answer cannot be cut short, by no signal and no time-out: whoever makes it waits, and so
may the end of the process. Choice: such work is a background job of a thread that nobody has to wait for, and the
driver's watch (`controller.lifeline`) asks here for how long each has come no further.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from rltrain.base.clock import SYSTEM, Clock

T = TypeVar("T")
# How long whoever adds a line waits for storage that has answered so far.
PATIENCE_S = 1.0
_running: set[BackgroundJob[Any]] = set()


class WorkerThread(threading.Thread):
    """A thread that does one job after the other until `end`: it is there when the process has no memory for another,
    where `Thread.start` would wait for ever."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.submit = self._jobs.put
        self.start()

    def run(self) -> None:
        while job := self._jobs.get():
            job()
            del job  # whoever gave it may go

    def end(self) -> None:
        """Once it has done what it was given."""
        self.submit(None)


class BackgroundJob(Generic[T]):
    """Does ``work`` once, from now on, by a thread of its own or by ``thread``. The process may end before it has."""

    def __init__(
        self, name: str, work: Callable[[], T], thread: WorkerThread | None = None, clock: Clock = SYSTEM
    ) -> None:
        self.name, self._work, self.clock = name, work, clock
        self.ident: int | None = None  # of the thread, once it works
        self._found: list[T] = []
        self._error: BaseException | None = None
        # Not `join`: where a signal raises in it, Python 3.11 takes a thread that runs for one that has ended.
        self._over = threading.Event()
        self.beat = clock.monotonic()
        _running.add(self)
        if thread:
            thread.submit(self._do)
        else:
            threading.Thread(target=self._do, name=name, daemon=True).start()

    def _do(self) -> None:
        self.ident = threading.get_ident()
        try:
            self._found.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self._error = error
        finally:
            _running.discard(self)
            self._over.set()

    def ready(self, wait_s: float = 0.0) -> bool:
        """Whether it is done, or is within that time. A signal cuts the wait short."""
        return self.clock.wait(self._over, wait_s)

    def result(self) -> T:
        """Wait for it. Returns what the work returned, raises what it raised."""
        self._over.wait()
        if self._error:
            raise self._error
        return self._found[0]


def heartbeat() -> None:
    """The job that calls this has come further, however long it may still take."""
    for job in running():
        if job.ident == threading.get_ident():
            job.beat = job.clock.monotonic()


def running() -> list[BackgroundJob[Any]]:
    """The jobs that are not done yet."""
    return list(_running)


class Appender:
    """A file that lines are added to, on storage that may be full or may not answer.

    Whoever adds one waits for a second at most, and not at all while an earlier one is still being written. What could
    not be written is kept, and goes with a later line.
    """

    def __init__(self, file: Path, clock: Clock = SYSTEM) -> None:
        self._file, self._clock = file, clock
        self._late: deque[bytes] = deque()  # the first may begin within a line
        self._writing: BackgroundJob[OSError | None] | None = None
        self._thread: WorkerThread | None = None

    @property
    def num_late(self) -> int:
        """Lines that are not written yet."""
        return sum(chunk.count(b"\n") for chunk in list(self._late))

    def add(self, text: str) -> OSError | None:
        """Add ``text``. Returns why not all that was added so far is written."""
        self._late.append(text.encode(errors="backslashreplace"))
        return self._push(PATIENCE_S)

    def close(self, wait_s: float) -> OSError | None:
        """Write what is not written yet, as far as that can be within the time. Returns as `add`."""
        if self._writing:
            self._writing.ready(wait_s)
        error = self._push(wait_s) if self._late else None
        if self._thread:
            self._thread.end()
            self._thread = None
        return error

    def _push(self, wait_s: float) -> OSError | None:
        unanswered = TimeoutError(None, "the storage does not answer")
        if self._writing and not self._writing.ready():
            return unanswered
        name = f"writing {self._file.name}"
        self._thread = self._thread or WorkerThread(name)
        self._writing = BackgroundJob(name, self._write, self._thread, self._clock)
        return self._writing.result() if self._writing.ready(wait_s) else unanswered

    def _write(self) -> OSError | None:
        try:
            # Unbuffered, so that it is known how much has arrived; opened anew, as a handle may be lost with a server.
            with open(self._file, "ab", buffering=0) as file:
                while self._late:
                    self._late[0] = self._late[0][file.write(self._late[0]) :]
                    if not self._late[0]:
                        self._late.popleft()
        except OSError as error:
            return error
        return None

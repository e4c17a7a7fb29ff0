"""Background threads for jobs that storage may block.

A storage call that does not return cannot be interrupted by a signal or timeout. It blocks its caller, and possibly the
exit of the process. Therefore such work runs in daemon threads, for which callers need not wait. The driver's watchdog
(`runtime.ray_watchdog`) reads here for how long each job has made no progress.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from rltrain.common.clock import SYSTEM, Clock

T = TypeVar("T")
# Maximum seconds that `add` waits for a write. If an earlier write is still blocked, `add` does not wait.
PATIENCE_S = 1.0
_running: set[BackgroundJob[Any]] = set()


class WorkerThread(threading.Thread):
    """Thread that runs jobs in sequence until `end`.

    It is started early, because `Thread.start` would wait forever if the process has no memory for another thread.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.submit = self._jobs.put
        self.start()

    def run(self) -> None:
        while job := self._jobs.get():
            job()
            del job  # drops references of the job

    def end(self) -> None:
        """End the thread after its queued jobs."""
        self.submit(None)


class BackgroundJob(Generic[T]):
    """One call of ``work``, in a new thread or in ``thread``. It does not keep the process alive."""

    def __init__(
        self, name: str, work: Callable[[], T], thread: WorkerThread | None = None, clock: Clock = SYSTEM
    ) -> None:
        self.name, self._work, self.clock = name, work, clock
        self.ident: int | None = None  # of the thread, once it has started
        self._found: list[T] = []
        self._error: BaseException | None = None
        # An event instead of `join`, because if a signal handler raises during `join`, Python 3.11 treats the running
        # thread as finished.
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
        """Return whether it is done, or finishes within ``wait_s``. A signal ends the wait early."""
        return self.clock.wait(self._over, wait_s)

    def result(self) -> T:
        """Wait for the work. Returns its result or raises its exception."""
        self._over.wait()
        if self._error:
            raise self._error
        return self._found[0]


def heartbeat() -> None:
    """Record progress of the calling job."""
    for job in running():
        if job.ident == threading.get_ident():
            job.beat = job.clock.monotonic()


def running() -> list[BackgroundJob[Any]]:
    """Return the unfinished jobs."""
    return list(_running)


class Appender:
    """File for appended lines, on storage that may be full or unresponsive.

    A caller waits for at most a second, and not at all while an earlier line is still being written. Unwritten lines
    are kept and written with a later line.
    """

    def __init__(self, file: Path, clock: Clock = SYSTEM) -> None:
        self._file, self._clock = file, clock
        self._late: deque[bytes] = deque()  # the first chunk may start inside a line
        self._writing: BackgroundJob[OSError | None] | None = None
        self._thread: WorkerThread | None = None

    @property
    def num_late(self) -> int:
        """Number of unwritten lines."""
        return sum(chunk.count(b"\n") for chunk in list(self._late))

    def add(self, text: str) -> OSError | None:
        """Add ``text``. Returns the reason why not all added text is written, or None."""
        self._late.append(text.encode(errors="backslashreplace"))
        return self._push(PATIENCE_S)

    def close(self, wait_s: float) -> OSError | None:
        """Write the remaining lines, for at most ``wait_s`` seconds. Returns like `add`."""
        if self._writing:
            self._writing.ready(wait_s)
        error = self._push(wait_s) if self._late else None
        if self._thread:
            self._thread.end()
            self._thread = None
        return error

    def _push(self, wait_s: float) -> OSError | None:
        unanswered = TimeoutError(None, "the storage does not respond")
        if self._writing and not self._writing.ready():
            return unanswered
        name = f"writing {self._file.name}"
        self._thread = self._thread or WorkerThread(name)
        self._writing = BackgroundJob(name, self._write, self._thread, self._clock)
        return self._writing.result() if self._writing.ready(wait_s) else unanswered

    def _write(self) -> OSError | None:
        try:
            # The file is unbuffered, so that the written length is known. It is reopened for every write, because
            # handles are lost if a file server restarts.
            with open(self._file, "ab", buffering=0) as file:
                while self._late:
                    self._late[0] = self._late[0][file.write(self._late[0]) :]
                    if not self._late[0]:
                        self._late.popleft()
        except OSError as error:
            return error
        return None

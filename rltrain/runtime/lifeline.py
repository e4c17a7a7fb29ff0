"""Watchdog of this node's Ray and of the driver, and the end of a run that lost either.

Problem: a driver is not notified when its raylet or GCS dies. Calls block until Ray ends the process below Python, with
exit code 1 and without any handler. Choice: a thread holds a connection to each of the two, which the kernel closes
when the peer dies. Waits of the driver check it (`raise_if_lost`), Ray is not called any more (`unless_lost`), and if
the main thread is stuck below Python, the thread ends the process. The same thread ends a driver that hangs in storage
or in user code. Ray's library may still end the process, so an error is reported before any part of Ray is shut down,
and another process repeats it after our end (`ended_after_us`). Left out: Ray on other nodes, whose loss Ray reports;
the Ray of a client driver (ray://); and a driver that hangs while it holds the GIL.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import select
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from rltrain.common.attempt import tell_supervisor
from rltrain.common.background import BackgroundJob, running
from rltrain.common.errors import AGAIN, Interrupted, RltrainError, WorkerError, WorkerLost
from rltrain.runtime import sweep as sweep_module
from rltrain.runtime.hang import Deadlines
from rltrain.runtime.stacks import stacks_here
from rltrain.runtime.sweep import ORDERLY, SILENT, forget, message, sweep

_POLL_S = 1.0
_CONNECT_S = 5.0
# Time for the main thread to notice, and to close trackers. Ray has a timeout of a minute for the GCS.
_UNWIND_S = 15.0
# Time to write the stacks of a driver that hangs.
_WRITE_S = 15.0
# CPU seconds and bytes read per poll above which a driver is busy and not waiting for storage.
BUSY_S, _BUSY_BYTES = 0.1 * _POLL_S, 1 << 16
# Timeout of ray.shutdown.
_GOODBYE_S = 30.0
log = logging.getLogger(__name__)


class _Line:
    """Idle connection to a process of Ray."""

    def __init__(self, name: str, family: int, address: Any) -> None:
        self.name, self._family, self._address = name, family, address
        self.socket = self._connect()

    def _connect(self) -> socket.socket:
        connection = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            connection.settimeout(_CONNECT_S)
            connection.connect(self._address)
        except OSError:
            connection.close()
            raise
        connection.setblocking(False)
        if self._family != socket.AF_UNIX:  # a host that lost power closes nothing
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        return connection

    def broken(self) -> bool:
        """Return True if the peer is dead. It may also have closed an idle connection."""
        try:
            while self.socket.recv(4096):
                pass
        except BlockingIOError:
            return False
        except OSError:
            pass
        self.socket.close()
        try:
            self.socket = self._connect()
        except OSError:
            return True
        return False


class Watch(threading.Thread):
    """Watchdog thread.

    lines: connections to watch. session: folder of a Ray that ends with this process, else "". deadlines: for the
    driver's work; see `working`. reads, kept: see `watching`.
    """

    def __init__(
        self,
        lines: list[_Line],
        session: str,
        logs: str,
        deadlines: Deadlines,
        reads: bool,
        kept: Callable[[], str] = str,
    ) -> None:
        super().__init__(name="lifeline", daemon=True)
        self._reads, self._kept, self._done = reads, kept, (0.0, 0)
        self._lines, self.session, self._logs, self._deadlines = lines, session, logs, deadlines
        self._driver = threading.current_thread()
        self.beat = math.inf
        self.over = threading.Event()
        self.noticed = threading.Event()
        self.message = ""

    def run(self) -> None:
        try:
            self._look()
        finally:
            for line in self._lines:
                line.socket.close()

    def _look(self) -> None:
        while not self.over.is_set():
            poll = select.poll()
            for line in self._lines:
                poll.register(line.socket, select.POLLIN)
            if poll.poll(1000 * _POLL_S) and (lost := next((line.name for line in self._lines if line.broken()), "")):
                if not self.over.is_set():
                    self._ray_ended(lost)
                return
            if self._reads and self.is_busy() and self.beat < math.inf:
                self.beat = time.monotonic()
            # Background jobs first: the driver may wait for one.
            beats: list[tuple[float, threading.Thread | BackgroundJob[Any]]] = [(job.beat, job) for job in running()]
            for beat, thread in [*beats, (self.beat, self._driver)] if self.beat < math.inf else ():
                if (silent_s := time.monotonic() - beat) > self._deadlines.limit_s("driver"):
                    self._driver_hangs(silent_s, thread)

    def is_busy(self) -> bool:
        """Return True if this process has computed or read since the last poll."""
        read = 0
        with contextlib.suppress(OSError, ValueError):  # not on macOS
            read = int(Path("/proc/self/io").read_text("utf-8").split()[1])  # "rchar: 123 …"
        before, self._done = self._done, (time.process_time() - time.thread_time(), read)
        return self._done[0] - before[0] > BUSY_S or self._done[1] - before[1] > _BUSY_BYTES

    def _ray_ended(self, name: str) -> None:
        self.message = (
            f"Ray's {name} has ended on this node ({socket.gethostname()}): it was killed, or memory ran out. {AGAIN} "
            f"Ray's logs: {self._logs}."
        )
        self.noticed.set()
        if not self.over.wait(_UNWIND_S):
            self._exit(self.message)

    def _driver_hangs(self, silent_s: float, thread: threading.Thread | BackgroundJob[Any]) -> None:
        frames = traceback.extract_stack(sys._current_frames().get(thread.ident or 0))
        at = next((frame for frame in reversed(frames) if "rltrain" in frame.filename), frames[-1])
        places = [f"{frame.name} ({frame.filename}:{frame.lineno})" for frame in (frames[-1], at)]
        where = " in ".join(dict.fromkeys(places))
        sentences: list[str] = []

        def write() -> None:
            stacks = {f"driver (pid {os.getpid()})": stacks_here()}
            sentences.append(self._deadlines.write_stacks("driver", driver=stacks))

        BackgroundJob("stacks", write).ready(_WRITE_S)
        subject = "it" if thread is self._driver else f"its thread '{thread.name}'"
        self._exit(
            f"the driver (pid {os.getpid()} on {socket.gethostname()}) hangs: for {silent_s:.0f} s {subject} has done "
            f"nothing else than {where}: storage that does not answer, or code of your own ({self._deadlines.keys})."
            f"{''.join(sentences)} {AGAIN}"
        )

    def _exit(self, message: str) -> None:
        message = f"{message}\n{self._kept()}".strip()
        tell_supervisor(error=message, ends=WorkerLost.exit_code)
        # Neither logging nor print: the main thread may hold their locks.
        os.write(2, f"error: {message}\n".encode())
        _tell_after_us(ORDERLY)
        if self.session:
            sweep(self.session)
        os._exit(WorkerLost.exit_code)


_watch: Watch | None = None
# Process that ends after this one.
_last: subprocess.Popen[bytes] | None = None
_hanging = False


@contextlib.contextmanager
def watching(deadlines: Deadlines, local: bool, reads: bool = False, kept: Callable[[], str] = str) -> Iterator[None]:
    """Watch this node's raylet and the GCS inside the context; raise WorkerLost at its end at the latest if one died.

    deadlines: of the driver, see `working`. local: this process has started Ray for itself only. reads: the driver
    loads and prepares data, which may take long: it does not count as hung while it is busy. kept: last line of the
    error message (`Stop.kept`).
    """
    global _watch
    if _watch:  # an outer caller already watches
        yield
        return
    node: Any = ray._private.worker._global_node
    lines, logs = (list(_lines(node)), node.get_logs_dir_path()) if node else ([], "")
    watch = _watch = Watch(lines, node.get_session_dir_path() if local else "", logs, deadlines, reads, kept)
    watch.start()
    try:
        yield
    except Exception as error:
        # Ray's exceptions for it do not name the cause.
        if (isinstance(error, RltrainError) and not isinstance(error, WorkerError)) or not lost(_POLL_S):
            raise
        raise WorkerLost(f"{watch.message}\n{kept()}".strip()) from error
    finally:
        watch.over.set()
        if not watch.message:
            _watch = None
        elif local:
            sweep(watch.session)


def _lines(node: Any) -> Iterator[_Line]:
    """Yield connections to this node's raylet and to the GCS, if they accept connections."""
    host, _, port = node.gcs_address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError):
        yield _Line("raylet", socket.AF_UNIX, node.raylet_socket_name)
    with contextlib.suppress(OSError, ValueError):
        yield _Line("GCS (gcs_server)", family, (host.strip("[]"), int(port)))


@contextlib.contextmanager
def working() -> Iterator[None]:
    """Require regular calls of `raise_if_lost` inside the context; without them the driver hangs, and the process ends.

    Errors are reported here already, because Ray may end the process during cleanup.
    """
    if not (watch := _watch):
        yield
        return
    watch.beat = time.monotonic()
    _tell_after_us(SILENT)  # the caller may continue after an error
    try:
        yield
    except Exception as error:
        if not isinstance(error, Interrupted):
            text = str(error) if isinstance(error, RltrainError) else f"{type(error).__name__}: {error}"
            code, passing = getattr(error, "exit_code", 1), getattr(error, "passing", False)
            tell_supervisor(error=text, passing=passing, ends=code)
            _tell_after_us(message(f"error: {text}\n"))
        raise
    finally:
        watch.beat = math.inf


@contextlib.contextmanager
def ended_after_us(local: bool) -> Iterator[None]:
    """Start a process that reports the error if this process ends inside the context, and cleans up its Ray. local:
    this process has started Ray."""
    global _last
    node: Any = ray._private.worker._global_node
    session = node.get_session_dir_path() if local else ""
    command = [sys.executable, "-IS", sweep_module.__file__, session]
    _last = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    _tell_after_us(SILENT)
    try:
        yield
    finally:
        _tell_after_us(SILENT if _hanging else ORDERLY)
        if not _hanging:
            _last.communicate()
            _last = None
            if local:
                forget(session)


def _tell_after_us(words: bytes) -> None:
    if _last and _last.stdin:
        with contextlib.suppress(OSError):  # it was killed
            os.write(_last.stdin.fileno(), words)


def stop_ray() -> None:
    """Leave the cluster; a local one ends.

    If Ray does not respond, for example a stopped raylet, it is left alone: a local one ends with this process. Ending
    it earlier would end this process too, in Ray's library, with exit code 1.
    """
    global _hanging
    leaving = threading.Thread(target=unless_lost(ray.shutdown), daemon=True)
    leaving.start()
    leaving.join(_GOODBYE_S)
    _hanging = leaving.is_alive()
    if _hanging:
        log.warning("Ray has not let this process go in %d s", _GOODBYE_S)
        atexit.unregister(ray.shutdown)  # it would wait for this call


def hanging() -> bool:
    """Return True if ray.shutdown timed out."""
    return _hanging


def lost(wait_s: float = 0.0) -> str:
    """Return an error message if Ray on this node is lost, or will be within ``wait_s``; else ""."""
    if _watch and wait_s:
        _watch.noticed.wait(wait_s)
    return _watch.message if _watch else ""


def raise_if_lost() -> None:
    """Raise WorkerLost if Ray on this node is lost. The driver calls it during waits, which also shows it is alive."""
    if _watch and _watch.beat < math.inf:
        _watch.beat = time.monotonic()
    if message := lost():
        raise WorkerLost(message)


def unless_lost(function: Callable[..., Any]) -> Callable[..., None]:
    """Wrap ``function``, which calls Ray to end something: do nothing once Ray is lost.

    Errors of Ray are logged as warnings only, because the reason for the end has been reported already.
    """

    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            if not lost():
                function(*args, **kwargs)
        except RayError as error:
            log.warning("Ray does not help to end the run: %s", error)

    return guarded

"""Watchdog of this node's Ray and of the driver, which ends a run that loses either.

Problem: a driver is not notified when its raylet or GCS dies. Calls block until Ray ends the process below Python, with
exit code 1 and without any handler. Choice: a thread holds a connection to each of the two, which the kernel closes
when the peer dies. The driver checks for a loss while it waits (`raise_if_lost`) and then no longer calls Ray
(`unless_lost`). If the main thread is stuck in native code, the watchdog's thread ends the process. The same thread
ends a driver that hangs in storage or in user code. Ray's library may still end the process, so an error is reported
before any part of Ray is shut down, and another process repeats the report after this process has ended
(`cleanup_after_exit`). It does not watch Ray on other nodes, whose loss Ray reports, or the Ray of a client driver
(ray://). It does not detect a driver that hangs while it holds the GIL.
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

from rltrain.common.attempt import report_to_supervisor
from rltrain.common.background import BackgroundJob, running
from rltrain.common.errors import AGAIN, Interrupted, RltrainError, WorkerError, WorkerLost
from rltrain.runtime import cleanup
from rltrain.runtime.cleanup import ORDERLY, SILENT, exit_message, kill_session_processes, remove_shared_memory
from rltrain.runtime.hang import Deadlines
from rltrain.runtime.slots.process import start
from rltrain.runtime.stacks import stacks_here

_POLL_S = 1.0
_CONNECT_S = 5.0
# Time for the main thread to notice, and to close trackers. Ray has a timeout of a minute for the GCS.
_UNWIND_S = 15.0
# Time to write the stacks of a driver that hangs.
_WRITE_S = 15.0
# CPU seconds and bytes read per poll above which a driver counts as busy, not as waiting for storage.
BUSY_S, _BUSY_BYTES = 0.1 * _POLL_S, 1 << 16
# Timeout of ray.shutdown.
_SHUTDOWN_S = 30.0
log = logging.getLogger(__name__)


class _Connection:
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
        if self._family != socket.AF_UNIX:  # keepalive, because a host without power does not close connections
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        return connection

    def broken(self) -> bool:
        """Return True if the connection is broken: the peer is dead, or has closed an idle connection."""
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


class RayWatchdog(threading.Thread):
    """Watchdog thread.

    connections: connections to raylet and GCS. session: folder of a Ray that ends with this process, else "".
    deadlines: for the driver's work; see `require_heartbeat`. reads, kept: see `watch_ray`.
    """

    def __init__(
        self,
        connections: list[_Connection],
        session: str,
        logs: str,
        deadlines: Deadlines,
        reads: bool,
        kept: Callable[[], str] = str,
    ) -> None:
        super().__init__(name="ray_watchdog", daemon=True)
        self._reads, self._kept, self._done = reads, kept, (0.0, 0)
        self._connections, self.session, self._logs, self._deadlines = connections, session, logs, deadlines
        self._driver = threading.current_thread()
        self.beat = math.inf
        self.over = threading.Event()
        self.noticed = threading.Event()
        self.message = ""

    def run(self) -> None:
        try:
            self._watch_connections()
        finally:
            for connection in self._connections:
                connection.socket.close()

    def _watch_connections(self) -> None:
        while not self.over.is_set():
            poll = select.poll()
            for connection in self._connections:
                poll.register(connection.socket, select.POLLIN)
            has_event = poll.poll(1000 * _POLL_S)
            if has_event and (lost := next((peer.name for peer in self._connections if peer.broken()), "")):
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
            f"the driver (pid {os.getpid()} on {socket.gethostname()}) hangs: for {silent_s:.0f} s {subject} has been "
            f"in {where}: storage that does not respond, or your own code "
            f"({self._deadlines.keys}).{''.join(sentences)} {AGAIN}"
        )

    def _exit(self, message: str) -> None:
        message = f"{message}\n{self._kept()}".strip()
        report_to_supervisor(error=message, ends=WorkerLost.exit_code)
        # Neither logging nor print: the main thread may hold their locks.
        os.write(2, f"error: {message}\n".encode())
        _set_exit_message(ORDERLY)
        if self.session:
            kill_session_processes(self.session)
        os._exit(WorkerLost.exit_code)


_watchdog: RayWatchdog | None = None
# Process that ends after this one.
_cleanup_process: subprocess.Popen[bytes] | None = None
_hanging = False


@contextlib.contextmanager
def watch_ray(deadlines: Deadlines, local: bool, reads: bool = False, kept: Callable[[], str] = str) -> Iterator[None]:
    """Watch this node's raylet and the GCS inside the context; raise WorkerLost, at the latest at its end, if one died.

    deadlines: the driver's deadlines, see `require_heartbeat`. local: this process has started Ray for itself only.
    reads: the driver loads and prepares data, which may take long, so it does not count as hung while it is busy. kept:
    last line of the error message (`Stop.kept`).
    """
    global _watchdog
    if _watchdog:  # an outer caller already watches
        yield
        return
    node: Any = ray._private.worker._global_node
    connections, logs = (list(_connections(node)), node.get_logs_dir_path()) if node else ([], "")
    session = node.get_session_dir_path() if local else ""
    watch = _watchdog = RayWatchdog(connections, session, logs, deadlines, reads, kept)
    watch.start()
    try:
        yield
    except Exception as error:
        # Ray's exceptions do not show that this is the cause.
        if (isinstance(error, RltrainError) and not isinstance(error, WorkerError)) or not lost(_POLL_S):
            raise
        raise WorkerLost(f"{watch.message}\n{kept()}".strip()) from error
    finally:
        watch.over.set()
        if not watch.message:
            _watchdog = None
        elif local:
            kill_session_processes(watch.session)


def _connections(node: Any) -> Iterator[_Connection]:
    """Yield connections to this node's raylet and to the GCS, if they accept connections."""
    host, _, port = node.gcs_address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError):
        yield _Connection("raylet", socket.AF_UNIX, node.raylet_socket_name)
    with contextlib.suppress(OSError, ValueError):
        yield _Connection("GCS (gcs_server)", family, (host.strip("[]"), int(port)))


@contextlib.contextmanager
def require_heartbeat() -> Iterator[None]:
    """Require regular calls of `raise_if_lost` inside the context; without them the driver counts as hung, and the
    process is ended.

    Errors are reported here already, because Ray may end the process during cleanup.
    """
    if not (watch := _watchdog):
        yield
        return
    watch.beat = time.monotonic()
    _set_exit_message(SILENT)  # the caller may continue after an error
    try:
        yield
    except Exception as error:
        if not isinstance(error, Interrupted):
            text = str(error) if isinstance(error, RltrainError) else f"{type(error).__name__}: {error}"
            code, passing = getattr(error, "exit_code", 1), getattr(error, "passing", False)
            report_to_supervisor(error=text, passing=passing, ends=code)
            _set_exit_message(exit_message(f"error: {text}\n"))
        raise
    finally:
        watch.beat = math.inf


@contextlib.contextmanager
def cleanup_after_exit(local: bool) -> Iterator[None]:
    """Start a process that reports the error and cleans up Ray if this process ends inside the context. local: this
    process has started Ray."""
    global _cleanup_process
    node: Any = ray._private.worker._global_node
    session = node.get_session_dir_path() if local else ""
    command = [sys.executable, "-IS", cleanup.__file__, session]
    _cleanup_process = start(command, stdin=subprocess.PIPE)
    _set_exit_message(SILENT)
    try:
        yield
    finally:
        _set_exit_message(SILENT if _hanging else ORDERLY)
        if not _hanging:
            _cleanup_process.communicate()
            _cleanup_process = None
            if local:
                remove_shared_memory(session)


def _set_exit_message(exit_message: bytes) -> None:
    if _cleanup_process and _cleanup_process.stdin:
        with contextlib.suppress(OSError):  # it was killed
            os.write(_cleanup_process.stdin.fileno(), exit_message)


def stop_ray() -> None:
    """Leave the cluster; a local one ends.

    If Ray does not respond, for example because the raylet is stopped, it is left alone: a local Ray ends with this
    process. Ending it earlier would make Ray's library end this process with exit code 1.
    """
    global _hanging
    leaving = threading.Thread(target=unless_lost(ray.shutdown), daemon=True)
    leaving.start()
    leaving.join(_SHUTDOWN_S)
    _hanging = leaving.is_alive()
    if _hanging:
        log.warning("ray.shutdown did not return within %d s", _SHUTDOWN_S)
        atexit.unregister(ray.shutdown)  # cleanup would wait for this call


def hanging() -> bool:
    """Return True if ray.shutdown timed out."""
    return _hanging


def lost(wait_s: float = 0.0) -> str:
    """Return an error message if Ray on this node is lost, or will be within ``wait_s``; else ""."""
    if _watchdog and wait_s:
        _watchdog.noticed.wait(wait_s)
    return _watchdog.message if _watchdog else ""


def raise_if_lost() -> None:
    """Raise WorkerLost if Ray on this node is lost. The driver calls it during waits, which also shows it is alive."""
    if _watchdog and _watchdog.beat < math.inf:
        _watchdog.beat = time.monotonic()
    if message := lost():
        raise WorkerLost(message)


def unless_lost(function: Callable[..., Any]) -> Callable[..., None]:
    """Wrap ``function``, which calls Ray to end something, so that it does nothing once Ray is lost.

    Errors of Ray are logged as warnings only, because the reason for the end has been reported already.
    """

    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            if not lost():
                function(*args, **kwargs)
        except RayError as error:
            log.warning("Ray failed while the run was ending: %s", error)

    return guarded

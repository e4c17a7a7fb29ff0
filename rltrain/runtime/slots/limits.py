"""Limits of a slot's calls, and termination of the processes that they start."""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from rltrain.runtime.slots.proc import descendants

# Maximum rounds, because a fork bomb may start processes faster than they are found.
_MAX_SWEEPS = 20
_PR_SET_CHILD_SUBREAPER = 36


# Variable of a slot's process: the folder for files of programs, which is removed after the process.
PROGRAMS_FOLDER = "RLTRAIN_PROGRAMS_FOLDER"


@dataclass(frozen=True)
class Limits:
    """Limits of the calls of a slot."""

    timeout_s: float = 5.0
    """Seconds per call."""
    memory_mb: int = 4096
    """MiB of address space of the process; 0: unlimited."""
    allow_code_execution: bool = False
    """True if a function may run programs that a model wrote (it checks `current_limits`)."""
    allow_unsandboxed_code: bool = False
    """True if it may do so even if the kernel supports neither namespaces nor Landlock."""


_current = Limits()


def current_limits() -> Limits:
    """Return the limits of this process, for a function that starts processes."""
    return _current


def impose(limits: Limits) -> None:
    """Set the limits of this process permanently. Address space is limited if the system supports it."""
    import resource

    global _current
    _current = limits
    if limits.memory_mb:
        size = limits.memory_mb << 20
        with suppress(OSError, ValueError):
            # Address space, because Linux ignores RLIMIT_RSS. Hard and soft limit, so that a function cannot raise it
            # again (unless it is root).
            resource.setrlimit(resource.RLIMIT_AS, (size, size))


def kill_tree(pid: int) -> None:
    """Send SIGKILL to a process, its group and, on Linux, all its descendants, even outside the group.

    ``pid`` must be a process group leader that this process has started and has not waited for yet.
    """
    send([pid], signal.SIGSTOP)  # a stopped process cannot fork
    kill_below(pid)
    with suppress(ProcessLookupError, PermissionError):  # macOS refuses this for a process that has ended
        os.killpg(pid, signal.SIGKILL)


def kill_below(pid: int) -> None:
    """Send SIGKILL to all descendants of a process that starts no more processes (Linux only)."""
    stopped: set[int] = set()
    # All are stopped before any is killed, so that no orphan escapes.
    for _ in range(_MAX_SWEEPS):
        if not (running := set(descendants(pid)) - stopped):
            break
        send(running, signal.SIGSTOP)
        stopped |= running
    send(stopped, signal.SIGKILL)


def remove_folder(folder: str) -> None:
    """Remove a folder of programs. It may be nested deeper than Python's recursion limit, or unreadable (mode 0300)."""
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        subprocess.run([*command, folder], check=False, stderr=subprocess.DEVNULL)
        if not os.path.exists(folder):
            break


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process, not of init (Linux only)."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to the processes that still exist."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def has_ended(process: subprocess.Popen, within_s: float = 0.0) -> bool:
    """Return True if a child process of this one has ended, or ends within the time.

    The process is not reaped, so that its id stays reserved and `kill_tree` may follow.
    """
    deadline, pause_s = time.monotonic() + within_s, 0.0005
    while not (ended := _has_ended(process)) and (left := deadline - time.monotonic()) > 0:
        time.sleep(pause_s := min(2 * pause_s, left, 0.05))
    return ended


def _has_ended(process: subprocess.Popen) -> bool:
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except (ChildProcessError, AttributeError):  # already reaped; not on macOS
        return process.poll() is not None

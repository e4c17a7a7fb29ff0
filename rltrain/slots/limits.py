"""What one call of a slot may take and do, and how the processes that it starts are ended."""

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# A fork bomb may start processes faster than they are found, and the sweep must end all the same.
_MAX_SWEEPS = 20


@dataclass(frozen=True)
class Limits:
    """Limits of the calls of a slot."""

    timeout_s: float = 5.0
    """Seconds per call."""
    memory_mb: int = 4096
    """MiB of address space of the process; 0: unlimited."""
    allow_code_execution: bool = False
    """Whether a function may run programs that a model wrote; it asks by `current_limits`."""


_current = Limits()


def current_limits() -> Limits:
    """The limits of this process, for a function that starts processes of its own."""
    return _current


def impose(limits: Limits) -> None:
    """Make these the limits of this process, for good. Address space is bounded where the system can do it."""
    import resource

    global _current
    _current = limits
    if limits.memory_mb:
        size = limits.memory_mb << 20
        with suppress(OSError, ValueError):
            # Address space, because Linux ignores RLIMIT_RSS. Hard as well as soft, so that a function cannot raise it
            # again (root can).
            resource.setrlimit(resource.RLIMIT_AS, (size, size))


def kill_tree(pid: int) -> set[int]:
    """SIGKILL for a process, its group and, on Linux, all its descendants, also those that left the group.

    ``pid`` must be a process group leader that this process has started and not waited for yet. Returns the ids of the
    other processes.
    """
    stopped: set[int] = set()
    # Everything is stopped before anything is killed: a stopped process cannot fork, and no orphan escapes the sweep.
    for _ in range(_MAX_SWEEPS):
        running = {pid, *descendants(pid)} - stopped
        if not running:
            break
        for member in running:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(member, signal.SIGSTOP)
        stopped |= running
    with suppress(ProcessLookupError, PermissionError):  # macOS refuses for a process that has ended
        os.killpg(pid, signal.SIGKILL)
    for member in stopped:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(member, signal.SIGKILL)
    return stopped - {pid}


def descendants(pid: int) -> list[int]:
    """Process ids below ``pid``; none where there is no /proc."""
    pids, unseen = [], [pid]
    while unseen:
        for listing in Path(f"/proc/{unseen.pop()}/task").glob("*/children"):
            with suppress(OSError):
                children = [int(child) for child in listing.read_text("utf-8").split()]
                pids += children
                unseen += children
    return pids

"""What scoring one answer may take and do, and how the processes that it starts are ended."""

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# A fork bomb may start processes faster than they are found, and the sweep must end all the same.
_MAX_SWEEPS = 20


@dataclass(frozen=True)
class ScoringLimits:
    """Per answer: seconds, MiB of address space (0: unlimited), and whether it may run as a program."""

    timeout_s: float = 5.0
    memory_mb: int = 4096
    allow_code_execution: bool = False


_current = ScoringLimits()


def current_limits() -> ScoringLimits:
    """The limits of this process, for a scorer that starts processes of its own."""
    return _current


def impose(limits: ScoringLimits) -> None:
    """Make these the limits of this process, for good. Address space is bounded where the system can do it."""
    import resource

    global _current
    _current = limits
    if limits.memory_mb:
        size = limits.memory_mb << 20
        with suppress(OSError, ValueError):
            # Address space, because Linux ignores RLIMIT_RSS. Hard as well as soft, so that a scorer cannot raise it
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
        found = {pid, *descendants(pid)} - stopped
        if not found:
            break
        for each in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGSTOP)
        stopped |= found
    with suppress(ProcessLookupError, PermissionError):  # macOS refuses for a process that has ended
        os.killpg(pid, signal.SIGKILL)
    for each in stopped:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(each, signal.SIGKILL)
    return stopped - {pid}


def descendants(pid: int) -> list[int]:
    """Process ids below ``pid``; none where there is no /proc."""
    found, unseen = [], [pid]
    while unseen:
        for listing in Path(f"/proc/{unseen.pop()}/task").glob("*/children"):
            with suppress(OSError):
                children = [int(child) for child in listing.read_text("utf-8").split()]
                found += children
                unseen += children
    return found

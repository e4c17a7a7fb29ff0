"""What scoring one answer may take and do, and how the processes it starts are ended."""

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_MAX_SWEEPS = 20


@dataclass(frozen=True)
class Limits:
    """``timeout_s`` seconds and ``memory_mb`` of address space (0: no limit) an answer; may it run as a program?"""

    timeout_s: float = 5.0
    memory_mb: int = 4096
    allow_code_execution: bool = False


_current = Limits()


def current_limits() -> Limits:
    """The limits of this process, for scorers that must stay within them by themselves."""
    return _current


def impose(limits: Limits) -> None:
    """Make these the limits of this process, for good. Address space is bounded where the system can."""
    import resource

    global _current
    _current = limits
    if limits.memory_mb:
        size = limits.memory_mb << 20
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (size, size))


def kill_tree(pid: int) -> set[int]:
    """SIGKILL for a process, its group, and on Linux all its descendants, also those that left the group.

    Everything is stopped before anything is killed, so that nothing new appears meanwhile. ``pid`` must be a process
    group leader started by this process and not waited for yet. Returns the process ids, ``pid`` left out.
    """
    stopped: set[int] = set()
    for _ in range(_MAX_SWEEPS):
        found = {pid, *_descendants(pid)} - stopped
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


def _descendants(pid: int) -> list[int]:
    found, unseen = [], [pid]
    while unseen:
        for listing in Path(f"/proc/{unseen.pop()}/task").glob("*/children"):
            with suppress(OSError):
                children = [int(child) for child in listing.read_text().split()]
                found += children
                unseen += children
    return found

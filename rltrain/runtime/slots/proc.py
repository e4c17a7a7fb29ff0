"""Processes of this machine, read from /proc, without which there are none. Only the standard library is used, because
every slot's process and the supervisor import this.
"""

from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")


def pids() -> list[int]:
    """Return all process ids."""
    with suppress(OSError):
        return [int(process.name) for process in _PROC.iterdir() if process.name.isdigit()]
    return []


def command(pid: int) -> str:
    """Return the command line of a process; "" if it has ended."""
    return _text(pid, "cmdline").replace("\0", " ").strip()


def stat(pid: int) -> list[str]:
    """Return state, parent, process group and other kernel data of a process; [] if it has ended."""
    return _text(pid, "stat").rpartition(")")[2].split()


def status(pid: int) -> dict[str, str]:
    """Return the fields of /proc/PID/status; sizes are in KiB, as ``123 kB``."""
    pairs = (line.partition(":") for line in _text(pid, "status").splitlines())
    return {name: text.strip() for name, _, text in pairs}


def catches(pid: int, number: int) -> bool:
    """Return True if a process has a handler for a signal; False if it has ended."""
    return bool(int(status(pid).get("SigCgt", "0"), 16) >> (number - 1) & 1)


def children(pid: int) -> list[int]:
    """Return the children of a process."""
    found: list[int] = []
    for listing in _PROC.glob(f"{pid}/task/*/children"):
        with suppress(OSError):  # the process has ended
            found += map(int, listing.read_text("utf-8").split())
    return found


def descendants(pid: int) -> list[int]:
    """Return the processes below a process."""
    found, unseen = [], [pid]
    while unseen:
        below = children(unseen.pop())
        found += below
        unseen += below
    return found


def _text(pid: int, file: str) -> str:
    with suppress(OSError):  # the process has ended, or belongs to another user
        return (_PROC / str(pid) / file).read_text("utf-8", "replace")
    return ""

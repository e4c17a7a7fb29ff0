"""Cleanup after a local Ray, some of whose processes keep running for minutes without raylet, GCS or driver.

The driver starts this as a program, which waits for the driver's end, even by kill -9. Then it prints the driver's last
message (`exit_message`, or nothing for SILENT), because the driver can no longer print it. After ORDERLY it does
nothing. It uses only the standard library, so its cost is negligible. If the driver has only joined a cluster, no
session is given, and nothing is ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

_PART = b"\0"
ORDERLY, SILENT = _PART, _PART + b" "
_PATIENCE_S = 5.0


def exit_message(text: str) -> bytes:
    """Encode the text to print at the driver's end, replacing earlier ones."""
    return _PART + text.encode(errors="replace").replace(_PART, b"")


def kill_session_processes(session: str) -> None:
    """Kill all processes that have a file of Ray's session folder open, except this one."""
    deadline = time.monotonic() + _PATIENCE_S
    while (left := _holders(f"{session}/")) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    remove_shared_memory(session)


def remove_shared_memory(session: str) -> None:
    """Remove shared memory with the session in its name, left by a killed engine."""
    for file in Path("/dev/shm").glob(f"*{Path(session).name}*"):
        with contextlib.suppress(OSError):
            file.unlink()


def _holders(folder: str) -> list[int]:
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # has ended meanwhile, or belongs to another user
            files = map(os.readlink, (process / "fd").iterdir())
            if int(process.name) == os.getpid() or not any(file.startswith(folder) for file in files):
                continue
            # Python's resource tracker ends after its processes and removes their semaphores.
            if b"multiprocessing.resource_tracker" not in (process / "cmdline").read_bytes():
                pids.append(int(process.name))
    return pids


if __name__ == "__main__" and (last := sys.stdin.buffer.read().rpartition(_PART)[2]):
    with contextlib.suppress(OSError):  # a closed terminal
        os.write(2, last.lstrip())
    if sys.argv[1]:
        kill_session_processes(sys.argv[1])

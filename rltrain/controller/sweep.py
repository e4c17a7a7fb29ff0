"""Ends what a local Ray leaves behind: without raylet, GCS or driver some of its processes go on for minutes.

Run as a program, which the driver starts, this waits for the driver's end, be it by kill -9. What the driver has told
it last (`message`, or SILENT) it then says, as the driver itself could not; after ORDERLY it does nothing. The standard
library is enough, so that it costs next to nothing. Left out: a Ray that this driver has only joined, which others use
as well: no session is given then, and nothing is ended.
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


def message(text: str) -> bytes:
    """What the program says at the driver's end, in the place of what it was told before."""
    return _PART + text.encode(errors="replace").replace(_PART, b"")


def sweep(session: str) -> None:
    """Kill all processes that have a file of Ray's session folder open, other than this one."""
    deadline = time.monotonic() + _PATIENCE_S
    while (left := _holders(f"{session}/")) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    forget(session)


def forget(session: str) -> None:
    """Remove shared memory that has the session in its name: of an engine that was killed."""
    for file in Path("/dev/shm").glob(f"*{Path(session).name}*"):
        with contextlib.suppress(OSError):
            file.unlink()


def _holders(folder: str) -> list[int]:
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            files = map(os.readlink, (process / "fd").iterdir())
            if int(process.name) == os.getpid() or not any(file.startswith(folder) for file in files):
                continue
            # Python's own sweeper ends with the processes that it sweeps behind: it removes their semaphores.
            if b"multiprocessing.resource_tracker" not in (process / "cmdline").read_bytes():
                pids.append(int(process.name))
    return pids


if __name__ == "__main__" and (last := sys.stdin.buffer.read().rpartition(_PART)[2]):
    with contextlib.suppress(OSError):  # a terminal that is gone
        os.write(2, last.lstrip())
    if sys.argv[1]:
        sweep(sys.argv[1])

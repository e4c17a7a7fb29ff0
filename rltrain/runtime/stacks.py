"""Stacks of a process and its descendants, for the incident folder after a hang.

A hanging process cannot respond, so its interpreter writes its stacks on a signal, even while the GIL is held, into
memory that the sender of the signal reads. So no file name is needed and no file remains. If a process does not offer
this (an engine's process, before it runs our code), its state in the kernel is reported. Only the standard library is
used, because scorer processes import this too.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import time
from pathlib import Path

from rltrain.runtime.slots.proc import catches, command, descendants, stat

_NAME, _SIGNAL = "rltrain-stacks", signal.SIGUSR2
_ANSWER_S = 2.0
_STATES = {
    "R": "computing",
    "S": "waiting",
    "D": "waiting for a disk, a device or a network file system",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "ended",
}
_offered = False


def offer() -> None:
    """Allow an ancestor's `stacks_here` to read the Python stacks of this process. A second call does nothing."""
    global _offered
    if not _offered and hasattr(os, "memfd_create"):
        _offered = True
        # faulthandler writes to the descriptor below Python, so it must stay open for the life of the process.
        faulthandler.register(_SIGNAL, os.memfd_create(_NAME), all_threads=True)


def stacks_here() -> str:
    """Return the Python stacks of this process, and the state and offered stacks of all descendants."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return "\n".join([file.read(), *map(_other, sorted(descendants(os.getpid())))])


def _other(pid: int) -> str:
    fields = stat(pid)
    if not fields:
        return f"process {pid} has ended\n"
    name, state = command(pid)[:100] or "?", _STATES.get(fields[0], fields[0])
    return f"process {pid} ({name}) is {state}\n{_asked(pid) if fields[0] in 'RS' else ''}"


def _asked(pid: int) -> str:
    """Return the stacks of a process that offers them, or ""."""
    try:
        links = {descriptor: os.readlink(descriptor) for descriptor in Path(f"/proc/{pid}/fd").iterdir()}
        offered = next((descriptor for descriptor, link in links.items() if link.startswith(f"/memfd:{_NAME}")), None)
        # The signal would kill a process that does not handle it. A forked process has the file and responds too.
        if offered is None or not catches(pid, _SIGNAL):
            return ""
        before = offered.stat().st_size
        os.kill(pid, _SIGNAL)
        deadline, last_size = time.monotonic() + _ANSWER_S, before
        while time.monotonic() < deadline:
            time.sleep(0.05)
            size = offered.stat().st_size
            if size > before and size == last_size:
                break
            last_size = size
        with offered.open("rb") as file:
            file.seek(before)
            return file.read().decode(errors="replace")
    except OSError as error:  # it has ended, or access is denied
        return f"its stacks cannot be read: {error}\n"

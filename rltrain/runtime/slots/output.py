"""Capture of the output of a slot's process and its children by a pipe."""

import os
import re

_MAX_KEPT_BYTES = 256 << 10
_READ_BYTES = 64 << 10  # as much as a pipe holds
_MAX_READS = 16
# Signs of a failed multiprocessing child, after or during its start.
_LOST = re.compile(r"^Process \S+:$|^  File \"\S*multiprocessing/(spawn|forkserver)\.py\"", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last):"
_LOST_CHARS = 2000


def lost_process(text: str) -> str:
    """Return the first complete traceback in ``text`` of a multiprocessing child; "" without one."""
    match = _LOST.search(text)
    if not match:
        return ""
    start = text.rfind(_TRACEBACK, 0, match.start()) if match[1] else text.find(_TRACEBACK, match.end())
    lines = text[start:].splitlines() if start >= 0 else []
    # Frames and notes are indented; the exception's line is not.
    last = next((at for at, line in enumerate(lines[1:], 1) if line and not line[0].isspace()), len(lines))
    return "\n".join(lines[: last + 1])[-_LOST_CHARS:]


class Printed:
    """A pipe that a process and its children write to (``writer``). The first 256 KiB since the last `take` are kept.

    The slot reads it while waiting for the reply. Unlike with a thread, this needs no locks, and all output before a
    reply is available with the reply.
    """

    def __init__(self) -> None:
        self._kept, self._num_left_out = bytearray(), 0

    def renew(self) -> None:
        """Create the pipe of a new process, so that processes left by an earlier one cannot write to it."""
        # The writer stays open here too, so a read never ends in EOF.
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)

    def drain(self) -> None:
        """Read the pipe a limited number of times, because a process may write faster than this reads."""
        for _ in range(_MAX_READS):
            try:
                self.add(os.read(self.reader, _READ_BYTES))
            except BlockingIOError:
                return

    def add(self, data: bytes) -> None:
        """Store ``data`` as if it had been printed."""
        # The first bytes are kept, because the beginning identifies the output of a loop.
        room = _MAX_KEPT_BYTES - len(self._kept)
        self._kept += data[:room]
        self._num_left_out += len(data[room:])

    @property
    def total(self) -> int:
        """Bytes kept since the last `take`."""
        return len(self._kept)

    def since(self, before: int) -> str:
        """Return the text kept after the first ``before`` bytes."""
        return self._kept[before:].decode(errors="replace")

    def take(self) -> str:
        """Return and clear the printed output."""
        text = self._kept.decode(errors="replace")
        if self._num_left_out:
            text += f"\n({self._num_left_out:,} more bytes were printed here and are omitted)\n"
        self._kept, self._num_left_out = bytearray(), 0
        return text

    def close(self) -> None:
        """Close the pipe; its content can still be taken."""
        os.close(self.reader)
        os.close(self.writer)

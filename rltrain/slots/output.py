"""What the process of a slot and its children print, read off a pipe."""

import os
import re

_MAX_KEPT_BYTES = 256 << 10
_READ_BYTES = 64 << 10  # as much as a pipe holds
_MAX_READS = 16
# How multiprocessing tells of a process of its own, which has begun its work or was only starting.
_LOST = re.compile(r"^Process \S+:$|^  File \"\S*multiprocessing/(spawn|forkserver)\.py\"", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last):"
_LOST_CHARS = 2000


def lost_process(text: str) -> str:
    """The first traceback in ``text`` of a process that multiprocessing started, to its last line; "" without one."""
    match = _LOST.search(text)
    if not match:
        return ""
    start = text.rfind(_TRACEBACK, 0, match.start()) if match[1] else text.find(_TRACEBACK, match.end())
    lines = text[start:].splitlines() if start >= 0 else []
    # Frames and notes are indented, the exception's own line is not.
    last = next((at for at, line in enumerate(lines[1:], 1) if line and not line[0].isspace()), len(lines))
    return "\n".join(lines[: last + 1])[-_LOST_CHARS:]


class Printed:
    """A pipe that a process and its children write to (``writer``). The first 256 KiB since the last `take` are kept.

    The slot reads it while it waits for the reply. A thread would need locks, and could still be reading when the reply
    is there: this way everything that was printed before a reply is here with it.
    """

    def __init__(self) -> None:
        self._kept, self._num_left_out = bytearray(), 0

    def renew(self) -> None:
        """Make the pipe of a new process: what an earlier one has left running must not write into it."""
        # The writer stays open here too, so a read never ends in EOF.
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)

    def drain(self) -> None:
        """Read what is in the pipe, a bounded number of times: a process may write faster than this reads."""
        for _ in range(_MAX_READS):
            try:
                self.add(os.read(self.reader, _READ_BYTES))
            except BlockingIOError:
                return

    def add(self, data: bytes) -> None:
        """Keep ``data`` as if it had been printed."""
        # The first bytes are kept, not the last: of a loop that prints, the beginning says what it is.
        room = _MAX_KEPT_BYTES - len(self._kept)
        self._kept += data[:room]
        self._num_left_out += len(data[room:])

    @property
    def total(self) -> int:
        """Bytes kept since the last `take`."""
        return len(self._kept)

    def since(self, before: int) -> str:
        """What was kept after the first ``before`` bytes."""
        return self._kept[before:].decode(errors="replace")

    def take(self) -> str:
        """What was printed since the last call."""
        text = self._kept.decode(errors="replace")
        if self._num_left_out:
            text += f"\n({self._num_left_out:,} more bytes were printed here and are left out)\n"
        self._kept, self._num_left_out = bytearray(), 0
        return text

    def close(self) -> None:
        """Close the pipe; what it held can still be taken."""
        os.close(self.reader)
        os.close(self.writer)

"""Capture of the output of a slot's process and its children by a pipe."""

import os

_MAX_KEPT_BYTES = 256 << 10
_READ_BYTES = 64 << 10  # as much as a pipe holds
_MAX_READS = 16


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

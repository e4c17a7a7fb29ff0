"""Output of scorers: read off a pipe (`Printed`) and written to a bounded file of the run (`RewardLog`)."""

import logging
import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rltrain.base.errors import plain

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 32 << 20
_MAX_KEPT_BYTES = 256 << 10
_READ_BYTES = 64 << 10  # as much as a pipe holds
_MAX_READS = 16
# How multiprocessing tells of a process of its own, which has begun its work or was only starting.
_LOST = re.compile(r"^Process \S+:$|^  File \"\S*multiprocessing/(spawn|forkserver)\.py\"", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last):"
_LOST_CHARS = 2000


def lost_process(text: str) -> str:
    """The first traceback in ``text`` of a process that multiprocessing started, to its last line; "" without one."""
    found = _LOST.search(text)
    if not found:
        return ""
    start = text.rfind(_TRACEBACK, 0, found.start()) if found[1] else text.find(_TRACEBACK, found.end())
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
        # The writer stays open here for the next process of the slot, so a read never ends in EOF.
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self._kept = bytearray()
        self._num_left_out = 0

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


class RewardLog:
    """``reward.log``: the lines that scorers print, and the first failure per kind, which the driver logs too.

    The driver alone writes it, so that no line of one node overwrites another's. A full file becomes ``reward.1.log``,
    in place of an older one. Without ``file`` only the driver's log is written.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._seen: set[tuple[str, str, str]] = set()

    def printed(self, who: str, text: str) -> None:
        """Write down what a worker's scorers have printed."""
        self._write(who, text)

    def failures(self, scores: Iterable[Any]) -> None:
        """Report the first failure per kind, which is data source, status and exception."""
        for score in scores:
            kind = (score.call[0], score.status, score.kind) if score.call else ("", score.status, score.kind)
            if score.status != "ok" and kind not in self._seen:
                self._seen.add(kind)
                first = "the first time in this way; reward/error_rate counts all"
                text = f"an answer could not be scored ({first}): {score.report()}"
                logger.warning("%s", text)
                self._write("driver", text)

    def _write(self, who: str, text: str) -> None:
        if self._file is None or not text:
            return
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = "".join(f"{stamp} {who}: {plain(line)}\n" for line in text.splitlines())
        with suppress(OSError):  # a full disk is for the checkpoints to complain about
            if self._file.exists() and self._file.stat().st_size + len(lines) > MAX_FILE_BYTES:
                self._file.replace(self._file.with_suffix(f".1{self._file.suffix}"))
            with open(self._file, "a", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write(lines)

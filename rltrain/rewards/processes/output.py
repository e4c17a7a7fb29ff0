"""What scorers print, and where it goes: off a pipe as it comes (`Printed`), and into a bounded file of the run (`RewardLog`)."""

import logging
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 32 << 20
_MAX_KEPT_BYTES = 256 << 10
_READ_BYTES = 64 << 10  # as much as a pipe holds
_MAX_READS = 16


class Printed:
    """The end of a pipe that a process and its children write to (``writer``). The first 256 KiB since the last `take` are kept.

    It is read by who waits for the process, in between; no thread is needed, and whatever a process has printed before it
    replies is here when the reply is.
    """

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self._kept = bytearray()
        self._num_left_out = 0

    def drain(self) -> None:
        """Read what is in the pipe; not for ever, where somebody writes faster than this reads."""
        for _ in range(_MAX_READS):
            try:
                self.add(os.read(self.reader, _READ_BYTES))
            except BlockingIOError:
                return

    def add(self, data: bytes) -> None:
        """As if it had been printed."""
        room = _MAX_KEPT_BYTES - len(self._kept)
        self._kept += data[:room]
        self._num_left_out += len(data[room:])

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
    """``reward.log``: what scorers print, line by line, and the first failure of every kind, which the driver logs too.

    Written by the driver alone, so that no line of one node overwrites another's. A file that is full becomes
    ``reward.1.log``, in place of an older one. Without ``file`` only the driver's log is written.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._seen: set[tuple[str, str, str]] = set()

    def printed(self, who: str, text: str) -> None:
        """Take over what one worker's scorers have printed."""
        self._write(who, text)

    def failures(self, scores: Iterable[Any]) -> None:
        """Say what happened to the first of these `Score` of every kind: data source, status and exception."""
        for score in scores:
            kind = (score.call[0], score.status, score.kind) if score.call else ("", score.status, score.kind)
            if score.status != "ok" and kind not in self._seen:
                self._seen.add(kind)
                text = f"an answer could not be scored (the first time in this way; reward/error_rate counts all): {score.report()}"
                logger.warning("%s", text)
                self._write("driver", text)

    def _write(self, who: str, text: str) -> None:
        if self._file is None or not text:
            return
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = "".join(f"{stamp} {who}: {line}\n" for line in text.splitlines())
        with suppress(OSError):  # a full disk is for the checkpoints to complain about
            if self._file.exists() and self._file.stat().st_size + len(lines) > MAX_FILE_BYTES:
                self._file.replace(self._file.with_suffix(f".1{self._file.suffix}"))
            with open(self._file, "a", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write(lines)

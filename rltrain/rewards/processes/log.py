"""``reward.log`` and ``agents.log``: what a user's code prints, and how scorers fail."""

import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rltrain.base.errors import plain

logger = logging.getLogger(__name__)


class PrintLog:
    """A log file of lines that a user's code has printed.

    A file of ``max_bytes`` becomes ``NAME.1.log``, in place of an older one. Without ``file`` nothing is written.
    """

    def __init__(self, file: Path | None = None, max_bytes: int = 32 << 20) -> None:
        self._file, self._max_bytes = file, max_bytes

    def printed(self, who: str, text: str) -> None:
        """Write down what somebody's code has printed."""
        if self._file is None or not text:
            return
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = "".join(f"{stamp} {who}: {plain(line)}\n" for line in text.splitlines())
        with suppress(OSError):  # a full disk is for the checkpoints to complain about
            if self._file.exists() and self._file.stat().st_size + len(lines) > self._max_bytes:
                self._file.replace(self._file.with_suffix(f".1{self._file.suffix}"))
            with open(self._file, "a", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write(lines)


class RewardLog(PrintLog):
    """``reward.log``: the lines that scorers print, and the first failure per kind, which the driver logs too.

    The driver alone writes it, so that no line of one node overwrites another's.
    """

    def __init__(self, file: Path | None = None) -> None:
        super().__init__(file)
        self._seen: set[tuple[str, str, str]] = set()

    def failures(self, scores: Iterable[Any]) -> None:
        """Report the first failure per kind, which is data source, status and exception."""
        for score in scores:
            kind = (score.call[0], score.status, score.kind) if score.call else ("", score.status, score.kind)
            if score.status != "ok" and kind not in self._seen:
                self._seen.add(kind)
                first = "the first time in this way; reward/error_rate counts all"
                text = f"an answer could not be scored ({first}): {score.report()}"
                logger.warning("%s", text)
                self.printed("driver", text)

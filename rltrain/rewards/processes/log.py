"""``reward.log`` and ``agents.log``: output of user code, and failures of scorers."""

import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rltrain.common.errors import sanitize

logger = logging.getLogger(__name__)


class PrintLog:
    """A log file of output printed by user code.

    At ``max_bytes`` the file is renamed to ``NAME.1.log``, which replaces an older one. If ``file`` is None, nothing is
    written.
    """

    def __init__(self, file: Path | None = None, max_bytes: int = 32 << 20) -> None:
        self._file, self._max_bytes = file, max_bytes

    def append(self, source: str, text: str) -> None:
        """Append the output of user code with time and source."""
        if self._file is None or not text:
            return
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = "".join(f"{stamp} {source}: {sanitize(line)}\n" for line in text.splitlines())
        with suppress(OSError):  # checkpoints report a full disk
            if self._file.exists() and self._file.stat().st_size + len(lines) > self._max_bytes:
                self._file.replace(self._file.with_suffix(f".1{self._file.suffix}"))
            with open(self._file, "a", encoding="utf-8", errors="backslashreplace") as stream:
                stream.write(lines)


class RewardLog(PrintLog):
    """``reward.log``: output of scorers, and the first failure of each kind, which the driver also logs.

    Only the driver writes the file, so that nodes do not overwrite each other's lines.
    """

    def __init__(self, file: Path | None = None) -> None:
        super().__init__(file)
        self._logged_kinds: set[tuple[str, str, str]] = set()

    def failures(self, scores: Iterable[Any]) -> None:
        """Log the first failure of each kind. A kind is a data source, status and exception."""
        for score in scores:
            kind = (score.call[0], score.status, score.kind) if score.call else ("", score.status, score.kind)
            if score.status != "ok" and kind not in self._logged_kinds:
                self._logged_kinds.add(kind)
                first = "first failure of this kind; reward/error_rate counts all"
                text = f"a response could not be scored ({first}): {score.report()}"
                logger.warning("%s", text)
                self.append("driver", text)

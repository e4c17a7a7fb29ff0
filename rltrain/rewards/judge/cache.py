"""On-disk cache of a judge's replies, keyed by a hash of the request. SQLite lets several processes share the file.

The default journal is used: the faster one (WAL) does not work on network storage.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from pathlib import Path
from typing import Any

from rltrain.common.errors import ConfigError

# Time that another process may lock the file, in seconds.
_BUSY_S = 30.0


class ReplyCache:
    """Cache of replies in the file ``reward.judge.cache``. Raises ConfigError for an unusable file."""

    def __init__(self, file: str) -> None:
        path = Path(file).expanduser()
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._rows = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            self._rows.execute("CREATE TABLE IF NOT EXISTS replies (asked TEXT PRIMARY KEY, reply TEXT NOT NULL)")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"reward.judge.cache={file}: {error}. Name a new file, or one that a run has created."
            ) from None

    def get(self, request: dict[str, Any]) -> str | None:
        """Return the cached reply to a request, or None."""
        with self._lock:
            row = self._rows.execute("SELECT reply FROM replies WHERE asked = ?", (_digest(request),)).fetchone()
        return None if row is None else str(row[0])

    def put(self, request: dict[str, Any], reply: str) -> None:
        """Store a reply. A reply that is already stored is kept."""
        with self._lock:
            self._rows.execute("INSERT OR IGNORE INTO replies VALUES (?, ?)", (_digest(request), reply))

    def close(self) -> None:
        with self._lock:
            self._rows.close()


def _digest(request: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()

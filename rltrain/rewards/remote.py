"""A scorer behind HTTP: POST {data_source, solution_str, ground_truth, extra_info}, and {"score": ...} comes back.

Runs in the reward worker itself, not in a slot: nothing but JSON is read from the other side. Redirects and proxies are
not followed.
"""

import http.client
import json
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from rltrain.errors import RewardError
from rltrain.rewards.child import MAX_ERROR_CHARS, judge
from rltrain.rewards.slot import Call, Score

_MAX_REPLY_BYTES = 1 << 20
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_WORTH_ANOTHER_TRY = (408, 429, 500, 502, 503, 504)


class _Unavailable(Exception):
    """No answer, or one that says to try again."""


def check_address(url: str, concurrency: int) -> None:
    """Raise RewardError for an address or a concurrency that cannot be."""
    try:
        address = urlsplit(url)
        usable = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise RewardError(f"reward.url={url!r} is no address; write http://host:port/path.")
    if concurrency < 1:
        raise RewardError(f"reward.url_concurrency={concurrency} must be at least 1.")


class RemoteScorer:
    """Scores answers at ``url``: ``timeout_s`` for each with all its retries, at most ``concurrency`` at a time."""

    def __init__(self, url: str, timeout_s: float, concurrency: int):
        check_address(url, concurrency)
        self._address = urlsplit(url)
        self._url = url
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(concurrency)

    def score(self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Score:
        """Score one answer. Failing connections, 429 and 5xx are tried again until the deadline."""
        call = {
            "data_source": data_source,
            "solution_str": solution_str,
            "ground_truth": ground_truth,
            "extra_info": extra_info,
        }
        body = json.dumps(call, default=str).encode()
        deadline, pause, trouble = time.monotonic() + self._timeout_s, _FIRST_PAUSE_S, "no answer"
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                return self._attempt(body, remaining)
            except _Unavailable as error:
                trouble = str(error)
            time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return Score(
            None, "timeout", f"no score from {self._url} after {self._timeout_s:g} s (reward.timeout_s): {trouble}"
        )

    def score_all(self, calls: Sequence[Call]) -> list[Score]:
        """Score answers, several at a time; in their order."""
        return list(self._threads.map(lambda call: self.score(*call).of(call), calls))

    def take_printed(self) -> str:
        """What the scorer has printed is at the other end."""
        return ""

    def check(self, call: Call) -> Score:
        """Score one answer. Raises RewardError unless a score comes back."""
        score = self.score(*call)
        if score.status != "ok":
            raise RewardError(f"reward.url={self._url!r} gives no score for data_source={call[0]!r}: {score.error}")
        return score

    def close(self) -> None:
        """Start no more requests."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _attempt(self, body: bytes, seconds: float) -> Score:
        status, reply = self._post(body, seconds)
        if status in _WORTH_ANOTHER_TRY:
            raise _Unavailable(f"HTTP {status} {reply[:200]!r}")
        if status != http.client.OK:
            return Score(None, "crashed", f"{self._url}: HTTP {status} {reply[:MAX_ERROR_CHARS]!r}")
        try:
            value = json.loads(reply)
            score, extras = judge(value if isinstance(value, dict) else {})
        except (ValueError, RecursionError) as error:
            return Score(None, "rejected", f"{self._url}: {error}; it sent {reply[:200]!r}")
        return Score(score, "ok", None, extras)

    def _post(self, body: bytes, seconds: float) -> tuple[int, bytes]:
        kind = http.client.HTTPSConnection if self._address.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._address.hostname or "", self._address.port, timeout=seconds)
        path = (self._address.path or "/") + (f"?{self._address.query}" if self._address.query else "")
        alarm: threading.Timer | None = None
        try:
            connection.connect()
            # The socket's own timeout starts again with every byte that trickles in; this one does not. The connection
            # forgets its socket once the headers are read, so it is named here.
            alarm = threading.Timer(seconds, _hang_up, [connection.sock])
            alarm.start()
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            reply = response.read(_MAX_REPLY_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            raise _Unavailable(f"{type(error).__name__}: {error}") from None
        finally:
            if alarm is not None:
                alarm.cancel()
            connection.close()
        if len(reply) > _MAX_REPLY_BYTES:
            return 0, b"a reply of more than a mebibyte"
        if response.length:  # bytes announced and not sent
            raise _Unavailable("the reply was cut short")
        return response.status, reply


def _hang_up(line: socket.socket) -> None:
    with suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)

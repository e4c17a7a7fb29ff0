"""A scorer behind HTTP: POST {data_source, solution_str, ground_truth, extra_info}, and {"score": ...} comes back.

Runs in the reward worker itself, not in a slot: nothing but JSON is read from the other side. Redirects and proxies are
not followed.
"""

import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from urllib3 import BaseHTTPResponse, Retry, connection_from_url
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError

from rltrain.errors import RewardError
from rltrain.rewards.processes.child import MAX_ERROR_CHARS, judge
from rltrain.rewards.processes.slot import Call, Score

_MAX_REPLY_BYTES = 1 << 20
_OK = 200
# How long to wait before another try, and after which replies; for how long is up to the deadline.
_RETRY = Retry(
    total=None,
    allowed_methods=None,
    status_forcelist=(408, 429, 500, 502, 503, 504),
    backoff_factor=0.05,
    backoff_max=2.0,
    backoff_jitter=0.05,
)


class _Unavailable(Exception):
    """No answer, or one that says to try again: after so many seconds, if it says when."""

    def __init__(self, why: str, after_s: float | None = None) -> None:
        super().__init__(why)
        self.after_s = after_s


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
    """Scores answers at ``url``: ``timeout_s`` for each with all its retries, at most ``concurrency`` at a time.

    ``headers`` go with every request. Connections are kept for the next answer.
    """

    def __init__(self, url: str, timeout_s: float, concurrency: int, headers: Mapping[str, Any] | None = None):
        check_address(url, concurrency)
        address = urlsplit(url)
        self._path = (address.path or "/") + (f"?{address.query}" if address.query else "")
        self._url = url
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(concurrency)
        sent = {name: str(value) for name, value in (headers or {}).items()} | {"Content-Type": "application/json"}
        self._pool = connection_from_url(url, maxsize=concurrency, retries=False, headers=sent)
        self._pool.ConnectionCls = _Https if address.scheme == "https" else _Http

    def score(self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Score:
        """Score one answer. Failing connections, 429 and 5xx are tried again until the deadline."""
        call = {
            "data_source": data_source,
            "solution_str": solution_str,
            "ground_truth": ground_truth,
            "extra_info": extra_info,
        }
        body = json.dumps(call, default=str).encode()
        deadline, retry, trouble = time.monotonic() + self._timeout_s, _RETRY, "no answer"
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                return self._attempt(body, remaining)
            except _Unavailable as error:
                trouble, pause = str(error), error.after_s
            retry = retry.increment()
            time.sleep(max(0.0, min(pause or retry.get_backoff_time(), deadline - time.monotonic())))
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
        response, reply = self._post(body, seconds)
        if len(reply) > _MAX_REPLY_BYTES:
            return Score(None, "crashed", f"{self._url}: a reply of more than a mebibyte")
        if _RETRY.is_retry("POST", response.status):
            with suppress(HTTPError):  # a header that is no time
                raise _Unavailable(f"HTTP {response.status} {reply[:200]!r}", _RETRY.get_retry_after(response))
            raise _Unavailable(f"HTTP {response.status} {reply[:200]!r}")
        if response.status != _OK:
            return Score(None, "crashed", f"{self._url}: HTTP {response.status} {reply[:MAX_ERROR_CHARS]!r}")
        try:
            value = json.loads(reply)
            score, extras = judge(value if isinstance(value, dict) else {})
        except (ValueError, RecursionError) as error:
            return Score(None, "rejected", f"{self._url}: {error}; it sent {reply[:200]!r}")
        return Score(score, "ok", None, extras)

    def _post(self, body: bytes, seconds: float) -> tuple[BaseHTTPResponse, bytes]:
        _of_thread.deadline, _of_thread.alarm = time.monotonic() + seconds, None
        as_sent: dict[str, Any] = {"redirect": False, "preload_content": False, "decode_content": False}
        try:
            response = self._pool.urlopen("POST", self._path, body, timeout=seconds, **as_sent)
            reply = response.read(_MAX_REPLY_BYTES + 1)
        except HTTPError as error:
            raise _Unavailable(f"{type(error).__name__}: {error}") from None
        finally:
            if _of_thread.alarm is not None:
                _of_thread.alarm.cancel()
        if len(reply) > _MAX_REPLY_BYTES:
            response.close()
        elif (
            response.length_remaining or time.monotonic() >= _of_thread.deadline
        ):  # hung up, perhaps within the headers
            raise _Unavailable("the reply was cut short")
        return response, reply


_of_thread = threading.local()


def _watch(line: Any) -> None:
    """Hang up when the time of this thread's answer is over: the socket's own timeout starts again with every byte that trickles in."""
    _of_thread.alarm = threading.Timer(_of_thread.deadline - time.monotonic(), _hang_up, [line])
    _of_thread.alarm.start()


def _hang_up(line: socket.socket) -> None:
    with suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)


class _Http(HTTPConnection):
    def getresponse(self) -> Any:
        _watch(self.sock)
        return super().getresponse()


class _Https(HTTPSConnection):
    def getresponse(self) -> Any:
        _watch(self.sock)
        return super().getresponse()

"""Client of a judge's server: requests and their retries, within the limits of ``reward.judge``.

All requests share the limits: the number of concurrent requests, the number of requests per minute, and the last
Retry-After of the server. The key of ``api_key_env`` is sent only in a header: messages never contain it, not even when
they quote a server that repeats it.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import httpx

from rltrain.common.clock import SYSTEM, Backoff, Clock
from rltrain.common.env import first_set
from rltrain.common.errors import ConfigError, replace_surrogates
from rltrain.config.schema.judge import JudgeConfig
from rltrain.rewards.http import MAX_REPLY_BYTES, TRY_AGAIN, client, fetch, retry_after_s, wait_problem
from rltrain.rewards.judge.reply import Reply

# Attempts per request, except attempts after which the server requested a wait.
TRIES = 6
_BACKOFF = Backoff(0.5, 30.0, jitter=0.25)
_SHOWN_BYTES = 500
# Shorter keys are not treated as secrets.
_SECRET_CHARS = 8
# Names of the counters that this module and the code that parses replies increase.
JUDGE_COUNTS = ("calls", "cache_hits", "retries", "parse_failures", "tokens", "seconds")


class JudgeUnavailable(Exception):
    """The judge did not reply, and a retry would fail now. The text is the reason."""

    def __init__(self, sentence: str, is_refused: bool) -> None:
        super().__init__(sentence)
        self.is_refused = is_refused
        """True if the server rejects the request itself: a wrong key, model or field."""


def api_key(judge: JudgeConfig) -> str:
    """Return the server's key; "" without one. Raises ConfigError if its variable is unset or its value cannot be a
    key."""
    # Strip the key, because files of secrets end with a line break, which a header must not contain.
    key = first_set(judge.api_key_env).strip() if judge.api_key_env else ""
    if judge.api_key_env and not key:
        raise ConfigError(
            f"reward.judge.api_key_env={judge.api_key_env}: this environment variable is not set. Set it in the "
            "environment that starts the run."
        )
    if not (key.isascii() and key.isprintable()):  # connection errors would quote it
        raise ConfigError(
            f"reward.judge.api_key_env={judge.api_key_env}: its value has characters that are not allowed in an API "
            "key."
        )
    return key


class JudgeServer:
    """A client of a judge's server, for use in one event loop.

    num_sharing: number of processes of this run that use the same server; each gets its share of the limits.
    """

    def __init__(self, judge: JudgeConfig, num_sharing: int = 1, clock: Clock = SYSTEM) -> None:
        concurrency = max(1, judge.max_concurrency // num_sharing)
        self._judge, self._key, self._clock = judge, api_key(judge), clock
        self._free = asyncio.Semaphore(concurrency)
        self._client = client({"Authorization": f"Bearer {self._key}"} if self._key else {}, concurrency)
        self._gap_s = 60 * num_sharing / judge.rate_limit_per_min if judge.rate_limit_per_min else 0.0
        self._turns = asyncio.Lock()
        # Earliest times of the next request by the rate limit and by the server's Retry-After.
        self._next = self._open = 0.0

    def request(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the body of a request."""
        return {**self._judge.request, "model": self._judge.model, "messages": messages}

    async def reply(self, request: dict[str, Any], counts: Counter[str]) -> Reply:
        """Return the reply to ``request``. Adds calls, retries, tokens, seconds to counts. Raises JudgeUnavailable."""
        body, failures = json.dumps(request).encode(), 0
        while True:
            status, after_s, problem, reply = await self._send(body, counts)
            if reply is not None:
                return reply
            if status and status not in TRY_AGAIN:
                raise JudgeUnavailable(problem, is_refused=400 <= status < 500)
            failures += not after_s
            if failures >= TRIES:
                raise JudgeUnavailable(f"{problem} ({failures} times)", is_refused=False)
            await self._clock.pause(max(_BACKOFF.pause_s(failures), after_s))
            counts["retries"] += 1

    async def models(self) -> list[str]:
        """Return the names of the models that the server offers. Raises `JudgeUnavailable`."""
        try:
            response, body = await self._fetch("models")
            if response.status_code != httpx.codes.OK:
                raise JudgeUnavailable(self.plain(f"HTTP {response.status_code} {_shown(body)}"), is_refused=True)
            return [str(model["id"]) for model in json.loads(body)["data"]]
        except (httpx.TransportError, asyncio.TimeoutError) as error:
            raise JudgeUnavailable(self.plain(f"{type(error).__name__} {error}".strip()), is_refused=False) from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise JudgeUnavailable("its reply is not a list of models", is_refused=True) from None

    def plain(self, text: str) -> str:
        """Return a text without the key."""
        return text.replace(self._key, "***") if self._key else text

    async def close(self) -> None:
        await self._client.aclose()

    async def _send(self, body: bytes, counts: Counter[str]) -> tuple[int, float, str, Reply | None]:
        """Send one request. Return the status (0: none), the seconds that the server asks to wait, an error text, the
        reply."""
        async with self._free:
            await self._wait_for_turn()
            started = self._clock.monotonic()
            counts["calls"] += 1
            try:
                response, content = await self._fetch("chat/completions", body)
            except asyncio.TimeoutError:
                return 0, 0.0, f"no reply after {self._judge.timeout_s:g} s (reward.judge.timeout_s)", None
            except httpx.TransportError as error:  # refused, reset, cut short
                return 0, 0.0, self.plain(f"{type(error).__name__}: {error}"), None
            finally:
                counts["seconds"] += self._clock.monotonic() - started  # type: ignore[assignment]
            status = response.status_code
            if status != httpx.codes.OK:
                after_s = retry_after_s(response.headers.get("Retry-After", "")) if status in TRY_AGAIN else 0.0
                if late := wait_problem(after_s, self._judge.deadline_s):
                    raise JudgeUnavailable(self.plain(f"HTTP {status}: {late}"), is_refused=False)
                # The server has requested this wait for one request, but it applies to all.
                self._open = max(self._open, self._clock.monotonic() + after_s)
                return status, max(after_s, 0.0), self.plain(f"HTTP {status} {_shown(content)}"), None
            reply, num_tokens = _read(content)
            counts["tokens"] += num_tokens or len(body) + len(content)
            return status, 0.0, "", reply

    async def _fetch(self, path: str, body: bytes | None = None) -> tuple[httpx.Response, bytes]:
        """Fetch a response and its content, with the key masked in it. Raises TimeoutError, TransportError."""
        response_of = fetch(self._client, f"{str(self._judge.url).rstrip('/')}/{path}", body)
        response, content = await self._clock.within(response_of, self._judge.timeout_s)
        # Short keys are not masked: a dummy key such as "none", which servers without keys accept, may be part of a
        # verdict.
        is_secret = len(self._key) >= _SECRET_CHARS
        return response, content.replace(self._key.encode(), b"***") if is_secret else content

    async def _wait_for_turn(self) -> None:
        """Wait until one more request may begin."""
        async with self._turns:  # in order, because a request that is cancelled while it waits must not use up its turn
            begin = max(self._clock.monotonic(), self._next)
            while (wait_s := max(begin, self._open) - self._clock.monotonic()) > 0:
                await self._clock.pause(wait_s)
            self._next = begin + self._gap_s


def _read(content: bytes) -> tuple[Reply, int]:
    """Return the reply and its token count as the server reports it (0: not reported)."""
    if len(content) > MAX_REPLY_BYTES:
        return Reply("", "a reply of more than a mebibyte"), 0
    try:
        returned = json.loads(content)
        choice = returned["choices"][0]
        text = choice["message"].get("content")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return Reply("", f"not a chat completion: {_shown(content)}"), 0
    usage = returned.get("usage")
    tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
    about = f"no text, and finish_reason={choice.get('finish_reason')!r}"
    num_tokens = tokens if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0 else 0
    is_cut = choice.get("finish_reason") == "length"
    return Reply(replace_surrogates(text).strip() if isinstance(text, str) else "", about, is_cut), num_tokens


def _shown(content: bytes) -> str:
    return repr(content[:_SHOWN_BYTES].decode("utf-8", "replace"))

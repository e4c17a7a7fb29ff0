"""The server of a judge: one request and its retries, within the limits of ``reward.judge``.

Requests wait for their turn together: at most so many at once, so many begun a minute, and none before the time that
the server has named to any of them. The key of ``api_key_env`` is read here and leaves in a header alone: no message
has it, not even one that quotes a server which repeats it.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import httpx

from rltrain.base.clock import SYSTEM, Clock
from rltrain.base.env import first_set
from rltrain.base.errors import ConfigError, storable
from rltrain.config.schema.judge import JudgeConfig
from rltrain.rewards.http import MAX_REPLY_BYTES, TRY_AGAIN, client, fetch, retry_after_s, too_long
from rltrain.rewards.judge.reply import Reply

# How often one request is made; those after which the server has named a time are not counted.
TRIES = 6
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_SHOWN_BYTES = 500
# Shorter keys are no secrets.
_SECRET_CHARS = 8
# What is counted, here and where replies are read.
JUDGE_COUNTS = ("calls", "cache_hits", "retries", "parse_failures", "tokens", "seconds")


class Unanswered(Exception):
    """There is no reply, and asking again would not give one now; the text says why."""

    def __init__(self, sentence: str, is_refused: bool) -> None:
        super().__init__(sentence)
        self.is_refused = is_refused
        """The request itself is refused: a wrong key, model or field."""


def api_key(judge: JudgeConfig) -> str:
    """The server's key; "" where there is none. Raises ConfigError where its variable is not set or cannot be one."""
    # Files of secrets end with a line break, which a header may not have.
    key = first_set(judge.api_key_env).strip() if judge.api_key_env else ""
    if judge.api_key_env and not key:
        raise ConfigError(
            f"reward.judge.api_key_env={judge.api_key_env}: this environment variable is not set. Set it where the "
            "run is started."
        )
    if not (key.isascii() and key.isprintable()):  # errors of the connection would quote it
        raise ConfigError(f"reward.judge.api_key_env={judge.api_key_env}: its value has characters that no key has.")
    return key


class JudgeServer:
    """Asks for replies. For use in one event loop.

    num_sharing: processes that ask the same server for this run, each with its share of the limits.
    """

    def __init__(self, judge: JudgeConfig, num_sharing: int = 1, clock: Clock = SYSTEM) -> None:
        concurrency = max(1, judge.max_concurrency // num_sharing)
        self._judge, self._key, self._clock = judge, api_key(judge), clock
        self._free = asyncio.Semaphore(concurrency)
        self._client = client({"Authorization": f"Bearer {self._key}"} if self._key else {}, concurrency)
        self._gap_s = 60 * num_sharing / judge.rate_limit_per_min if judge.rate_limit_per_min else 0.0
        self._turns = asyncio.Lock()
        # Times of the clock: of the next request by the rate, and of the next that the server lets us make.
        self._next = self._open = 0.0

    def request(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The body of a request."""
        return {**self._judge.request, "model": self._judge.model, "messages": messages}

    async def reply(self, request: dict[str, Any], counts: Counter[str]) -> Reply:
        """The reply to ``request``. Adds calls, retries, tokens and seconds to ``counts``. Raises `Unanswered`."""
        body, failures = json.dumps(request).encode(), 0
        while True:
            status, after_s, trouble, reply = await self._once(body, counts)
            if reply is not None:
                return reply
            if status and status not in TRY_AGAIN:
                raise Unanswered(trouble, is_refused=400 <= status < 500)
            failures += not after_s
            if failures >= TRIES:
                raise Unanswered(f"{trouble} ({failures} times)", is_refused=False)
            # Jitter, so that requests that failed together do not come back together.
            pause_s = min(_FIRST_PAUSE_S * 2 ** max(failures - 1, 0), _LONGEST_PAUSE_S) * random.uniform(0.75, 1.25)
            await self._clock.pause(max(pause_s, after_s))
            counts["retries"] += 1

    async def models(self) -> list[str]:
        """Names of the models that the server offers. Raises `Unanswered`."""
        try:
            response, body = await self._fetch("models")
            if response.status_code != httpx.codes.OK:
                raise Unanswered(self.plain(f"HTTP {response.status_code} {_shown(body)}"), is_refused=True)
            return [str(model["id"]) for model in json.loads(body)["data"]]
        except (httpx.TransportError, asyncio.TimeoutError) as error:
            raise Unanswered(self.plain(f"{type(error).__name__} {error}".strip()), is_refused=False) from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Unanswered("its reply is no list of models", is_refused=True) from None

    def plain(self, text: str) -> str:
        """A text without the key."""
        return text.replace(self._key, "***") if self._key else text

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _once(self, body: bytes, counts: Counter[str]) -> tuple[int, float, str, Reply | None]:
        """One request: the status (0: none), the seconds that the server asks to wait, what went wrong, the reply."""
        async with self._free:
            await self._turn()
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
                if late := too_long(after_s, self._judge.deadline_s):
                    raise Unanswered(self.plain(f"HTTP {status}: {late}"), is_refused=False)
                # It has said this to one request and means all.
                self._open = max(self._open, self._clock.monotonic() + after_s)
                return status, max(after_s, 0.0), self.plain(f"HTTP {status} {_shown(content)}"), None
            reply, num_tokens = _read(content)
            counts["tokens"] += num_tokens or len(body) + len(content)
            return status, 0.0, "", reply

    async def _fetch(self, path: str, body: bytes | None = None) -> tuple[httpx.Response, bytes]:
        """A response and its content, in which a server may repeat the key. Raises TimeoutError, TransportError."""
        asked = fetch(self._client, f"{str(self._judge.url).rstrip('/')}/{path}", body)
        response, content = await self._clock.within(asked, self._judge.timeout_s)
        # A word such as "none", which servers without keys are given, may be a part of a verdict.
        is_secret = len(self._key) >= _SECRET_CHARS
        return response, content.replace(self._key.encode(), b"***") if is_secret else content

    async def _turn(self) -> None:
        """Wait until one more request may begin."""
        async with self._turns:  # one after the other, as who gives up meanwhile must not have taken a turn
            begin = max(self._clock.monotonic(), self._next)
            while (wait_s := max(begin, self._open) - self._clock.monotonic()) > 0:
                await self._clock.pause(wait_s)
            self._next = begin + self._gap_s


def _read(content: bytes) -> tuple[Reply, int]:
    """The reply, and the tokens that it says it has cost (0: it does not say)."""
    if len(content) > MAX_REPLY_BYTES:
        return Reply("", "a reply of more than a mebibyte"), 0
    try:
        returned = json.loads(content)
        choice = returned["choices"][0]
        text = choice["message"].get("content")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return Reply("", f"no reply of a chat: {_shown(content)}"), 0
    usage = returned.get("usage")
    tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
    about = f"no text, and finish_reason={choice.get('finish_reason')!r}"
    num_tokens = tokens if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0 else 0
    is_cut = choice.get("finish_reason") == "length"
    return Reply(storable(text).strip() if isinstance(text, str) else "", about, is_cut), num_tokens


def _shown(content: bytes) -> str:
    return repr(content[:_SHOWN_BYTES].decode("utf-8", "replace"))

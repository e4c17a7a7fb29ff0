"""Remote scorer over HTTP: POST {data_source, solution_str, ground_truth, extra_info}, reply {"score": ...}.

It runs in the reward worker itself, not in a slot, because it only parses JSON from the server. Every response has a
hard deadline that includes all retries and slow replies. A socket timeout restarts with every byte, whereas a coroutine
can be cancelled at a deadline; hence httpx and asyncio.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from rltrain.common.clock import SYSTEM, Backoff, Clock
from rltrain.common.errors import RewardError
from rltrain.rewards.http import MAX_REPLY_BYTES, TRY_AGAIN, client, fetch, retry_after_s
from rltrain.rewards.processes.score import MAX_ERROR_CHARS, Score, ScorerCall, parse_result

_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
_BACKOFF = Backoff(0.05, 2.0)


class RemoteScorer:
    """Scores responses at ``url``: ``timeout_s`` per response with all retries, ``concurrency`` responses at a time.

    ``headers`` are sent with every request. Connections are reused.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float,
        concurrency: int,
        headers: Mapping[str, Any] | None = None,
        clock: Clock = SYSTEM,
    ):
        self._url, self._timeout_s, self._clock = url, timeout_s, clock
        # One loop for the lifetime of the scorer, because connections belong to the loop that opened them.
        self._loop = asyncio.new_event_loop()
        # Acquired before the deadline starts, because a response's time starts with its request.
        self._free = asyncio.Semaphore(concurrency)
        self._client = client({name: str(value) for name, value in (headers or {}).items()}, concurrency)

    def score(self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Score:
        """Score one response. Connection errors, 429 and 5xx are retried until the deadline."""
        return self.score_all([(data_source, solution_str, ground_truth, extra_info)])[0]

    def score_all(self, calls: Sequence[ScorerCall]) -> list[Score]:
        """Score responses concurrently and return the scores in their order."""
        return self._loop.run_until_complete(self._gather(calls))

    def score_truth(self, call: ScorerCall) -> Score:
        """Score one response. Raises RewardError if there is no score."""
        score = self.score(*call)
        if score.status != "ok":
            raise RewardError(f"reward.url={self._url!r} gives no score for data_source={call[0]!r}: {score.error}")
        return score

    def take_printed(self) -> str:
        """Return "", because the scorer prints on the server."""
        return ""

    def close(self) -> None:
        self._loop.run_until_complete(self._client.aclose())
        self._loop.close()

    async def _gather(self, calls: Sequence[ScorerCall]) -> list[Score]:
        return await asyncio.gather(*map(self._score, calls))

    async def _score(self, call: ScorerCall) -> Score:
        problems = ["no reply"]
        body = json.dumps(dict(zip(_NAMES, call, strict=True)), default=str).encode()
        async with self._free:
            try:
                score = await self._clock.within(self._until_scored(body, problems), self._timeout_s)
            except asyncio.TimeoutError:
                sentence = f"no score from {self._url} after {self._timeout_s:g} s (reward.timeout_s): {problems[-1]}"
                score = Score(None, "timeout", sentence)
        return score.with_call(call)

    async def _until_scored(self, body: bytes, problems: list[str]) -> Score:
        """Retry until there is a score. Errors are appended to ``problems``."""
        while True:
            after_s = 0.0
            try:
                response, reply = await fetch(self._client, self._url, body)
                if response.status_code not in TRY_AGAIN:
                    return self._read(response.status_code, reply)
                problems.append(f"HTTP {response.status_code} {reply[:200]!r}")
                # The server may request a wait of any length, which the response's deadline limits.
                after_s = retry_after_s(response.headers.get("Retry-After", ""))
            except httpx.TransportError as error:  # refused, reset, cut short
                problems.append(f"{type(error).__name__}: {error}")
            await self._clock.pause(max(_BACKOFF.pause_s(len(problems) - 1), after_s))

    def _read(self, status: int, reply: bytes) -> Score:
        if len(reply) > MAX_REPLY_BYTES:
            return Score(None, "crashed", f"{self._url}: a reply of more than a mebibyte")
        if status != httpx.codes.OK:
            return Score(None, "crashed", f"{self._url}: HTTP {status} {reply[:MAX_ERROR_CHARS]!r}")
        try:
            returned = json.loads(reply)
            value, extras = parse_result(returned if isinstance(returned, dict) else {})
        except (ValueError, RecursionError) as error:
            return Score(None, "rejected", f"{self._url}: {error}; it sent {reply[:200]!r}")
        return Score(value, "ok", None, extras)

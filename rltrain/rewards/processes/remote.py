"""A scorer behind HTTP: POST {data_source, solution_str, ground_truth, extra_info}, and {"score": ...} comes back.

It runs in the reward worker itself, not in a slot, because nothing but JSON is read from the other side. Every answer
has a hard deadline that holds for all its retries and for a reply that trickles. A socket's timeout cannot give that,
since it starts anew with every byte; cancelling a coroutine can, hence httpx and asyncio. Redirects and proxies are not
followed: an answer goes to the address that the user gave, or nowhere.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import httpx

from rltrain.base.clock import SYSTEM, Clock
from rltrain.base.errors import RewardError
from rltrain.rewards.http import MAX_REPLY_BYTES, TRY_AGAIN, client, fetch, retry_after_s
from rltrain.rewards.processes.score import MAX_ERROR_CHARS, Score, ScorerCall, read_returned

_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


class RemoteScorer:
    """Scores answers at ``url``: ``timeout_s`` per answer with all its retries, ``concurrency`` answers at a time.

    ``headers`` go with every request. Connections are kept from answer to answer.
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
        # One loop for the life of the scorer, because connections belong to the loop that opened them.
        self._loop = asyncio.new_event_loop()
        # Outside the deadline: an answer's time starts when its request does.
        self._free = asyncio.Semaphore(concurrency)
        self._client = client({name: str(value) for name, value in (headers or {}).items()}, concurrency)

    def score(self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> Score:
        """Score one answer. Failing connections, 429 and 5xx are tried again until the deadline."""
        return self.score_all([(data_source, solution_str, ground_truth, extra_info)])[0]

    def score_all(self, calls: Sequence[ScorerCall]) -> list[Score]:
        """Score answers, several at a time; in their order."""
        return self._loop.run_until_complete(self._gather(calls))

    def score_truth(self, call: ScorerCall) -> Score:
        """Score one answer. Raises RewardError unless a score comes back."""
        score = self.score(*call)
        if score.status != "ok":
            raise RewardError(f"reward.url={self._url!r} gives no score for data_source={call[0]!r}: {score.error}")
        return score

    def take_printed(self) -> str:
        """Nothing: what the scorer prints is at the other end."""
        return ""

    def close(self) -> None:
        """Close the connections."""
        self._loop.run_until_complete(self._client.aclose())
        self._loop.close()

    async def _gather(self, calls: Sequence[ScorerCall]) -> list[Score]:
        return await asyncio.gather(*map(self._score, calls))

    async def _score(self, call: ScorerCall) -> Score:
        trouble = ["no answer"]
        body = json.dumps(dict(zip(_NAMES, call, strict=True)), default=str).encode()
        async with self._free:
            try:
                score = await self._clock.within(self._until_scored(body, trouble), self._timeout_s)
            except asyncio.TimeoutError:
                sentence = f"no score from {self._url} after {self._timeout_s:g} s (reward.timeout_s): {trouble[-1]}"
                score = Score(None, "timeout", sentence)
        return score.about(call)

    async def _until_scored(self, body: bytes, trouble: list[str]) -> Score:
        """Ask until there is a score. What went wrong meanwhile is added to ``trouble``."""
        for attempt in count():
            pause_s = min(_FIRST_PAUSE_S * 2 ** min(attempt, 10), _LONGEST_PAUSE_S)
            try:
                response, reply = await fetch(self._client, self._url, body)
                if response.status_code not in TRY_AGAIN:
                    return self._read(response.status_code, reply)
                trouble.append(f"HTTP {response.status_code} {reply[:200]!r}")
                # However long a server asks for: the answer's deadline ends the wait.
                pause_s = max(pause_s, retry_after_s(response.headers.get("Retry-After", "")))
            except httpx.TransportError as error:  # refused, reset, cut short
                trouble.append(f"{type(error).__name__}: {error}")
            await self._clock.pause(pause_s)
        raise AssertionError("count() has no end")

    def _read(self, status: int, reply: bytes) -> Score:
        if len(reply) > MAX_REPLY_BYTES:
            return Score(None, "crashed", f"{self._url}: a reply of more than a mebibyte")
        if status != httpx.codes.OK:
            return Score(None, "crashed", f"{self._url}: HTTP {status} {reply[:MAX_ERROR_CHARS]!r}")
        try:
            returned = json.loads(reply)
            value, extras = read_returned(returned if isinstance(returned, dict) else {})
        except (ValueError, RecursionError) as error:
            return Score(None, "rejected", f"{self._url}: {error}; it sent {reply[:200]!r}")
        return Score(value, "ok", None, extras)

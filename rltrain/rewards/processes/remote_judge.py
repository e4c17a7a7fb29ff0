"""Scorer that uses a remote judge, alone or together with the scorer of the data source.

An event loop in a separate thread of this process sends the requests for many responses concurrently.
Replies are cached on disk, keyed by a hash of the request. SQLite lets several processes share the file, with its
default journal, because the faster one (WAL) does not work on network storage.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from rltrain.common.clock import SYSTEM, Clock
from rltrain.common.errors import ConfigError, JudgeError, RewardError, RltrainError
from rltrain.config.schema import ScoringConfig
from rltrain.rewards.judge.message import QuestionMaker, messages_of
from rltrain.rewards.judge.reply import Reply
from rltrain.rewards.judge.server import JudgeServer, JudgeUnavailable
from rltrain.rewards.processes.judging import MAX_REPLIES, Judging
from rltrain.rewards.processes.score import JUDGE, NO_PROMPT, Score, ScorerCall


class RemoteJudge:
    """Scores responses by ``reward.judge.url``. Thread-safe.

    num_sharing: number of processes of this run that use the same judge. Raises ConfigError for an unusable template,
    expression, cache or key.
    """

    def __init__(self, cfg: ScoringConfig, num_sharing: int = 1, clock: Clock = SYSTEM) -> None:
        self._judge, self._clock = cfg.reward.judge, clock
        judge = self._judge
        self._judging = Judging(cfg)
        self._cache = ReplyCache(judge.cache) if judge.cache else None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="judge", daemon=True)
        self._thread.start()
        self._server = JudgeServer(judge, num_sharing, clock)
        self._running: dict[asyncio.Task[Any], int] = {}  # task -> number of its batch
        self._counts: Counter[str] = Counter()
        self._warnings: dict[str, None] = {}
        self._counting = threading.Lock()

    def score_all(
        self,
        calls: Sequence[ScorerCall],
        questions: Sequence[QuestionMaker],
        within_s: float | None = None,
        batch: int = 0,
    ) -> list[Score]:
        """Score responses. ``questions`` are created only for responses that the judge scores.

        within_s: deadline per response, outside of a step; None: until `cancel` is called with the batch.
        """
        rules = self._judging.rules(calls)
        places = [place for place, rule in enumerate(rules) if self._judging.needs_judge(rule)]
        chosen = [calls[place] for place in places], [questions[place] for place in places]
        judged = dict(zip(places, self._in_loop(self._judge_all(*chosen, within_s, batch)), strict=True))
        return [
            self._judging.combine(rule, judged[place]).with_call(call) if place in judged else cast(Score, rule)
            for place, (rule, call) in enumerate(zip(rules, calls, strict=True))
        ]

    def score_truth(self, call: ScorerCall, question: QuestionMaker) -> Score:
        """Let the judge score a ground truth as the response, even if the scorer suffices.

        Raises JudgeError if the server does not reply now, RewardError if it rejects the request or its reply has no
        score.
        """
        rule = self._judging.rule_of_truth(call)
        judged = self._in_loop(self._judge_all([call], [question], self._judge.deadline_s))[0]
        if judged.status != "ok":
            kind = RewardError if judged.status == "rejected" else JudgeError
            raise kind(f"reward.judge.url={self._judge.url} gives no score for data_source={call[0]!r}: {judged.error}")
        return self._judging.combine(rule, judged)

    def cancel(self, batch: int | None = None) -> None:
        """Cancel the judging of one batch, or of all. The batch is specified, because the next one may have started
        meanwhile."""

        def cancel_tasks() -> None:
            for task, its_batch in self._running.items():
                if batch in (None, its_batch):
                    task.cancel()

        self._loop.call_soon_threadsafe(cancel_tasks)

    def take_counts(self) -> Counter[str]:
        """Return and reset the judge's costs, by `JUDGE_COUNTS`."""
        with self._counting:
            counts, self._counts = self._counts, Counter()
        return counts

    def take_printed(self) -> str:
        """Return and clear the output of scorer and function, and warnings about the cache."""
        with self._counting:
            warnings, self._warnings = self._warnings, {}
        return self._judging.take_printed() + "".join(f"{line}\n" for line in warnings)

    def close(self) -> None:
        """End the slots' processes and close the connections."""
        self._judging.close()
        self.cancel()
        self._in_loop(self._server.close())
        self._in_loop(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._cache:
            self._cache.close()

    async def _judge_all(
        self, calls: Sequence[ScorerCall], questions: Sequence[QuestionMaker], within_s: float | None, batch: int = 0
    ) -> list[Score]:
        tasks = [
            asyncio.ensure_future(self._clock.within(self._judged(call, question), within_s))
            for call, question in zip(calls, questions, strict=True)
        ]
        self._running.update(dict.fromkeys(tasks, batch))
        try:
            scores = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            for task in tasks:
                del self._running[task]
        return [score if isinstance(score, Score) else self._failed(score) for score in scores]

    async def _judged(self, call: ScorerCall, question: QuestionMaker) -> Score:
        counts: Counter[str] = Counter()
        try:
            asked = await asyncio.to_thread(question)
            request = self._server.request(messages_of(self._judging.message(call, asked), asked.images))
            return await self._read_reply(request, call, counts)
        finally:
            with self._counting:
                self._counts.update(counts)

    async def _read_reply(self, request: dict[str, Any], call: ScorerCall, counts: Counter[str]) -> Score:
        cached = await asyncio.to_thread(self._cached, request)
        # A cached reply is used only if it can be parsed, because the expression or function may have changed since
        # then.
        if cached is not None and (score := await self._score_of(Reply(cached), call)).status == "ok":
            counts["cache_hits"] += 1
            return score
        for attempt in range(MAX_REPLIES):
            counts["retries"] += attempt > 0
            reply = await self._server.reply(request, counts)
            score = await self._score_of(reply, call)
            if score.status == "ok":
                await asyncio.to_thread(self._store, request, reply.text)
                return score
            counts["parse_failures"] += 1
        return replace(score, status="rejected", error=f"{score.error} (after {MAX_REPLIES} replies)")

    async def _score_of(self, reply: Reply, call: ScorerCall) -> Score:
        return await asyncio.to_thread(self._judging.read, reply, call)

    def _cached(self, request: dict[str, Any]) -> str | None:
        """Return the cached reply. If the cache fails, the judge is simply called again."""
        try:
            return self._cache.get(request) if self._cache else None
        except sqlite3.Error as error:
            self._warn(f"reward.judge.cache={self._judge.cache} cannot be read: {error}")
            return None

    def _store(self, request: dict[str, Any], reply: str) -> None:
        try:
            if self._cache:
                self._cache.put(request, reply)
        except sqlite3.Error as error:
            self._warn(f"reward.judge.cache={self._judge.cache} cannot be written: {error}")

    def _warn(self, sentence: str) -> None:
        with self._counting:
            self._warnings[sentence] = None

    def _failed(self, error: BaseException) -> Score:
        if isinstance(error, asyncio.CancelledError | asyncio.TimeoutError):
            seconds = f"{self._judge.deadline_s:g} s (reward.judge.deadline_s)"
            return Score(None, "timeout", f"not judged within {seconds}", kind=JUDGE)
        if isinstance(error, JudgeUnavailable):
            sentence = f"{self._judge.url}: {error}"
            return Score(None, "rejected" if error.is_refused else "crashed", sentence, kind=JUDGE)
        if isinstance(error, RltrainError):
            return Score(None, "rejected", str(error), kind=JUDGE if error.passing else NO_PROMPT)
        raise error

    def _in_loop(self, awaitable: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(awaitable, self._loop).result()


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

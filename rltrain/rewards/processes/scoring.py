"""Scoring of a step's responses by the reward pool, including requests to a judge on the devices.

A slow response delays the others of its call, so a batch is split into several small calls per worker.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.util import ActorPool

from rltrain.common.columns import names as c
from rltrain.common.errors import JudgeError, RewardError
from rltrain.rewards.processes.actors import RewardWorkers
from rltrain.rewards.processes.score import JUDGE, NO_PROMPT, PendingScore, Score
from rltrain.runtime.samples import Samples, StoredRows

# Small calls let idle workers take over from slow ones, but each call costs a round trip through Ray.
_CALLS_PER_WORKER = 4
# Maximum wait for workers, because Python handles signals only between waits (Ray waits in native code).
POLL_S = 0.5
# Seconds per response that a reward worker may take to replace a killed process.
_RESTART_S = 5.0
_PHASE = "scoring answers"


@dataclass
class _Call:
    """Responses that a worker scores together [k]."""

    texts: Any
    """Reference of a list."""
    rows: NDArray[np.int64]
    positions: NDArray[np.int64]
    """Indices into the list."""
    scores: dict[int, Score | PendingScore] = field(default_factory=dict)
    """Scores by index within the call; empty before the call returns."""
    messages: Any = None
    """Reference of a list of prompts for a judge on the devices."""
    node: int = 0
    """Index of the node that stores ``messages``."""


class Scoring:
    """Responses in the pool, dealt out to workers as they become free.

    ``seconds`` is the scoring time so far, summed over all workers; ``judged`` counts a judge's costs. With a judge on
    the run's devices, `messages` returns its prompts, `add_replies` takes its replies, and `collect` comes last.
    """

    def __init__(self, pool: RewardWorkers, batch: int, split: str, total: int) -> None:
        self.seconds = 0.0
        self.judged: Counter[str] = Counter()
        self._is_over = False
        self._pool, self._batch = pool, batch
        self._workers = ActorPool(pool.lanes)
        self._busy: dict[int, int] = {}  # number of a submitted call -> number of its worker
        self._split = split
        self._total = total
        # Calls are small, so that a slow response delays few others.
        self._answers_per_call = max(1, -(-total // (_CALLS_PER_WORKER * len(pool.lanes))))
        self._calls: list[_Call] = []  # in the order of `add`
        # Submitted calls by number, with the indices of the responses that get their scores.
        self._submitted: list[tuple[_Call, Sequence[int]]] = []
        self._failures: list[Score] = []

    def add(self, texts: Any, rows: np.ndarray, positions: np.ndarray) -> None:
        """Score the texts at ``positions`` [k] of a list (by reference) as responses to ``rows`` [k]."""
        rows, positions = np.asarray(rows, dtype=np.int64), np.asarray(positions, dtype=np.int64)
        if rows.shape != positions.shape:
            raise ValueError(f"{len(rows)} rows for {len(positions)} positions")
        for first in range(0, len(rows), self._answers_per_call):
            part = slice(first, first + self._answers_per_call)
            call = _Call(texts, rows[part], positions[part])
            self._calls.append(call)
            self._submit("score", call, range(len(call.rows)))
        self.advance()

    def _submit(self, method: str, call: _Call, places: Sequence[int], *arguments: Any) -> None:
        number = len(self._submitted)
        self._submitted.append((call, places))
        answers = (self._batch, number), self._split, [call.texts], call.rows[places], call.positions[places]
        self._workers.submit(self._dispatch, (method, *answers, *arguments))

    def _dispatch(self, worker: Any, call: tuple[Any, ...]) -> Any:
        method, (_, number), _, _, rows, *_ = call
        if self._is_over:
            return self._timed_out(number, len(rows))
        self._busy[number] = self._pool.workers.index(worker)
        return getattr(worker, method).remote(*call[1:])

    def _timed_out(self, number: int, count: int) -> Any:
        """Return the result of a worker whose wait for the judge timed out."""
        sentence = f"not judged within {self._pool.reward.judge.deadline_s:g} s (reward.judge.deadline_s)"
        scores = [Score(None, "timeout", sentence, kind=JUDGE)] * count
        return ray.put(((self._batch, number), scores, 0.0, Counter(), ("driver", ""), None))

    def advance(self) -> None:
        """Process finished calls and submit waiting ones, without blocking."""
        while self._take(wait_s=0):
            pass

    def messages(self, wanted: NDArray[np.bool_]) -> Samples:
        """Wait until every response has its score or waits for a judge on the devices. Return the prompts for the
        judge.

        wanted: mask [responses, in the order of `add`] of responses whose score is used; others are not judged. The
        returned samples have one prompt each, with ``judge_message`` and ``message_length``.
        """
        self._finish()
        first, lengths, parts = 0, list[int](), list[StoredRows]()
        for call in self._calls:
            pending = []
            for place, score in list(call.scores.items()):
                if isinstance(score, PendingScore) and wanted[first + place]:
                    pending.append(score)
                elif isinstance(score, PendingScore):
                    call.scores[place] = Score(0.0, "ok")
            first += len(call.scores)
            if pending:
                ids, rows = len(lengths) + np.arange(len(pending)), np.array([score.message for score in pending])
                parts.append(StoredRows(call.messages, (c.JUDGE_MESSAGE,), ids, rows, call.node))
                lengths += [score.length for score in pending]
        samples = Samples(len(lengths))
        samples.update({c.MESSAGE_LENGTH: np.array(lengths, dtype=np.int64)})
        samples.attach(parts)
        return samples

    def add_replies(self, replies: Samples, costs: Counter[str], *, again: bool) -> None:
        """Parse the judge's replies, column ``judge_reply`` of the samples from `messages`. Waits for the scores.

        costs: of these replies, by `JUDGE_COUNTS`. again: include responses with an unreadable reply in the next
        `messages`. Raises RewardError if the judge has exceeded its token limit.
        """
        self.judged.update(costs)
        first = 0
        for call in self._calls:
            pending = {place: score for place, score in call.scores.items() if isinstance(score, PendingScore)}
            if pending:
                request = replies.request(first + np.arange(len(pending)), [c.JUDGE_REPLY])
                # Sent as tuples, because a `Request` would import torch in the scoring processes.
                parts = [(part.ref, part.ids, part.rows) for part in request.parts]
                self._submit("read", call, list(pending), list(pending.values()), parts, again)
                first += len(pending)
        self._finish()
        self._pool.count_tokens(costs)

    def collect(self) -> Columns:
        """Wait for all scores and return them as columns, in the order in which responses were added.

        The columns are ``score``, ``reward_failed`` and ``reward_timeout`` (0 or 1), ``scorer/NAME`` per extra as
        float64 (NaN if missing) or texts (objects, "" if missing), and ``reward_error`` (texts) if a response failed.
        Raises RewardError if more than half of the responses fail.
        """
        self._finish()
        scores = [score for call in self._calls for score in call.scores.values() if isinstance(score, Score)]
        return columns_of(scores, self._pool.reward.on_error)

    def _finish(self) -> None:
        """Wait for all submitted calls."""
        started = last_result = time.monotonic()
        # A live worker enforces its deadlines. So if it is silent for longer than a whole call may take, the cause is
        # not a slow response.
        watch, per_call, timeout_s = self._pool.watch, self._answers_per_call, self._pool.reward.timeout_s
        judge = self._pool.reward.judge
        deadline_s = judge.deadline_s if judge.url else math.inf
        more_s = watch.late_s + per_call * _RESTART_S + (deadline_s if judge.url else 0.0)
        limit = f"reward.timeout_s={timeout_s} for each of {per_call} answers, and {more_s:g} s"
        while self._workers.has_next():
            watch.check()
            self._is_over = time.monotonic() - started > deadline_s
            if self._is_over:  # repeated, because a worker may only now have reached the judge
                self._pool.cancel_judging(self._batch)
            if self._take(min(POLL_S, deadline_s)):
                last_result = time.monotonic()
            elif (seconds := time.monotonic() - last_result) > more_s + per_call * timeout_s:
                raise self._pool.unresponsive(_PHASE, sorted({*self._busy.values()}), seconds, limit)

    def _take(self, wait_s: float) -> bool:
        if not self._workers.has_next():
            return False
        try:
            with self._pool.errors(_PHASE, sorted({*self._busy.values()})):
                (_, number), scores, seconds, judged, (worker, printed), messages = self._workers.get_next_unordered(
                    timeout=wait_s
                )
        except TimeoutError:
            return False
        call, places = self._submitted[number]
        call.scores.update(zip(places, scores, strict=True))
        number_of_worker = self._busy.pop(number, None)
        if messages is not None and number_of_worker is not None:
            call.messages, call.node = messages, self._pool.node_of(number_of_worker)
        self.seconds += seconds
        self.judged.update(judged)
        self._pool.log.append(worker, printed)
        final = [score for score in scores if isinstance(score, Score)]
        self._pool.log.failures(final)
        self._failures += [score for score in final if score.status != "ok"]
        # Relative to all responses of the batch, not only scored ones, so that a few early failures do not end the run.
        if 2 * len(self._failures) > self._total:
            raise _too_many(self._failures, self._total)
        self._pool.count_tokens(judged)
        return True


def _too_many(failures: list[Score], total: int) -> RewardError | JudgeError:
    by_judge, no_prompt = ([score for score in failures if score.kind == kind] for kind in (JUDGE, NO_PROMPT))
    if 2 * (len(by_judge) + len(no_prompt)) > len(failures):
        if len(no_prompt) > len(by_judge):  # a retry could not create these prompts either
            return RewardError(_failure_report("the prompt of the judge", no_prompt, total))
        report = _failure_report("reward.judge", by_judge, total)
        return JudgeError(f"{report}\nRepair the judge, and run the same command again.")
    return RewardError(_failure_report("the reward function", failures, total))


def _failure_report(subject: str, failures: list[Score], total: int) -> str:
    statuses = [score.status for score in failures]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(sorted(statuses)))
    return (
        f"{subject} fails on more than half of a batch (at least {len(failures)} of {total}: {counts}). "
        f"The first failure:\n{failures[0].report()}"
    )


logger = logging.getLogger(__name__)

Columns = dict[str, np.ndarray]

_TIMEOUT_ALARM = 0.1


def columns_of(scores: Sequence[Score], on_error: float) -> Columns:
    """Return the scores as columns; see `Scoring.collect`."""
    columns = {
        c.SCORE: np.array([on_error if score.value is None else score.value for score in scores], np.float64),
        c.REWARD_FAILED: np.array([score.status != "ok" for score in scores], np.float64),
        c.REWARD_TIMEOUT: np.array([score.status == "timeout" for score in scores], np.float64),
    }
    for name in sorted({name for score in scores for name in score.extras}):
        values = [score.extras.get(name) for score in scores]
        # If an extra is a number for some responses and a text for others, it is a metric, and the texts count as
        # missing values.
        if any(isinstance(value, float) for value in values):
            numbers = [value if isinstance(value, float) else np.nan for value in values]
            columns[c.SCORER + name] = np.array(numbers, np.float64)
        else:
            columns[c.SCORER + name] = np.array([value or "" for value in values], dtype=object)
    if columns[c.REWARD_FAILED].any():
        columns[c.REWARD_ERROR] = np.array([score.error or "" for score in scores], dtype=object)
    num_timeouts = sum(score.status == "timeout" and score.kind != JUDGE for score in scores)
    if num_timeouts > _TIMEOUT_ALARM * len(scores):
        logger.warning("%d of %d responses ran out of reward.timeout_s", num_timeouts, len(scores))
    return columns

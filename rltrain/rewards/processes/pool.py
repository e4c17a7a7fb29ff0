"""The reward pool: Ray actors that fetch answers where they were produced and score them in killable processes."""

import logging
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rltrain import columns as c
from rltrain.data.rows import Rows
from rltrain.env import adopt, driver_environment
from rltrain.errors import RewardError, WorkerError, WorkerLost
from rltrain.rewards.custom import CustomReward
from rltrain.rewards.processes.limits import Limits
from rltrain.rewards.processes.output import RewardLog
from rltrain.rewards.processes.remote import RemoteScorer, check_address
from rltrain.rewards.processes.slot import Score, Slot

logger = logging.getLogger(__name__)

Columns = dict[str, np.ndarray]
Job = tuple[Any, np.ndarray, np.ndarray]

_CHUNKS_PER_WORKER = 4
_TIMEOUT_ALARM = 0.1
_LEAST_MEMORY_MB = 256
# A signal is heard when a look at the workers ends: Ray waits on below Python.
_POLL_S = 0.5
# What a reward worker may take beside the time its answers have, at all and to replace the process of one that ran out of it.
_LATE_S = 120.0
_RESTART_S = 5.0


@dataclass(frozen=True)
class _Piece:
    """Answers ``positions`` of one list of texts, and the rows they answer."""

    texts: Any
    rows: np.ndarray
    positions: np.ndarray


class RewardWorker:
    """One slot (or one remote scorer: address, concurrency, headers) and the rows of every split; runs as a Ray actor."""

    def __init__(
        self,
        custom: CustomReward | None,
        limits: Limits,
        remote: tuple[str, int, dict[str, Any]] | None,
        splits: dict[str, Any],
        environment: dict[str, str],
    ):
        import ray

        adopt(environment)
        self._rows: dict[str, Rows] = {name: ray.get(reference) for name, reference in splits.items()}
        self._scorer: Slot | RemoteScorer
        if remote is not None:
            self._scorer = RemoteScorer(remote[0], limits.timeout_s, *remote[1:])
        else:
            self._scorer = Slot(custom, limits.timeout_s, limits.memory_mb, limits.allow_code_execution)

    def score(
        self, split: str, texts: list[Any], rows: np.ndarray, positions: np.ndarray
    ) -> tuple[list[Score], float, str]:
        """Scores of the texts at ``positions`` of the list behind the one reference in ``texts``, seconds it took, what was printed."""
        import ray

        started = time.perf_counter()
        answers = ray.get(texts[0])
        calls = [self._call(split, row, answers[at]) for row, at in zip(rows.tolist(), positions.tolist(), strict=True)]
        scores = self._scorer.score_all(calls)
        return scores, time.perf_counter() - started, self._scorer.take_printed()

    def check(self, split: str, rows: list[int] | None) -> tuple[list[Score], str]:
        """Score rows (by default the first of each data source) with their own ground truth as the answer; and what was printed."""
        of_split = self._rows[split]
        chosen = list(of_split.data_sources().values()) if rows is None else rows
        calls = [self._call(split, row, str(of_split[row].ground_truth)) for row in chosen]
        return [self._scorer.check(call) for call in calls], self._scorer.take_printed()

    def close(self) -> None:
        """End the slot's process."""
        self._scorer.close()

    def _call(self, split: str, number: int, answer: str) -> tuple[str, str, Any, dict[str, Any]]:
        row = self._rows[split][number]
        return row.data_source, answer, row.ground_truth, row.extra_info


class RewardPool:
    """``num_workers`` reward workers, spread over the nodes of the running Ray.

    ``splits`` maps a name ("train", "val") to a reference of its ``Rows``. A score that could not be had counts
    ``on_error``, and is shown in the ``reward_failed`` column. With ``url`` answers are scored there, at most
    ``url_concurrency`` at a time by each worker. ``log_file`` gets what scorers print, see `RewardLog`.
    """

    def __init__(
        self,
        custom: CustomReward | None,
        num_workers: int,
        timeout_s: float,
        on_error: float,
        splits: dict[str, Any],
        memory_limit_mb: int = 4096,
        allow_code_execution: bool = False,
        url: str | None = None,
        url_concurrency: int = 8,
        url_headers: Mapping[str, Any] | None = None,
        log_file: Path | None = None,
    ):
        import ray

        if num_workers < 1:
            raise RewardError(f"reward.num_workers={num_workers} must be at least 1.")
        if memory_limit_mb and memory_limit_mb < _LEAST_MEMORY_MB:
            raise RewardError(
                f"reward.memory_limit_mb={memory_limit_mb} must be 0 (no limit) or at least {_LEAST_MEMORY_MB}."
            )
        if url is not None and custom is not None:
            raise RewardError("reward.url and custom_reward_function.path both say how to score; give one of them.")
        if url is not None:
            check_address(url, url_concurrency)
        remote = None if url is None else (url, url_concurrency, dict(url_headers or {}))
        limits = Limits(timeout_s, memory_limit_mb, allow_code_execution)
        self.on_error = on_error
        self._timeout_s = timeout_s
        self._custom = custom
        self._log = RewardLog(log_file)
        actor = ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy="SPREAD")(RewardWorker)
        self._workers: list[Any] = [
            actor.remote(custom, limits, remote, splits, driver_environment()) for _ in range(num_workers)
        ]

    def check(self, split: str, rows: Sequence[int] | None = None) -> list[Score]:
        """Score rows with their ground truth as the answer, on every worker, before anything is trained.

        ``rows`` is by default the first of each data source. Raises RewardError where nothing could ever be scored: no
        scorer for a source, a reward file that does not import, a function of the user's own that gives no number for any
        of the rows. Where it is one row of several, or a built-in scorer, it is only logged: a bare ground truth need not look
        like an answer.
        """
        calls = [worker.check.remote(split, rows if rows is None else list(rows)) for worker in self._workers]
        results = [_get(call) for call in calls]
        for number, (_, printed) in enumerate(results):
            self._log.printed(f"worker {number}", printed)
        scores = results[0][0]
        if self._custom and scores and all(score.status in ("crashed", "rejected") for score in scores):
            raise RewardError(
                f"{self._custom.name!r} in {self._custom.path!r} gives no number for any answer it was tried on: the ground "
                f"truth of each data source, alone and in the usual forms. The first:\n{scores[0].report()}\n"
                f"Try it by hand: python -m rltrain.rewards.try {self._custom.path} DATA.parquet"
            )
        self._log.failures(scores)
        return scores

    def score(self, split: str, jobs: Sequence[Job]) -> Columns:
        """Score answers that are all there. Returns columns over all jobs in their order; see `Scoring`."""
        scoring = self.begin(split, sum(len(rows) for _, rows, _ in jobs))
        for job in jobs:
            scoring.add(*job)
        return scoring.finish()

    def begin(self, split: str, total: int) -> "Scoring":
        """Score ``total`` answers as they arrive."""
        return Scoring(self._workers, split, total, self.on_error, self._log, self._timeout_s)

    def shutdown(self) -> None:
        """End all workers and their processes."""
        import ray

        closing = [worker.close.remote() for worker in self._workers]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=5)
        for worker in self._workers:
            ray.kill(worker)
        self._workers = []


class Scoring:
    """Answers on their way through the pool, dealt out to workers as these come free.

    A job is (reference of a list of texts, rows [k] they answer, positions [k] in that list); texts are fetched by the workers,
    never here. ``seconds``: what scoring has cost so far, over all workers.
    """

    def __init__(
        self,
        workers: Sequence[Any],
        split: str,
        total: int,
        on_error: float,
        log: RewardLog | None = None,
        timeout_s: float = math.inf,
    ) -> None:
        self._timeout_s = timeout_s
        self.seconds = 0.0
        self._log = log or RewardLog()
        self._split = split
        self._total = total
        self._on_error = on_error
        # Small enough that a slow answer holds up few others.
        self._piece = max(1, -(-total // (_CHUNKS_PER_WORKER * len(workers))))
        self._pieces: list[_Piece] = []
        self._scores: list[list[Score]] = []
        self._waiting: deque[int] = deque()
        self._idle = deque(enumerate(workers))
        self._running: dict[Any, tuple[int, tuple[int, Any]]] = {}
        self._failures: list[Score] = []

    def add(self, texts: Any, rows: np.ndarray, positions: np.ndarray) -> None:
        """One more job."""
        rows, positions = np.asarray(rows, dtype=np.int64), np.asarray(positions, dtype=np.int64)
        if rows.shape != positions.shape:
            raise ValueError(f"a job has {len(rows)} rows and {len(positions)} positions")
        for at in range(0, len(rows), self._piece):
            self._waiting.append(len(self._pieces))
            self._pieces.append(_Piece(texts, rows[at : at + self._piece], positions[at : at + self._piece]))
            self._scores.append([])
        self.advance(wait_s=0)

    def advance(self, wait_s: float) -> None:
        """Take what is done within ``wait_s`` and hand out what waits."""
        import ray

        while True:
            while self._waiting and self._idle:
                number, worker = self._waiting.popleft(), self._idle.popleft()
                piece = self._pieces[number]
                call = worker[1].score.remote(self._split, [piece.texts], piece.rows, piece.positions)
                self._running[call] = (number, worker)
            if not self._running:
                return
            done, _ = ray.wait(list(self._running), num_returns=1, timeout=wait_s)
            if not done:
                return
            self._take(done[0])
            wait_s = 0

    def _take(self, call: Any) -> None:
        number, worker = self._running.pop(call)
        self._scores[number], seconds, printed = _get(call)
        self.seconds += seconds
        self._idle.append(worker)
        self._log.printed(f"worker {worker[0]}", printed)
        self._log.failures(self._scores[number])
        self._failures += [score for score in self._scores[number] if score.status != "ok"]
        if 2 * len(self._failures) > self._total:
            raise RewardError(_failure_report(self._failures, self._total))

    def finish(self) -> Columns:
        """Columns over all jobs in their order: ``score``, ``reward_failed`` and ``reward_timeout`` (0 or 1), ``scorer/NAME`` for every
        extra: float64 (NaN where an answer has none), or texts (objects, "" for none); ``reward_error`` (texts) where one failed.
        Raises RewardError if more than half of the answers fail.
        """
        heard = time.monotonic()
        while self._waiting or self._running:
            before = len(self._waiting) + len(self._running)
            self.advance(wait_s=_POLL_S)
            if len(self._waiting) + len(self._running) < before:
                heard = time.monotonic()
            elif time.monotonic() - heard > (limit_s := _LATE_S + self._piece * (self._timeout_s + _RESTART_S)):
                raise WorkerLost(
                    f"{len(self._running)} reward workers have not answered for {limit_s:.0f} s, more than reward.timeout_s="
                    f"{self._timeout_s} lets their answers take: they are stopped, or their node is gone. Run the same command "
                    "again: it continues from the newest checkpoint."
                )
        return self._columns([score for part in self._scores for score in part])

    def _columns(self, scores: list[Score]) -> Columns:
        columns = {
            c.SCORE: np.array([self._on_error if score.value is None else score.value for score in scores], np.float64),
            c.REWARD_FAILED: np.array([score.status != "ok" for score in scores], np.float64),
            c.REWARD_TIMEOUT: np.array([score.status == "timeout" for score in scores], np.float64),
        }
        for name in sorted({name for score in scores for name in score.extras}):
            values = [score.extras.get(name) for score in scores]
            if any(isinstance(value, float) for value in values):
                numbers = [value if isinstance(value, float) else np.nan for value in values]
                columns[c.SCORER + name] = np.array(numbers, np.float64)
            else:
                columns[c.SCORER + name] = np.array([value or "" for value in values], dtype=object)
        if columns[c.REWARD_FAILED].any():
            columns[c.REWARD_ERROR] = np.array([score.error or "" for score in scores], dtype=object)
        num_timeouts = columns[c.REWARD_TIMEOUT].sum()
        if num_timeouts > _TIMEOUT_ALARM * len(scores):
            logger.warning("%d of %d answers ran out of reward.timeout_s", num_timeouts, len(scores))
        return columns


def _get(call: Any) -> Any:
    import ray
    from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

    try:
        while not ray.wait([call], timeout=_POLL_S)[0]:
            pass
        return ray.get(call)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, RewardError):
            raise RewardError(str(cause)) from None
        if isinstance(cause, ObjectLostError):
            raise WorkerLost(f"the answers to score are gone with the worker that wrote them: {cause}") from error
        raise WorkerError(f"a reward worker failed:\n{error}") from error
    except RayActorError as error:
        raise WorkerLost(f"a reward worker process is gone (out of memory, or killed): {error}") from error


def _failure_report(failures: list[Score], total: int) -> str:
    counts = {
        status: sum(score.status == status for score in failures) for status in ("crashed", "rejected", "timeout")
    }
    shown = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return (
        f"the reward function fails on more than half of a batch (at least {len(failures)} of {total}: {shown}). "
        f"The first failure:\n{failures[0].report()}"
    )

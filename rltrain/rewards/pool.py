"""The reward pool: Ray actors that fetch answers where they were produced and score them in killable processes."""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rltrain.data.rows import Rows
from rltrain.errors import RewardError, WorkerError, WorkerLost
from rltrain.rewards.limits import Limits
from rltrain.rewards.registry import CustomReward
from rltrain.rewards.remote import RemoteScorer, check_address
from rltrain.rewards.slot import Score, Slot

logger = logging.getLogger(__name__)

Columns = dict[str, np.ndarray]
Job = tuple[Any, np.ndarray, np.ndarray]

_RESERVED = ("score", "reward_failed", "reward_timeout")
_CHUNKS_PER_WORKER = 4
_TIMEOUT_ALARM = 0.1
_LEAST_MEMORY_MB = 256


@dataclass(frozen=True)
class _Piece:
    """Answers ``positions`` of one list of texts, and the rows they answer."""

    texts: Any
    rows: np.ndarray
    positions: np.ndarray


class RewardWorker:
    """One slot (or one remote scorer: address and concurrency) and the rows of every split; runs as a Ray actor."""

    def __init__(
        self, custom: CustomReward | None, limits: Limits, remote: tuple[str, int] | None, splits: dict[str, Any]
    ):
        import ray

        self._rows: dict[str, Rows] = {name: ray.get(reference) for name, reference in splits.items()}
        self._scorer: Slot | RemoteScorer
        if remote is not None:
            self._scorer = RemoteScorer(remote[0], limits.timeout_s, remote[1])
        else:
            self._scorer = Slot(custom, limits.timeout_s, limits.memory_mb, limits.allow_code_execution)

    def score(self, split: str, texts: list[Any], rows: np.ndarray, positions: np.ndarray) -> list[Score]:
        """Scores of the texts at ``positions`` of the list behind the one reference in ``texts``."""
        import ray

        answers = ray.get(texts[0])
        calls = [self._call(split, row, answers[at]) for row, at in zip(rows.tolist(), positions.tolist(), strict=True)]
        return self._scorer.score_all(calls)

    def check(self, split: str, rows: list[int] | None) -> list[tuple[str, Score]]:
        """Score rows (by default the first of each data source) with their own ground truth as the answer."""
        of_split = self._rows[split]
        chosen = list(of_split.data_sources().values()) if rows is None else rows
        calls = [self._call(split, row, str(of_split[row].ground_truth)) for row in chosen]
        return [(call[0], self._scorer.check(call)) for call in calls]

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
    ``url_concurrency`` at a time by each worker.
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
        remote = None if url is None else (url, url_concurrency)
        limits = Limits(timeout_s, memory_limit_mb, allow_code_execution)
        self.on_error = on_error
        actor = ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy="SPREAD")(RewardWorker)
        self._workers: list[Any] = [actor.remote(custom, limits, remote, splits) for _ in range(num_workers)]

    def check(self, split: str, rows: Sequence[int] | None = None) -> list[Score]:
        """Score rows with their ground truth as the answer, on every worker, before anything is trained.

        ``rows`` is by default the first of each data source. Raises RewardError where nothing could ever be scored: no
        scorer for a source, a reward file that does not import. A row that fails is only logged, because a bare ground
        truth need not look like an answer.
        """
        calls = [worker.check.remote(split, rows if rows is None else list(rows)) for worker in self._workers]
        first, *_ = [self._get(call) for call in calls]
        for source, score in first:
            if score.status != "ok":
                logger.warning("reward for data_source=%r, ground truth as the answer: %s", source, score.error)
        return [score for _, score in first]

    def score(self, split: str, jobs: Sequence[Job]) -> Columns:
        """Score answers. A job is (reference of a list of texts, rows [k], positions in that list [k]).

        The texts are fetched by the workers, never here. Returns columns over all jobs in their order: ``score``, every
        numeric extra (NaN where an answer has none), ``reward_failed`` and ``reward_timeout`` (0 or 1); all float64.
        Raises RewardError if more than half of the answers fail.
        """
        pieces = self._cut(jobs)
        scores: list[list[Score]] = [[] for _ in pieces]
        total = sum(len(piece.rows) for piece in pieces)
        waiting, idle = deque(range(len(pieces))), deque(self._workers)
        running: dict[Any, tuple[int, Any]] = {}
        failures: list[Score] = []
        while waiting or running:
            while waiting and idle:
                number, worker = waiting.popleft(), idle.popleft()
                piece = pieces[number]
                call = worker.score.remote(split, [piece.texts], piece.rows, piece.positions)
                running[call] = (number, worker)
            call = self._next(list(running))
            number, worker = running.pop(call)
            scores[number] = self._get(call)
            idle.append(worker)
            failures += [score for score in scores[number] if score.status != "ok"]
            if 2 * len(failures) > total:
                raise RewardError(_failure_report(failures, total))
        return self._columns([score for part in scores for score in part])

    def shutdown(self) -> None:
        """End all workers and their processes."""
        import ray

        closing = [worker.close.remote() for worker in self._workers]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=5)
        for worker in self._workers:
            ray.kill(worker)
        self._workers = []

    def _cut(self, jobs: Sequence[Job]) -> list[_Piece]:
        """Jobs in pieces small enough that a slow answer holds up one worker only."""
        total = sum(len(rows) for _, rows, _ in jobs)
        size = max(1, -(-total // (_CHUNKS_PER_WORKER * len(self._workers))))
        pieces = []
        for texts, rows, positions in jobs:
            rows, positions = np.asarray(rows, dtype=np.int64), np.asarray(positions, dtype=np.int64)
            if rows.shape != positions.shape:
                raise ValueError(f"a job has {len(rows)} rows and {len(positions)} positions")
            starts = range(0, len(rows), size)
            pieces += [_Piece(texts, rows[at : at + size], positions[at : at + size]) for at in starts]
        return pieces

    def _next(self, calls: list[Any]) -> Any:
        import ray

        done, _ = ray.wait(calls, num_returns=1)
        return done[0]

    def _get(self, call: Any) -> Any:
        import ray
        from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

        try:
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

    def _columns(self, scores: list[Score]) -> Columns:
        columns = {
            "score": np.array([self.on_error if score.value is None else score.value for score in scores], np.float64),
            "reward_failed": np.array([score.status != "ok" for score in scores], np.float64),
            "reward_timeout": np.array([score.status == "timeout" for score in scores], np.float64),
        }
        for name in sorted({name for score in scores for name in score.extras} - set(_RESERVED)):
            values = [score.extras.get(name) for score in scores]
            if any(isinstance(value, float) for value in values):
                numbers = [value if isinstance(value, float) else np.nan for value in values]
                columns[name] = np.array(numbers, np.float64)
        num_timeouts = columns["reward_timeout"].sum()
        if num_timeouts > _TIMEOUT_ALARM * len(scores):
            logger.warning("%d of %d answers ran out of reward.timeout_s", num_timeouts, len(scores))
        return columns


def _failure_report(failures: list[Score], total: int) -> str:
    counts = {
        status: sum(score.status == status for score in failures) for status in ("crashed", "rejected", "timeout")
    }
    shown = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return (
        f"the reward function fails on more than half of a batch (at least {len(failures)} of {total}: {shown}). "
        f"The first failure:\n{failures[0].error}"
    )

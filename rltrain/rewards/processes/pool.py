"""The reward pool: Ray actors that fetch answers where they were produced and score them in killable processes.

Texts never pass through the driver: it hands out references, rows and positions, and gets numbers back. Each worker has
a slot of its own (or a remote scorer), so that an answer that hangs holds up one worker until its deadline, and nobody
else. A slow answer still delays the others of its call, which is why a batch is dealt out in several small calls per
worker.
"""

import logging
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rltrain.base.columns import names as c
from rltrain.base.env import adopt, driver_environment
from rltrain.base.errors import RewardError
from rltrain.base.stacks import stacks_here
from rltrain.config.schema import Config
from rltrain.data.rows import Rows
from rltrain.rewards.custom import custom_reward
from rltrain.rewards.processes.crew import CONTROL, Crew, PoolWatch
from rltrain.rewards.processes.output import RewardLog
from rltrain.rewards.processes.remote import RemoteScorer
from rltrain.rewards.processes.score import Score, ScorerCall
from rltrain.rewards.processes.slot import Slot

logger = logging.getLogger(__name__)

Columns = dict[str, np.ndarray]

# Small calls let a worker that is done take over from a slow one; each costs a round through Ray.
_CALLS_PER_WORKER = 4
_TIMEOUT_ALARM = 0.1
# Python handles a signal only when a wait for the workers returns, because Ray waits below Python.
_POLL_S = 0.5
# What a reward worker may take per answer to replace a killed process.
_RESTART_S = 5.0
_PHASE = "scoring answers"


def make_scorer(cfg: Config) -> Slot | RemoteScorer:
    """What scores answers in this process, as the config says."""
    reward = cfg.reward
    if reward.url is not None:
        return RemoteScorer(reward.url, reward.timeout_s, reward.url_concurrency, reward.url_headers)
    return Slot(custom_reward(cfg), reward.timeout_s, reward.memory_limit_mb, reward.allow_code_execution)


class RewardWorker:
    """One scorer and the rows of every split; runs as a Ray actor."""

    def __init__(self, cfg: Config, name: str, splits: dict[str, Any], environment: dict[str, str]):
        import ray

        adopt(environment)
        self._name = name
        # The tables stay in the node's object store; `Rows` builds a row when it is asked for.
        self._rows: dict[str, Rows] = {split: ray.get(reference) for split, reference in splits.items()}
        self._scorer = make_scorer(cfg)

    def score(
        self, number: int, split: str, texts: list[Any], rows: np.ndarray, positions: np.ndarray
    ) -> tuple[int, list[Score], float, tuple[str, str]]:
        """Scores of the texts at ``positions`` of a list, by reference in ``texts``, as answers to ``rows``.

        Returns ``number`` again, the scores, the seconds they took, and who printed what.
        """
        import ray

        started = time.perf_counter()
        answers = ray.get(texts[0])
        calls = [self._call(split, row, answers[at]) for row, at in zip(rows.tolist(), positions.tolist(), strict=True)]
        scores = self._scorer.score_all(calls)
        return number, scores, time.perf_counter() - started, (self._name, self._scorer.take_printed())

    def check(self, split: str, rows: list[int] | None) -> tuple[list[Score], tuple[str, str]]:
        """Score rows with their own ground truth as the answer (by default the first row per data source)."""
        of_split = self._rows[split]
        chosen = list(of_split.data_sources().values()) if rows is None else rows
        calls = [self._call(split, row, str(of_split[row].ground_truth)) for row in chosen]
        return [self._scorer.check(call) for call in calls], (self._name, self._scorer.take_printed())

    def who(self) -> tuple[int, str]:
        """Process id and host."""
        return os.getpid(), socket.gethostname()

    def stacks(self) -> str:
        """`stacks_here`, also while an answer is scored."""
        return stacks_here()

    def close(self) -> None:
        """End the slot's process."""
        self._scorer.close()

    def _call(self, split: str, number: int, answer: str) -> ScorerCall:
        row = self._rows[split][number]
        return row.data_source, answer, row.ground_truth, row.extra_info


class RewardPool:
    """``num_workers`` reward workers, dealt out to the places in turn.

    ``splits`` maps a name ("train", "val") to a reference of its ``Rows``. ``log_file`` gets what scorers print, see
    `RewardLog`. places: Ray's scheduling strategies. Its own way to spread puts all on one node where it has not heard
    of another lately, so a run names its nodes.
    """

    def __init__(
        self,
        cfg: Config,
        num_workers: int,
        splits: dict[str, Any],
        log_file: Path | None = None,
        watch: PoolWatch | None = None,
        places: Sequence[Any] = ("SPREAD",),
    ):
        import ray

        self._cfg = cfg
        self._log = RewardLog(log_file)
        # Ray's slots are for the workers of the devices; reward.num_workers says how many score. No restarts: a worker
        # that is gone ends the run with its cause, and the run goes on from a checkpoint.
        options: Any = {"num_cpus": 0, "max_restarts": 0}
        # A thread of its own answers for stacks while an answer is scored.
        actor = ray.remote(**options | {"concurrency_groups": {CONTROL: 1}})(RewardWorker)
        made = [actor.options(scheduling_strategy=places[at % len(places)]) for at in range(num_workers)]
        workers = [each.remote(cfg, f"worker {at}", splits, driver_environment()) for at, each in enumerate(made)]
        self._crew = Crew(workers, watch or PoolWatch())

    def check(self, split: str, rows: Sequence[int] | None = None) -> list[Score]:
        """Score rows with their ground truth as the answer, on every worker, before anything is trained.

        ``rows`` is by default the first row per data source. Raises RewardError where nothing could ever be scored: no
        scorer for a data source, a missing package, a reward file that does not import, a function of the user's own
        that gives no number for any of the rows. Other failures are only logged: a bare ground truth need not look like
        an answer.
        """
        # On every worker, since a package or the reward file may be missing on a single node.
        calls = [worker.check.remote(split, rows if rows is None else list(rows)) for worker in self._crew.workers]
        results = self._tried(calls)
        for _, (worker, printed) in results:
            self._log.printed(worker, printed)
        # All workers score the same rows; the scores of one are enough.
        scores, custom = results[0][0], custom_reward(self._cfg)
        if custom and scores and all(score.status in ("crashed", "rejected") for score in scores):
            raise RewardError(
                f"{custom.name!r} in {custom.path!r} gives no number for any answer it was tried on: the ground "
                f"truth of each data source, alone and in the usual forms. The first:\n{scores[0].report()}\n"
                f"Try it by hand: python -m rltrain.rewards.try {custom.path} DATA.parquet"
            )
        self._log.failures(scores)
        return scores

    def begin(self, split: str, total: int) -> "Scoring":
        """Score ``total`` answers as they arrive."""
        reward = self._cfg.reward
        return Scoring(self._crew, split, total, reward.on_error, reward.timeout_s, self._log)

    def _tried(self, calls: list[Any]) -> list[Any]:
        import ray

        watch, late, started = self._crew.watch, list(range(len(calls))), time.monotonic()
        phase = "the trial on a row of every data source"
        while late:
            # Not `ray.get` alone, which would keep a signal from Python until the call ends.
            ready, _ = ray.wait([calls[late[0]]], timeout=_POLL_S)
            if ready:
                with self._crew.errors(phase, late[:1]):
                    ray.get(ready)
                late.pop(0)
                continue
            watch.check()
            if (seconds := time.monotonic() - started) > watch.trial_s:
                raise self._crew.silent(phase, late, seconds, "the deadline of a first call")
        return ray.get(calls)

    def stacks(self) -> dict[str, str]:
        """What the workers and their processes do; "" for those that do not answer."""
        gone = "does not answer: stopped, or its node is gone\n"
        return {f"reward worker {number}": stack or gone for number, stack in enumerate(self._crew.stacks())}

    def shutdown(self) -> None:
        """End all workers and their processes."""
        import ray

        closing = [worker.close.remote() for worker in self._crew.workers]
        if closing:
            # Killed at once, a worker could not end what its scorers have started; one that hangs is killed all the
            # same.
            ray.wait(closing, num_returns=len(closing), timeout=5)
        for worker in self._crew.workers:
            ray.kill(worker)
        self._crew.workers.clear()


class Scoring:
    """Answers on their way through the pool, dealt out to workers as these come free.

    ``on_error`` is the score of an answer that could not be scored. ``seconds`` is what scoring has cost so far, summed
    over all workers.
    """

    def __init__(
        self,
        crew: Crew,
        split: str,
        total: int,
        on_error: float,
        timeout_s: float,
        log: RewardLog,
    ) -> None:
        from ray.util import ActorPool

        self.seconds = 0.0
        self._crew = crew
        self._workers = ActorPool(list(crew.workers))
        self._busy: dict[int, int] = {}  # call -> number of the worker that has it
        self._split = split
        self._total = total
        self._on_error = on_error
        self._timeout_s = timeout_s
        self._log = log
        # Small enough that a slow answer holds up few others.
        self._answers_per_call = max(1, -(-total // (_CALLS_PER_WORKER * len(crew.workers))))
        self._scores: list[list[Score]] = []  # per call, in the order of `add`
        self._failures: list[Score] = []

    def add(self, texts: Any, rows: np.ndarray, positions: np.ndarray) -> None:
        """Score the texts at ``positions`` [k] of a list (by reference) as answers to ``rows`` [k]."""
        rows, positions = np.asarray(rows, dtype=np.int64), np.asarray(positions, dtype=np.int64)
        if rows.shape != positions.shape:
            raise ValueError(f"{len(rows)} rows and {len(positions)} positions")
        for first in range(0, len(rows), self._answers_per_call):
            some = slice(first, first + self._answers_per_call)
            call = (len(self._scores), self._split, [texts], rows[some], positions[some])
            self._scores.append([])
            self._workers.submit(self._hand_out, call)
        self.advance()

    def _hand_out(self, worker: Any, call: tuple[Any, ...]) -> Any:
        self._busy[call[0]] = self._crew.workers.index(worker)
        return worker.score.remote(*call)

    def advance(self) -> None:
        """Take what is done and hand out what waits, without waiting."""
        while self._take(wait_s=0):
            pass

    def finish(self) -> Columns:
        """Wait for all scores and return them as columns, in the order in which answers were added.

        ``score``, ``reward_failed`` and ``reward_timeout`` (0 or 1), and ``scorer/NAME`` per extra: float64 (NaN where
        an answer has none) or texts (objects, "" for none); ``reward_error`` (texts) where one failed. Raises
        RewardError if more than half of the answers fail.
        """
        heard = time.monotonic()
        # A worker that is alive keeps its deadlines, so silence for longer than a whole call may take is not a slow
        # answer.
        watch, per_call = self._crew.watch, self._answers_per_call
        more_s = watch.late_s + per_call * _RESTART_S
        limit = f"reward.timeout_s={self._timeout_s} for each of {per_call} answers, and {more_s:g} s"
        while self._workers.has_next():
            watch.check()
            if self._take(_POLL_S):
                heard = time.monotonic()
            elif (seconds := time.monotonic() - heard) > more_s + per_call * self._timeout_s:
                raise self._crew.silent(_PHASE, sorted({*self._busy.values()}), seconds, limit)
        return columns_of([score for scores in self._scores for score in scores], self._on_error)

    def _take(self, wait_s: float) -> bool:
        if not self._workers.has_next():
            return False
        try:
            with self._crew.errors(_PHASE, sorted({*self._busy.values()})):
                number, scores, seconds, (worker, printed) = self._workers.get_next_unordered(timeout=wait_s)
        except TimeoutError:
            return False
        self._scores[number] = scores
        self._busy.pop(number)
        self.seconds += seconds
        self._log.printed(worker, printed)
        self._log.failures(scores)
        self._failures += [score for score in scores if score.status != "ok"]
        # Counted against all answers of the batch, not those scored so far, so that a few early failures stop nothing.
        if 2 * len(self._failures) > self._total:
            raise RewardError(_failure_report(self._failures, self._total))
        return True


def columns_of(scores: Sequence[Score], on_error: float) -> Columns:
    """Scores as columns; see `Scoring.finish`."""
    columns = {
        c.SCORE: np.array([on_error if score.value is None else score.value for score in scores], np.float64),
        c.REWARD_FAILED: np.array([score.status != "ok" for score in scores], np.float64),
        c.REWARD_TIMEOUT: np.array([score.status == "timeout" for score in scores], np.float64),
    }
    for name in sorted({name for score in scores for name in score.extras}):
        values = [score.extras.get(name) for score in scores]
        # An extra may be a number for one answer and a text for another; then it is a metric, and texts are missing
        # values.
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


def _failure_report(failures: list[Score], total: int) -> str:
    statuses = [score.status for score in failures]
    shown = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(sorted(statuses)))
    return (
        f"the reward function fails on more than half of a batch (at least {len(failures)} of {total}: {shown}). "
        f"The first failure:\n{failures[0].report()}"
    )

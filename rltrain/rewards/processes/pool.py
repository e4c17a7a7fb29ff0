"""Pool of Ray actors that fetch responses from where they were generated and score them in killable processes.

Texts never pass through the driver: it sends references, rows and positions, and receives numbers. Each worker has its
own slot (or a remote scorer), so that a response that hangs blocks one worker until its deadline. It still delays other
responses of its call, so a batch is split into several small calls per worker.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray

from rltrain.rewards.custom import custom_reward
from rltrain.rewards.processes.actors import RewardWorkers
from rltrain.rewards.processes.score import Score
from rltrain.rewards.processes.scoring import POLL_S, Scoring
from rltrain.rewards.processes.trial import refuse_without_number


class RewardPool(RewardWorkers):
    """Reward workers of a run."""

    def score_truths(self, split: str, rows: Sequence[int] | None = None) -> list[Score]:
        """Score rows with their ground truth as the response, on every worker, before the training.

        ``rows`` defaults to the first row per data source. Raises RewardError if nothing could ever be scored: no
        scorer for a data source, a missing package, a reward file that cannot be imported, or a user's function that
        returns no number for any of the rows. Other failures are only logged, because a ground truth need not have the
        form of a response.
        """
        # Every worker scores the rows, because a package or the reward file may be missing on one node.
        calls = [worker.score_truths.remote(split, rows if rows is None else list(rows)) for worker in self.workers]
        results = self._wait(calls)
        for _, (worker, printed) in results:
            self.log.append(worker, printed)
        # All workers score the same rows, so the scores of one suffice.
        scores, custom, judge = results[0][0], custom_reward(self._cfg), self.reward.judge
        if not judge.url:
            refuse_without_number(custom, scores)
        self.log.failures(scores)
        if judge.url:
            for counts in self._wait([worker.take_counts.remote() for worker in self.workers]):
                self.count_tokens(counts)
        return scores

    def begin_scoring(self, split: str, total: int) -> Scoring:
        """Return a `Scoring` for ``total`` responses, which are scored as they arrive."""
        self._batches += 1
        return Scoring(self, self._batches, split, total)

    def _wait(self, calls: list[Any]) -> list[Any]:
        watch, late, started = self.watch, list(range(len(calls))), time.monotonic()
        phase = "the trial on a row of every data source"
        while late:
            # `ray.wait` with a timeout, because `ray.get` alone would block Python's signal handlers until the call
            # ends.
            ready, _ = ray.wait([calls[late[0]]], timeout=POLL_S)
            if ready:
                with self.errors(phase, late[:1]):
                    ray.get(ready)
                late.pop(0)
                continue
            watch.check()
            if (seconds := time.monotonic() - started) > watch.trial_s:
                raise self.unresponsive(phase, late, seconds, "the deadline of a first call")
        return ray.get(calls)

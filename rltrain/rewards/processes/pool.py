"""The reward pool: Ray actors that fetch answers where they were produced and score them in killable processes.

Texts never pass through the driver: it hands out references, rows and positions, and gets numbers back. Each worker has
a slot of its own (or a remote scorer), so that an answer that hangs holds up one worker until its deadline, and nobody
else. A slow answer still delays the others of its call, which is why a batch is dealt out in several small calls per
worker.

Ray's words for the end of a process are many lines about Ray. A user needs to know which process on which node, what it
did, and what to type (`RewardPool.errors`, `RewardPool.silent`).
"""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltrain.base.env import driver_environment
from rltrain.base.errors import AGAIN, JudgeError, RewardError, WorkerError, WorkerLost
from rltrain.config.schema import Config
from rltrain.rewards.custom import custom_reward
from rltrain.rewards.processes.log import RewardLog
from rltrain.rewards.processes.score import Score
from rltrain.rewards.processes.scoring import POLL_S, Scoring
from rltrain.rewards.processes.worker import RewardWorker

# Calls of this group are answered while an answer is scored.
_CONTROL = "control"
# How long the workers may take to show what they do.
_STACKS_S = 5.0
# A message names this many workers at most.
_NAMED = 4


@dataclass(frozen=True)
class PoolWatch:
    """What a pool asks while it waits."""

    gone: Callable[[Exception], str] = lambda _: f"the process is gone: killed, or memory ran out. {AGAIN}"
    """What to say of the end of a process, by Ray's error."""
    check: Callable[[], None] = lambda: None
    """Raises what ends the wait."""
    hung: Callable[[], str] = str
    """Writes the stacks of the run, and returns a sentence about them."""
    late_s: float = 120.0
    """What a worker may take beyond the time of its answers."""
    trial_s: float = math.inf
    """How long the trial of the scorers may take."""


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

        self._cfg, self.reward = cfg, cfg.reward
        self.log = RewardLog(log_file)
        self.watch = watch or PoolWatch()
        # Ray's slots are for the workers of the devices; reward.num_workers says how many score. No restarts: a worker
        # that is gone ends the run with its cause, and the run goes on from a checkpoint.
        # A judge is waited for in many calls at once.
        judge = cfg.reward.judge
        self._lanes = max(1, judge.max_concurrency // num_workers) if judge.url else 1
        self._num_places = len(places)
        self._tokens_used = self._batches = 0
        options: Any = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": self._lanes}
        # A thread of its own answers for stacks while an answer is scored.
        actor = ray.remote(**options | {"concurrency_groups": {_CONTROL: 1}})(RewardWorker)
        placed = [actor.options(scheduling_strategy=places[at % len(places)]) for at in range(num_workers)]
        # A Ray that was there before this run has not seen the judge's key.
        environment = driver_environment(judge.api_key_env)
        self.workers: list[Any] = [
            place.remote(cfg, f"worker {at}", splits, environment, num_workers) for at, place in enumerate(placed)
        ]
        self._numbers = {worker._actor_id.hex(): number for number, worker in enumerate(self.workers)}
        # Asked at once, since who is gone cannot say who it was.
        self._who = [worker.who.options(concurrency_group=_CONTROL).remote() for worker in self.workers]

    def score_truths(self, split: str, rows: Sequence[int] | None = None) -> list[Score]:
        """Score rows with their ground truth as the answer, on every worker, before anything is trained.

        ``rows`` is by default the first row per data source. Raises RewardError where nothing could ever be scored: no
        scorer for a data source, a missing package, a reward file that does not import, a function of the user's own
        that gives no number for any of the rows. Other failures are only logged: a bare ground truth need not look like
        an answer.
        """
        # On every worker, since a package or the reward file may be missing on a single node.
        calls = [worker.score_truths.remote(split, rows if rows is None else list(rows)) for worker in self.workers]
        results = self._tried(calls)
        for _, (worker, printed) in results:
            self.log.printed(worker, printed)
        # All workers score the same rows; the scores of one are enough.
        scores, custom, judge = results[0][0], custom_reward(self._cfg), self.reward.judge
        if custom and not judge.url and scores and all(score.status in ("crashed", "rejected") for score in scores):
            raise RewardError(
                f"{custom.name!r} in {custom.path!r} gives no number for any answer it was tried on: the ground "
                f"truth of each data source, alone and in the usual forms. The first:\n{scores[0].report()}\n"
                f"Try it by hand: python -m rltrain.rewards.try {custom.path} DATA.parquet"
            )
        self.log.failures(scores)
        if judge.url:
            for counts in self._tried([worker.take_counts.remote() for worker in self.workers]):
                self.count_tokens(counts)
        return scores

    def count_tokens(self, counts: Counter[str]) -> None:
        """Raise RewardError where the judge has used more tokens than it may."""
        self._tokens_used += counts["tokens"]
        most = self.reward.judge.max_tokens_total
        if most is not None and self._tokens_used > most:
            raise RewardError(
                f"the judge has used {self._tokens_used:,} tokens since this start of the run, and "
                f"reward.judge.max_tokens_total={most} allows no more. Raise it, and run the same command to go on "
                "from the last checkpoint."
            )

    def node_of(self, worker: int) -> int:
        """The node of a worker, by the place that it was given."""
        return worker % self._num_places

    @property
    def lanes(self) -> list[Any]:
        """The workers, each as often as it takes calls at once."""
        return [worker for worker in self.workers for _ in range(self._lanes)]

    def give_up(self, batch: int) -> None:
        """Have no worker wait for the judge of a batch any longer."""
        for worker in self.workers:
            worker.give_up.options(concurrency_group=_CONTROL).remote(batch)

    def begin_scoring(self, split: str, total: int) -> Scoring:
        """Score ``total`` answers as they arrive."""
        self._batches += 1
        return Scoring(self, self._batches, split, total)

    @contextmanager
    def errors(self, phase: str, busy: Sequence[int]) -> Iterator[None]:
        """Ray's errors as those of rltrain. busy: whose they may be, where Ray does not say."""
        from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

        try:
            yield
        except RayTaskError as error:
            where = self._place(busy if len(busy) == 1 else [], phase)
            if isinstance(error.cause, RewardError | JudgeError):
                raise type(error.cause)(str(error.cause)) from None
            if isinstance(error.cause, ObjectLostError):
                sentence = f"{where}: the answers to score are gone with the worker that wrote them. {AGAIN}"
                raise WorkerLost(sentence) from error
            raise WorkerError(f"{where}: {error}") from error
        except RayError as error:
            number = self._numbers.get(getattr(error, "actor_id", None) or "")
            where = self._place(busy if number is None else [number], phase)
            if isinstance(error, RayActorError) and error._actor_init_failed:
                raise WorkerError(f"{where}: {error}") from error
            raise WorkerLost(f"{where}: {self.watch.gone(error)}") from error

    def silent(self, phase: str, late: Sequence[int], seconds: float, limit: str) -> WorkerLost:
        """Name those that do not even show their stacks, or else all that are late; and end the former."""
        import ray

        stacks = self._stacks()
        silent = [number for number in late if not stacks[number]]
        place, stacks_file = self._place(silent or late, phase), self.watch.hung()
        for number in silent:
            # Ray asks a process to end itself, and one that is stopped does not hear.
            with suppress(ray.exceptions.RayError, ProcessLookupError, PermissionError):
                pid, node = ray.get(self._who[number], timeout=0)
                if node == socket.gethostname():
                    os.kill(pid, signal.SIGKILL)
        state = "and not answering: stopped, or its node is gone" if silent else "though answering"
        return WorkerLost(f"{place}: not done after {seconds:.0f} s ({state}; {limit}).{stacks_file} {AGAIN}")

    def stacks(self) -> dict[str, str]:
        """What the workers and their processes do."""
        silent = "does not answer: stopped, or its node is gone\n"
        return {f"reward worker {number}": stack or silent for number, stack in enumerate(self._stacks())}

    def shutdown(self) -> None:
        """End all workers and their processes."""
        import ray

        closing = [worker.close.remote() for worker in self.workers]
        if closing:
            # Killed at once, a worker could not end what its scorers have started; one that hangs is killed all the
            # same.
            ray.wait(closing, num_returns=len(closing), timeout=5)
        for worker in self.workers:
            ray.kill(worker)
        self.workers.clear()

    def _tried(self, calls: list[Any]) -> list[Any]:
        import ray

        watch, late, started = self.watch, list(range(len(calls))), time.monotonic()
        phase = "the trial on a row of every data source"
        while late:
            # Not `ray.get` alone, which would keep a signal from Python until the call ends.
            ready, _ = ray.wait([calls[late[0]]], timeout=POLL_S)
            if ready:
                with self.errors(phase, late[:1]):
                    ray.get(ready)
                late.pop(0)
                continue
            watch.check()
            if (seconds := time.monotonic() - started) > watch.trial_s:
                raise self.silent(phase, late, seconds, "the deadline of a first call")
        return ray.get(calls)

    def _place(self, numbers: Sequence[int], phase: str) -> str:
        """Role, numbers, processes and nodes, and what they do."""
        import ray

        ready, _ = ray.wait(self._who, num_returns=len(self._who), timeout=0)
        names = []
        for number in numbers[:_NAMED]:
            pid, node = "?", "?"
            with suppress(ray.exceptions.RayError):
                pid, node = ray.get(self._who[number]) if self._who[number] in ready else (pid, node)
            names.append(f"reward worker {number} of {len(self.workers)} (pid {pid} on {node})")
        remainder = f" and {len(numbers) - len(names)} more" if len(numbers) > len(names) else ""
        return f"{', '.join(names) or 'a reward worker'}{remainder}, in {phase}"

    def _stacks(self) -> list[str]:
        """What the workers and their processes do; "" for those that do not answer."""
        import ray

        calls = [worker.stacks.options(concurrency_group=_CONTROL).remote() for worker in self.workers]
        answered, _ = ray.wait(calls, num_returns=len(calls), timeout=_STACKS_S) if calls else ([], [])
        stacks = [""] * len(calls)
        for number, call in enumerate(calls):
            with suppress(ray.exceptions.RayError):
                stacks[number] = ray.get(call) if call in answered else ""
        return stacks

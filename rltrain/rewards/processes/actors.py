"""The processes that score, as Ray actors.

Ray's message about a dead process is long and describes Ray's internals. A user needs to know which process on which
node died, during which phase, and which command to run (`RewardWorkers.errors`, `RewardWorkers.unresponsive`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

from rltrain.common.env import driver_environment
from rltrain.common.errors import AGAIN, JudgeError, RewardError, WorkerError, WorkerLost
from rltrain.config.schema import ScoringConfig
from rltrain.rewards.processes.log import RewardLog
from rltrain.rewards.processes.worker import RewardWorker
from rltrain.runtime.actors import CONTROL, Actors


@dataclass(frozen=True)
class PoolWatch:
    """Callbacks and limits of a pool while it waits."""

    gone: Callable[[Exception], str] = lambda _: f"the process is gone: killed, or memory ran out. {AGAIN}"
    """Function that describes the death of a process, from Ray's error."""
    check: Callable[[], None] = lambda: None
    """Function that raises an error to end waiting."""
    hung: Callable[[], str] = str
    """Function that writes the stacks of the run and returns a sentence about them."""
    late_s: float = 120.0
    """Seconds that a worker may take beyond the time of its responses."""
    trial_s: float = math.inf
    """Deadline for the trial of the scorers, in seconds."""


class RewardWorkers:
    """``num_workers`` reward workers, assigned round-robin to ``places``.

    ``splits`` maps a name ("train", "val") to a reference of its ``Rows``. ``log_file`` gets the scorers' output, see
    `RewardLog`. ``places`` are Ray's scheduling strategies. A run specifies nodes, because Ray's "SPREAD" puts all
    workers on one node if it has no recent report from the others.
    """

    def __init__(
        self,
        cfg: ScoringConfig,
        num_workers: int,
        splits: dict[str, Any],
        log_file: Path | None = None,
        watch: PoolWatch | None = None,
        places: Sequence[Any] = ("SPREAD",),
    ):
        self._cfg, self.reward = cfg, cfg.reward
        self.log = RewardLog(log_file)
        self.watch = watch or PoolWatch()
        # num_cpus=0, because Ray's CPU slots are for the device workers; reward.num_workers sets the number of scorers.
        # No restarts: the death of a worker ends the run with its cause, and the run resumes from a checkpoint. A
        # worker has many concurrent calls if they wait for a judge.
        judge = cfg.reward.judge
        self._lanes = max(1, judge.max_concurrency // num_workers) if judge.url else 1
        self._num_places = len(places)
        self._tokens_used = self._batches = 0
        options: Any = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": self._lanes}
        # A separate thread serves stacks while a response is scored.
        actor = ray.remote(**options | {"concurrency_groups": {CONTROL: 1}})(RewardWorker)
        placed = [actor.options(scheduling_strategy=places[at % len(places)]) for at in range(num_workers)]
        # A Ray cluster started before this run does not have the judge's key in its environment.
        environment = driver_environment(judge.api_key_env)
        self.workers: list[Any] = [
            place.remote(cfg, f"worker {at}", splits, environment, num_workers) for at, place in enumerate(placed)
        ]
        self._numbers = {worker._actor_id.hex(): number for number, worker in enumerate(self.workers)}
        self._actors = Actors(self.workers, "reward worker")

    def count_tokens(self, counts: Counter[str]) -> None:
        """Raise RewardError if the judge has exceeded its token limit."""
        self._tokens_used += counts["tokens"]
        most = self.reward.judge.max_tokens_total
        if most is not None and self._tokens_used > most:
            raise RewardError(
                f"the judge has used {self._tokens_used:,} tokens since this start of the run, and "
                f"reward.judge.max_tokens_total={most} is the limit. Raise it and rerun the command to resume from "
                "the last checkpoint."
            )

    def node_of(self, worker: int) -> int:
        """Return the index of the place of a worker, which identifies its node."""
        return worker % self._num_places

    @property
    def lanes(self) -> list[Any]:
        """The workers, each repeated by its number of concurrent calls."""
        return [worker for worker in self.workers for _ in range(self._lanes)]

    def cancel_judging(self, batch: int) -> None:
        """Make all workers stop waiting for the judge of a batch."""
        for worker in self.workers:
            worker.cancel_judging.options(concurrency_group=CONTROL).remote(batch)

    @contextmanager
    def errors(self, phase: str, busy: Sequence[int]) -> Iterator[None]:
        """Convert Ray's errors to rltrain's. busy: the workers that may have failed, if Ray does not name one."""
        try:
            yield
        except RayTaskError as error:
            where = self._actors.place(busy if len(busy) == 1 else [], phase)
            if isinstance(error.cause, RewardError | JudgeError):
                raise type(error.cause)(str(error.cause)) from None
            if isinstance(error.cause, ObjectLostError):
                sentence = f"{where}: the responses to score were lost with the worker that generated them. {AGAIN}"
                raise WorkerLost(sentence) from error
            raise WorkerError(f"{where}: {error}") from error
        except RayError as error:
            number = self._numbers.get(getattr(error, "actor_id", None) or "")
            where = self._actors.place(busy if number is None else [number], phase)
            if isinstance(error, RayActorError) and error._actor_init_failed:
                raise WorkerError(f"{where}: {error}") from error
            raise WorkerLost(f"{where}: {self.watch.gone(error)}") from error

    def unresponsive(self, phase: str, late: Sequence[int], seconds: float, limit: str) -> WorkerLost:
        """Return an error for late workers and kill the workers that do not even return their stacks.

        The error names the unresponsive workers, or all late workers if every one responds.
        """
        stacks = self._actors.stacks()
        unresponsive = [number for number in late if number not in stacks]
        place, stacks_file = self._actors.place(unresponsive or late, phase), self.watch.hung()
        self._actors.kill_here(unresponsive)
        state = "no reply: stopped, or its node is gone" if unresponsive else "but it replies"
        return WorkerLost(f"{place}: not done after {seconds:.0f} s ({state}; {limit}).{stacks_file} {AGAIN}")

    def stacks(self) -> dict[str, str]:
        """Return the stacks of the workers and their processes."""
        stacks, no_reply = self._actors.stacks(), "no reply: stopped, or its node is gone\n"
        return {f"reward worker {number}": stacks.get(number, no_reply) for number in range(len(self.workers))}

    def shutdown(self) -> None:
        """End all workers and their processes."""
        closing = [worker.close.remote() for worker in self.workers]
        if closing:
            # Workers close first, because a worker that is killed at once cannot end its scorers' processes. A hanging
            # worker is killed after the timeout.
            ray.wait(closing, num_returns=len(closing), timeout=5)
        for worker in self.workers:
            ray.kill(worker)
        self.workers.clear()

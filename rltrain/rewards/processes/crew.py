"""Who the reward workers are, and what a user reads where one of them is gone, fails, or is silent.

Ray's words for the end of a process are many lines about Ray. A user needs to know which process on which node, what it
did, and what to type.
"""

from __future__ import annotations

import math
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from rltrain.base.errors import AGAIN, RewardError, WorkerError, WorkerLost

# Calls of this group are answered while an answer is scored.
CONTROL = "control"
# How long the workers may take to show what they do.
_STACKS_S = 5.0
# A message names this many workers at most.
_NAMED = 4


@dataclass(frozen=True)
class PoolWatch:
    """What a pool asks while it waits.

    gone(error): what to say of the end of a process, by Ray's error.
    """

    gone: Callable[[Exception], str] = lambda _: f"the process is gone: killed, or memory ran out. {AGAIN}"
    check: Callable[[], None] = lambda: None
    """Raises what ends the wait."""
    hung: Callable[[], str] = str
    """Writes the stacks of the run, and returns a sentence about them."""
    late_s: float = 120.0
    """What a worker may take beyond the time of its answers."""
    trial_s: float = math.inf
    """How long the trial of the scorers may take."""


class Crew:
    """The workers, by number."""

    def __init__(self, workers: Sequence[Any], watch: PoolWatch) -> None:
        self.workers, self.watch = list(workers), watch
        self._numbers = {worker._actor_id.hex(): number for number, worker in enumerate(self.workers)}
        # Asked at once, since who is gone cannot say who it was.
        self._who = [worker.who.options(concurrency_group=CONTROL).remote() for worker in self.workers]

    def place(self, numbers: Sequence[int], phase: str) -> str:
        """Role, numbers, processes and nodes, and what they do."""
        import ray

        ready, _ = ray.wait(self._who, num_returns=len(self._who), timeout=0)
        names = []
        for number in numbers[:_NAMED]:
            pid, node = "?", "?"
            with suppress(ray.exceptions.RayError):
                pid, node = ray.get(self._who[number]) if self._who[number] in ready else (pid, node)
            names.append(f"reward worker {number} of {len(self.workers)} (pid {pid} on {node})")
        more = f" and {len(numbers) - len(names)} more" if len(numbers) > len(names) else ""
        return f"{', '.join(names) or 'a reward worker'}{more}, in {phase}"

    @contextmanager
    def errors(self, phase: str, busy: Sequence[int]) -> Iterator[None]:
        """Ray's errors as those of rltrain. busy: whose they may be, where Ray does not say."""
        from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

        try:
            yield
        except RayTaskError as error:
            where = self.place(busy if len(busy) == 1 else [], phase)
            if isinstance(error.cause, RewardError):
                raise RewardError(str(error.cause)) from None
            if isinstance(error.cause, ObjectLostError):
                said = f"{where}: the answers to score are gone with the worker that wrote them. {AGAIN}"
                raise WorkerLost(said) from error
            raise WorkerError(f"{where}: {error}") from error
        except RayError as error:
            number = self._numbers.get(getattr(error, "actor_id", None) or "")
            where = self.place(busy if number is None else [number], phase)
            if isinstance(error, RayActorError) and error._actor_init_failed:
                raise WorkerError(f"{where}: {error}") from error
            raise WorkerLost(f"{where}: {self.watch.gone(error)}") from error

    def silent(self, phase: str, late: Sequence[int], seconds: float, limit: str) -> WorkerLost:
        """Name those that do not even show their stacks, or else all that are late; and end the former."""
        import ray

        stacks = self.stacks()
        silent = [number for number in late if not stacks[number]]
        place, stacks_file = self.place(silent or late, phase), self.watch.hung()
        for number in silent:
            # Ray asks a process to end itself, and one that is stopped does not hear.
            with suppress(ray.exceptions.RayError, ProcessLookupError, PermissionError):
                pid, node = ray.get(self._who[number], timeout=0)
                if node == socket.gethostname():
                    os.kill(pid, signal.SIGKILL)
        state = "and not answering: stopped, or its node is gone" if silent else "though answering"
        return WorkerLost(f"{place}: not done after {seconds:.0f} s ({state}; {limit}).{stacks_file} {AGAIN}")

    def stacks(self) -> list[str]:
        """What the workers and their processes do; "" for those that do not answer."""
        import ray

        asked = [worker.stacks.options(concurrency_group=CONTROL).remote() for worker in self.workers]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=_STACKS_S) if asked else ([], [])
        found = [""] * len(asked)
        for number, call in enumerate(asked):
            with suppress(ray.exceptions.RayError):
                found[number] = ray.get(call) if call in answered else ""
        return found

"""Generation event by event: replicas with continuous batching that take jobs from the queue of a step.

Problem: a mean length and a mean rate hide what a step waits for, which is the last long answer, and a cache that is
full. Choice: time goes from the end of one answer to that of the next. Between two ends all rows of a replica write one
token a decode step, and the step takes what its weights and its keys and values take to be read, or their FLOPs, and a
fixed time. The queue is the one that runs have. Left out: swapping, speculation, turns, and prompts that are computed
beside decoding: those stand in front of it here.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from rltrain.run.seconds.lengths import Ints
from rltrain.workers.rollout.contract import Job
from rltrain.workers.rollout.queue import JobQueue, Replica, samples_per_job

# Of a cache, what stays free when an answer enters, so that the others can go on for a while.
_WATERMARK = 0.01
_NOTHING = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class EngineSpeed:
    """One replica: what a decode step reads and computes, and how fast its devices together do so."""

    weight_bytes: float
    """Without experts."""
    bytes_per_token: float
    """Of keys and values."""
    flops_per_token: float
    flops_per_pair: float
    """Of a (query, key) pair."""
    bandwidth: float
    """Bytes/s."""
    flops: float
    """FLOP/s."""
    step_s: float
    """Of a decode step, whatever it computes."""
    max_rows: int
    cache_tokens: int | None = None
    """Tokens that have room (None: as many as rows write)."""
    expert_bytes: float = 0.0
    """Of all experts; a token is not routed to `idle_share` of them."""
    idle_share: float = 0.0

    def decode_s(self, rows: int, context: float) -> float:
        """Seconds of a decode step of so many rows, with so many tokens in front of them together."""
        # Of routers that choose evenly each row leaves an expert alone with probability `idle_share`.
        weights = self.weight_bytes + self.expert_bytes * (1 - self.idle_share**rows)
        read = weights + self.bytes_per_token * context
        computed = rows * self.flops_per_token + self.flops_per_pair * context
        return self.step_s + max(read / self.bandwidth, computed / self.flops)

    def prefill_s(self, tokens: int) -> float:
        """Seconds of a text of so many tokens."""
        return (tokens * self.flops_per_token + self.flops_per_pair * tokens**2 / 2) / self.flops


@dataclass(frozen=True)
class Generation:
    """The answers of a step."""

    ended_s: NDArray[np.float64]
    """[p, n]: when each answer ended; NaN where the step stopped before."""
    replicas_s: NDArray[np.float64]
    """[replicas]: when each had nothing left."""
    decode_steps: int
    """Of the replica with the most."""
    most_waiting: int
    """Answers that waited for room in the cache of a replica, at most at once."""
    put_back: int
    """How often one had to leave a full cache, whose tokens were computed again."""

    @property
    def seconds(self) -> float:
        """Until the last."""
        return float(self.replicas_s.max())

    @property
    def tail_s(self) -> float:
        """From the end of 90 % of the answers to the last, as ``perf/rollout_tail_s``."""
        ended = self.ended_s[~np.isnan(self.ended_s)]
        return self.seconds - float(np.quantile(ended, 0.9))

    @property
    def idle_share(self) -> float:
        """Of the replicas' time, as ``perf/rollout_idle_share``."""
        return 1 - float(self.replicas_s.mean()) / max(self.seconds, 1e-12)


def generate(
    prompts: Ints, answers: Ints, speed: EngineSpeed, num_replicas: int, enough: int | None = None
) -> Generation:
    """Answer all prompts. prompts [p], answers [p, n]: their tokens. enough: stop when so many prompts are answered.

    Raises ValueError where the cache has no room for one of them.
    """
    longest = int((prompts + answers.max(1)).max())
    if speed.cache_tokens is not None and longest > speed.cache_tokens:
        raise ValueError(f"one answer of {longest:,} tokens has no room in a cache of {speed.cache_tokens:,}")
    (num_prompts, n), store = answers.shape, dist.HashStore()
    size = samples_per_job(num_prompts, n, num_replicas, speed.max_rows)
    cuts = [np.arange(first, min(first + size, n)) for first in range(0, n, size)]
    jobs = [Job(place, cut, _NOTHING, cut.astype(np.uint64)) for place in range(num_prompts) for cut in cuts]
    # As `rollout_worker` deals them.
    num_dealt = min(len(jobs), num_replicas * (speed.max_rows // size))
    replicas = [
        _Replica(
            JobQueue(jobs, num_dealt, Replica(number, num_replicas, 0, 1), store, "jobs", enough),
            speed, prompts, answers,
        )
        for number in range(num_replicas)
    ]  # fmt: skip
    ended_s = np.full(answers.shape, np.nan)
    events = [(replica.go_on(), number) for number, replica in enumerate(replicas)]
    heapq.heapify(events)
    # The first that has an event goes on: so jobs of the common rest are taken in the order of time.
    while events and np.isfinite(events[0][0]):
        now, number = heapq.heappop(events)
        replica = replicas[number]
        for place, sample in replica.arrive():
            ended_s[place, sample] = now
        if replica.queue.stopped():
            for other in replicas:
                other.now = now if other.rows else other.now
            break
        heapq.heappush(events, (replica.go_on(), number))
    return Generation(
        ended_s,
        np.array([replica.now for replica in replicas]),
        max(replica.decode_steps for replica in replicas),
        max(replica.most_waiting for replica in replicas),
        sum(replica.num_put_back for replica in replicas),
    )


@dataclass
class _Row:
    """An answer that is being written."""

    job: Job
    sample: int
    length: int
    written: int = 0
    """Before it began to run, or ran again."""
    since: int = 0
    """The decode step in which it did."""


@dataclass
class _Replica:
    queue: JobQueue
    speed: EngineSpeed
    prompts: Ints
    answers: Ints
    now: float = 0.0
    decode_steps: int = 0
    most_waiting: int = 0
    num_put_back: int = 0
    rows: dict[int, _Row] = field(default_factory=dict)
    """Those that run, by a number that grows: the newest one is the last."""
    _waiting: deque[_Row] = field(default_factory=deque)
    _ends: list[tuple[int, int]] = field(default_factory=list)
    """A heap of (decode step, number of a row); rows that were put back are still there."""
    _written: int = 0
    """Tokens that the running rows have written."""
    _given: int = 0
    """Tokens of their prompts, each once a row."""
    _stretch: tuple[int, float] = (0, 0.0)
    """Decode steps until the next event, and their seconds."""
    _running: Counter[int] = field(default_factory=Counter)
    _left: dict[int, int] = field(default_factory=dict)
    """Both by job: rows that run, and answers that have not ended."""
    _shared: int = 0
    """Tokens of the prompts in the cache, each once a job."""
    _numbers: Iterator[int] = field(default_factory=count)

    def go_on(self) -> float:
        """Take what there is room for. Returns the time of the next event (infinite: there is none)."""
        self._take()
        if not self.rows:
            return float("inf")
        while (steps := min(self._next_end() - self.decode_steps, self._steps_with_room())) < 1:
            self._put_back()
        # Contexts grow by a token a row and step, so the middle of the stretch is its mean.
        context = self._given + self._written + len(self.rows) * (steps - 1) / 2
        self._stretch = steps, steps * self.speed.decode_s(len(self.rows), context)
        return self.now + self._stretch[1]

    def arrive(self) -> Iterator[tuple[int, int]]:
        """Make the stretch. Returns the answers that end with it."""
        steps, seconds = self._stretch
        self.now += seconds
        self.decode_steps += steps
        self._written += steps * len(self.rows)
        while self.rows and self._next_end() == self.decode_steps:
            number = heapq.heappop(self._ends)[1]
            row = self.rows[number]
            self._leave(number, row.length)
            self._left[id(row.job)] -= 1
            if not self._left[id(row.job)]:
                self.queue.ended(row.job)
            yield row.job.place, row.sample

    def _take(self) -> None:
        for job in self.queue.take(self.speed.max_rows - len(self.rows) - len(self._waiting)):
            self._left[id(job)] = len(job.samples)
            lengths = self.answers[job.place, job.samples].tolist()
            self._waiting += [_Row(job, *each) for each in zip(job.samples.tolist(), lengths, strict=True)]
        while self._waiting and self._has_room(self._waiting[0]):
            self._enter(self._waiting.popleft())
        self.most_waiting = max(self.most_waiting, len(self._waiting))

    def _enter(self, row: _Row) -> None:
        number, prompt, job = next(self._numbers), int(self.prompts[row.job.place]), id(row.job)
        # A prompt is computed once for all its answers that are there; what was written before is computed again.
        new = 0 if self._running[job] else prompt
        self.now += self.speed.prefill_s(row.written + new)
        self._shared += new
        self._running[job] += 1
        self._given += prompt
        self._written += row.written
        row.since = self.decode_steps
        self.rows[number] = row
        heapq.heappush(self._ends, (row.since + row.length - row.written, number))

    def _leave(self, number: int, written: int) -> None:
        row = self.rows.pop(number)
        job, prompt = id(row.job), int(self.prompts[row.job.place])
        self._running[job] -= 1
        self._shared -= 0 if self._running[job] else prompt
        self._given -= prompt
        self._written -= written

    def _put_back(self) -> None:
        """The newest answer leaves a full cache, as in vLLM, and waits in front of the others."""
        number, row = next(reversed(self.rows.items()))
        row.written += self.decode_steps - row.since
        self._leave(number, row.written)
        self._waiting.appendleft(row)
        self.num_put_back += 1
        self.most_waiting = max(self.most_waiting, len(self._waiting))

    def _next_end(self) -> int:
        """The decode step in which the next row ends."""
        while self._ends[0][1] not in self.rows:
            heapq.heappop(self._ends)
        return self._ends[0][0]

    def _has_room(self, row: _Row) -> bool:
        if self.speed.cache_tokens is None or not self.rows:
            return True
        new = row.written + 1 + (0 if self._running[id(row.job)] else int(self.prompts[row.job.place]))
        return self._written + self._shared + new <= (1 - _WATERMARK) * self.speed.cache_tokens

    def _steps_with_room(self) -> int:
        if self.speed.cache_tokens is None:
            return self._next_end()
        return (self.speed.cache_tokens - self._written - self._shared) // len(self.rows)

"""Simulation of generation: replicas with continuous batching take jobs from the queue of a step.

A mean length and a mean rate would hide a full cache, and the last long response, for which a step waits. So time
advances from the end of one response to the end of the next. In between, all rows of a replica generate one token per
decode step. A decode step takes a fixed time plus the time to read weights, keys and values, or to compute the FLOPs.
The queue is that of real runs. It does not simulate swapping, speculation, turns, or prefill during decoding (here
prefill comes first).
"""

from __future__ import annotations

import heapq
import sys
from collections import Counter, deque
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from rltrain.run.seconds.lengths import Ints
from rltrain.workers.rollout.contract import Job
from rltrain.workers.rollout.queue import JobQueue, Replica, samples_per_job

# Share of the cache that must stay free when a response is added, so that the others can continue for a while.
_WATERMARK = 0.01
_NOTHING = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class EngineSpeed:
    """One replica: the bytes and FLOPs of a decode step, and the speed of its devices together."""

    weight_bytes: float
    """Bytes of the weights without experts."""
    bytes_per_token: float
    """Bytes of keys and values per token."""
    flops_per_token: float
    flops_per_pair: float
    """FLOPs of a (query, key) pair."""
    bandwidth: float
    """Bytes/s."""
    flops: float
    """FLOP/s."""
    step_s: float
    """Fixed time of a decode step."""
    max_rows: int
    cache_tokens: int | None = None
    """Capacity of the cache in tokens (None: unlimited)."""
    expert_bytes: float = 0.0
    """Bytes of all experts. A token is not routed to `idle_share` of them."""
    idle_share: float = 0.0

    def decode_s(self, rows: int, context: float) -> float:
        """Return the seconds of a decode step of ``rows`` rows whose contexts have ``context`` tokens in all."""
        # With even routing, a row does not use an expert with probability `idle_share`.
        weights = self.weight_bytes + self.expert_bytes * (1 - self.idle_share**rows)
        read = weights + self.bytes_per_token * context
        computed = rows * self.flops_per_token + self.flops_per_pair * context
        return self.step_s + max(read / self.bandwidth, computed / self.flops)

    def prefill_s(self, tokens: int) -> float:
        """Return the seconds to prefill ``tokens`` tokens of one sequence."""
        return (tokens * self.flops_per_token + self.flops_per_pair * tokens**2 / 2) / self.flops


@dataclass(frozen=True)
class Generation:
    """The simulated responses of a step."""

    ended_s: NDArray[np.float64]
    """[p, n]: end time of each response; NaN if the step ended before."""
    replicas_s: NDArray[np.float64]
    """[replicas]: time at which each replica ran out of work."""
    decode_steps: int
    """Maximum decode steps of a replica."""

    @property
    def seconds(self) -> float:
        """Time until the last replica is done."""
        return float(self.replicas_s.max())

    @property
    def tail_s(self) -> float:
        """Time from the end of 90 % of the responses to the last, as ``perf/rollout_tail_s``."""
        ended = self.ended_s[~np.isnan(self.ended_s)]
        return self.seconds - float(np.quantile(ended, 0.9))

    @property
    def idle_share(self) -> float:
        """Share of the replicas' time without work, as ``perf/rollout_idle_share``."""
        return 1 - float(self.replicas_s.mean()) / max(self.seconds, 1e-12)


def generate(
    prompts: Ints, answers: Ints, speed: EngineSpeed, num_replicas: int, enough: int | None = None
) -> Generation:
    """Simulate the responses to all prompts.

    prompts [p], answers [p, n]: lengths in tokens. enough: stop when this many prompts are complete. Raises ValueError
    if a sequence does not fit in the cache.
    """
    longest = int((prompts + answers.max(1)).max())
    if speed.cache_tokens is not None and longest > speed.cache_tokens:
        raise ValueError(f"a response of {longest:,} tokens does not fit in a cache of {speed.cache_tokens:,}")
    (num_prompts, n), store = answers.shape, dist.HashStore()
    size = samples_per_job(num_prompts, n, num_replicas, speed.max_rows)
    cuts = [np.arange(first, min(first + size, n)) for first in range(0, n, size)]
    jobs = [Job(index, cut, _NOTHING, cut.astype(np.uint64)) for index in range(num_prompts) for cut in cuts]
    # As in `rollout_worker`.
    num_dealt = min(len(jobs), num_replicas * (speed.max_rows // size))
    replicas = [
        _Replica(
            JobQueue(jobs, num_dealt, Replica(number, num_replicas, 0, 1), store, "jobs", enough),
            speed, prompts, answers,
        )
        for number in range(num_replicas)
    ]  # fmt: skip
    ended_s = np.full(answers.shape, np.nan)
    events = [(replica.schedule(), number) for number, replica in enumerate(replicas)]
    heapq.heapify(events)
    # The replica with the earliest event advances, so jobs of the shared queue are taken in chronological order.
    while events and np.isfinite(events[0][0]):
        now, number = heapq.heappop(events)
        replica = replicas[number]
        for prompt_index, sample in replica.advance():
            ended_s[prompt_index, sample] = now
        if replica.queue.stopped():
            for other in replicas:
                other.now = now if len(other.rows) else other.now
            break
        heapq.heappush(events, (replica.schedule(), number))
    return Generation(
        ended_s,
        np.array([replica.now for replica in replicas]),
        max(replica.decode_steps for replica in replicas),
    )


# Columns of the rows of a replica.
_PROMPT, _SAMPLE, _WRITTEN, _LEFT = range(4)


class _Replica:
    def __init__(self, queue: JobQueue, speed: EngineSpeed, prompts: Ints, answers: Ints) -> None:
        self.queue, self.speed, self.prompts, self.answers = queue, speed, prompts, answers
        self.now = 0.0
        self.decode_steps = 0
        self.rows = np.zeros((0, 4), dtype=np.int64)
        """Running responses, newest last: prompt, sample, generated tokens, remaining tokens."""
        self._waiting: deque[Ints] = deque()
        self._jobs: dict[tuple[int, int], Job] = {}
        """(prompt, sample) -> its job."""
        self._unfinished: Counter[int] = Counter()
        """id of a job -> its responses that have not ended."""
        self._stretch: tuple[int, float] = (0, 0.0)
        """Decode steps until the next event, and their seconds."""

    def schedule(self) -> float:
        """Take jobs while there is room. Return the time of the next event (infinite if there is none)."""
        self._take()
        if not len(self.rows):
            return float("inf")
        while (steps := min(int(self.rows[:, _LEFT].min()), self._steps_with_room())) < 1:
            # The newest response is evicted from a full cache, as in vLLM, and is first in the waiting queue.
            self._waiting.appendleft(self.rows[-1])
            self.rows = self.rows[:-1]
        # Contexts grow by one token per row and step, so the middle of the stretch is the mean.
        given, written = self.prompts[self.rows[:, _PROMPT]].sum(), self.rows[:, _WRITTEN].sum()
        context = float(given + written + len(self.rows) * (steps - 1) / 2)
        self._stretch = steps, steps * self.speed.decode_s(len(self.rows), context)
        return self.now + self._stretch[1]

    def advance(self) -> list[tuple[int, int]]:
        """Advance to the next event. Return the (prompt, sample) of the responses that end there."""
        steps, seconds = self._stretch
        self.now += seconds
        self.decode_steps += steps
        self.rows[:, _WRITTEN] += steps
        self.rows[:, _LEFT] -= steps
        ended = [(prompt, sample) for prompt, sample, _, left in self.rows.tolist() if not left]
        self.rows = self.rows[self.rows[:, _LEFT] > 0]
        for prompt_index in ended:
            job = self._jobs.pop(prompt_index)
            self._unfinished[id(job)] -= 1
            if not self._unfinished[id(job)]:
                self.queue.on_job_end(job)
        return ended

    def _take(self) -> None:
        for job in self.queue.next_jobs(self.speed.max_rows - len(self.rows) - len(self._waiting)):
            self._unfinished[id(job)] = len(job.samples)
            for sample in job.samples.tolist():
                self._jobs[job.prompt_index, sample] = job
                self._waiting.append(np.array([job.prompt_index, sample, 0, self.answers[job.prompt_index, sample]]))
        while self._waiting:
            prompt, _, written, _ = self._waiting[0].tolist()
            # A prompt is computed once for all its running responses; tokens of preempted responses are computed again.
            new = 0 if prompt in self.rows[:, _PROMPT] else int(self.prompts[prompt])
            cache = self.speed.cache_tokens
            if cache is not None and len(self.rows) and self._used() + written + 1 + new > (1 - _WATERMARK) * cache:
                break
            self.now += self.speed.prefill_s(written + new)
            self.rows = np.vstack([self.rows, self._waiting.popleft()])

    def _used(self) -> int:
        """Return the tokens in the cache. A prompt counts once for all its responses."""
        return int(self.rows[:, _WRITTEN].sum() + self.prompts[np.unique(self.rows[:, _PROMPT])].sum())

    def _steps_with_room(self) -> int:
        cache = self.speed.cache_tokens
        return sys.maxsize if cache is None else (cache - self._used()) // len(self.rows)

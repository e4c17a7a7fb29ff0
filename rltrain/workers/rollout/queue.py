"""Jobs of one task, shared by the engine replicas.

Problem: responses differ in length, so equal shares leave replicas idle. Choice: enough jobs to fill all replicas are
dealt in advance; then a replica with room pulls more by a counter in the process group's store. Left out: stealing a
running job from another replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from rltrain.common.device import COLLECTIVE_TIMEOUT
from rltrain.workers.rollout.contract import Job

_ABORTED = "rollout/given_up"


@dataclass(frozen=True)
class Replica:
    """Engine replica: ``size`` neighbouring ranks."""

    number: int
    count: int
    member: int
    """Index of this rank in the replica."""
    size: int
    group: Any = None
    """Process group of its members (None for a single rank)."""

    @property
    def is_leader(self) -> bool:
        return self.member == 0

    def agree(self, value: Any) -> Any:
        """Broadcast the leader's value (small, picklable) to all members."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group_src=0, group=self.group)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Gather the members' values (small, picklable) on the leader, which waits for all; others get nothing."""
        if self.size == 1:
            return [value]
        box = [None] * self.size if self.is_leader else None
        dist.gather_object(value, box, group_dst=0, group=self.group)
        return box or []


def make_replica(size: int) -> Replica:
    """Return the replica of this rank (a collective over all ranks)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    # torch requires every rank to create every group. The backend is gloo, because small Python objects are sent. The
    # timeout is long, because members other than the leader may have to wait until the leader has finished generating.
    groups = [
        dist.new_group(list(range(first, first + size)), COLLECTIVE_TIMEOUT, "gloo") if size > 1 else None
        for first in range(0, world, size)
    ]
    return Replica(rank // size, world // size, rank % size, size, groups[rank // size])


def samples_per_job(num_prompts: int, num_samples: int, num_replicas: int, max_num_seqs: int) -> int:
    """Return the samples per job: all of a prompt, or fewer if replicas would otherwise get unequal shares.

    An engine computes a prompt once per job, so prompts are split only if there are fewer than four jobs per replica
    and they cannot be dealt equally.
    """
    for cut in range(1, num_samples + 1):
        size = -(-num_samples // cut)
        num_jobs = num_prompts * -(-num_samples // size)
        if size <= max_num_seqs and (num_jobs % num_replicas == 0 or num_jobs >= 4 * num_replicas):
            return size
    return 1


def abort(store: dist.Store) -> None:
    """Abort all queues of this ``store``."""
    store.add(_ABORTED, 1)


class JobQueue:
    """Jobs of one replica: first its dealt jobs, then jobs from the shared rest, one by one.

    jobs: all jobs of the task, in starting order. The first ``num_dealt`` are dealt to the replicas in alternating
    directions; if that is all jobs, the assignment is deterministic. target_complete: stop when this many prompts are
    complete over all replicas, including the first ``num_required`` prompts. prepare: applied to jobs when they are
    taken, for example to load their images. can_end: stop after `abort`.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        num_dealt: int,
        replica: Replica,
        store: dist.Store,
        key: str,
        target_complete: int | None = None,
        num_required: int = 0,
        prepare: Callable[[list[Job]], list[Job]] = list,
        *,
        can_end: bool = False,
    ) -> None:
        self.taken: list[Job] = []
        self._jobs = jobs
        self._num_dealt = num_dealt
        self._replica = replica
        self._store = store
        self._key = key
        self._target_complete = target_complete
        self._num_required = num_required
        self._prepare = prepare
        self._can_end = can_end
        self._jobs_of = Counter(job.prompt_index for job in jobs)
        # A prompt whose responses are all complete has no job, so it never ends here and must not be waited for.
        self._num_required_with_jobs = sum(prompt_index < num_required for prompt_index in self._jobs_of)
        self._mine = [
            job_index for job_index in range(num_dealt) if _dealt_to(job_index, replica.count) == replica.number
        ]
        self._largest = max((len(job.samples) for job in jobs), default=0)
        self._empty = False

    def next_jobs(self, most: int) -> list[Job]:
        """Return jobs of at most ``most`` samples in total; no job if none is left or the largest would not fit."""
        if self._empty or most < self._largest or self.stopped():
            return []
        numbers, self._empty = self._replica.agree(self._draw(most) if self._replica.is_leader else None)
        jobs = [self._jobs[number] for number in numbers]
        self.taken += jobs  # before preparation, because prepared jobs may be large
        return self._prepare(jobs)

    def _draw(self, most: int) -> tuple[list[int], bool]:
        """Return indices of jobs, and True if the queue is empty."""
        numbers: list[int] = []
        # A number drawn from the counter cannot be given back, so it is drawn only if even the largest job would fit.
        while most >= self._largest:
            number = self._mine.pop(0) if self._mine else self._num_dealt + self._store.add(self._key + "/next", 1) - 1
            if number >= len(self._jobs):
                return numbers, True
            numbers.append(number)
            most -= len(self._jobs[number].samples)
        return numbers, False

    def on_job_end(self, job: Job) -> None:
        """Record the end of a job of this replica."""
        if self._target_complete is None or not self._replica.is_leader:
            return
        num_jobs, key = self._jobs_of[job.prompt_index], f"{self._key}/of/{job.prompt_index}"
        if num_jobs > 1:
            if self._store.add(key, 1) < num_jobs:
                return
            # Delete the counter, because otherwise the store would keep a key for every prompt of the run.
            self._store.delete_key(key)
        # Count required prompts first, so that no replica sees the total without them.
        if job.prompt_index < self._num_required:
            self._store.add(self._key + "/must", 1)
        self._store.add(self._key + "/ended", 1)

    @property
    def may_stop(self) -> bool:
        """Return False if `stopped` always returns False."""
        return self._can_end or self._target_complete is not None

    def stopped(self) -> bool:
        """Return True if enough prompts are complete, or after `abort`."""
        if not self.may_stop:
            return False
        return bool(self._replica.agree(self._is_over() if self._replica.is_leader else None))

    def _is_over(self) -> bool:
        if self._can_end and self._count(_ABORTED):
            return True
        return self._target_complete is not None and self._target_reached(self._target_complete)

    def _target_reached(self, target_complete: int) -> bool:
        return self._count(self._key + "/ended") >= target_complete and (
            not self._num_required_with_jobs or self._count(self._key + "/must") >= self._num_required_with_jobs
        )

    def _count(self, key: str) -> int:
        # `get` would wait for a missing counter. Adding 0 would enlarge the file of a file store with each call.
        return int(self._store.get(key)) if self._store.check([key]) else 0


def _dealt_to(job_index: int, num_replicas: int) -> int:
    # Alternate the direction, because the longest responses come first: otherwise the first replica would get the
    # longest of every round.
    turn, position = divmod(job_index, num_replicas)
    return position if turn % 2 == 0 else num_replicas - 1 - position

"""Work for a single engine, without workers."""

import itertools
from collections.abc import Sequence

import numpy as np
import torch.distributed as dist

from rltrain.seeds import sample_seeds
from rltrain.workers.rollout.base import Generation, Job, Sampling
from rltrain.workers.rollout.queue import JobQueue, Replica

ALONE = Replica(number=0, count=1, member=0, size=1)
_CALLS = itertools.count()
_STORE = dist.HashStore()


def jobs_of(prompts: Sequence[np.ndarray], num_samples: int, step: int = 1, seed: int = 7) -> list[Job]:
    """One job a prompt."""
    seeds = sample_seeds(seed, step, range(len(prompts)), num_samples).reshape(-1, num_samples)
    return [Job(place, np.arange(num_samples), prompt, seeds[place]) for place, prompt in enumerate(prompts)]


def queue_of(jobs: Sequence[Job], num_dealt: int = 0, enough: int | None = None, must: int = 0) -> JobQueue:
    return JobQueue(jobs, num_dealt, ALONE, _STORE, f"test/{next(_CALLS)}", enough, must)


def generate(engine, sampling: Sampling, prompts: Sequence[np.ndarray], num_samples: int, step: int = 1) -> Generation:
    """Answers prompt by prompt, whatever the order in which they were served."""
    queue = queue_of(jobs_of(prompts, num_samples, step))
    return engine.generate(queue, sampling)

"""Images of a task's prompts, loaded by the process whose engine runs them.

Opening and scaling an image takes tens of milliseconds of a core, and an engine takes many prompts at once. So several
images are loaded in parallel, only by the replica that takes the job.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from rltrain.data.images import PromptImages
from rltrain.data.prompts import PromptStore
from rltrain.workers.rollout.contract import Job


class TaskImages:
    """Loader of the prompts' images. rows: of the task's prompts in the store. seconds: total time spent.

    keep: keep the pixels after the last job of a prompt has ended.
    """

    def __init__(self, store: PromptStore, rows: NDArray[np.int32], *, keep: bool) -> None:
        self.seconds = 0.0
        self._store, self._rows, self._keep = store, rows, keep
        self._num_running: Counter[int] = Counter()
        # By prompt index: several jobs may share a prompt, and the trainer gets its pixels once.
        self._read: dict[int, PromptImages | None] = {}

    def of(self, place: int) -> PromptImages | None:
        """Return the images of a prompt that a job was taken for."""
        return self._read.get(place)

    def prepare(self, jobs: Sequence[Job]) -> list[Job]:
        """Add images to the jobs whose prompts have some."""
        started = time.perf_counter()
        self._num_running.update(job.place for job in jobs)
        seeing = {job.place for job in jobs if self._store.num_images[self._rows[job.place]]}
        new = np.array(sorted(seeing - self._read.keys()), dtype=np.int64)
        if len(new):
            # Sorted by position in the file, so that each row group is read once.
            assert self._store.stored_images is not None
            new = new[self._store.stored_images.read_order(self._rows[new])]
        with ThreadPoolExecutor(torch.get_num_threads()) as readers:
            prompts = readers.map(self._store.encoded, self._rows[new].tolist())
            self._read.update((place, prompt.images) for place, prompt in zip(new.tolist(), prompts, strict=True))
        self.seconds += time.perf_counter() - started
        return [replace(job, images=self.of(job.place)) for job in jobs]

    def ended(self, job: Job) -> None:
        """Record the end of a job that was prepared here."""
        self._num_running[job.place] -= 1
        if not self._keep and not self._num_running[job.place]:
            self._read.pop(job.place, None)

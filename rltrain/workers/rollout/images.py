"""Images of a task's prompts, loaded by the process whose engine runs them.

Opening and scaling an image takes tens of milliseconds of a core, and an engine takes many prompts at once. So images
are loaded in parallel, and only by the replica that takes the job.
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
    """Loader of the prompts' images. rows: rows of the task's prompts in the store. seconds: total time spent.

    keep: True to keep the pixels after the last job of a prompt has ended.
    """

    def __init__(self, store: PromptStore, rows: NDArray[np.int32], *, keep: bool) -> None:
        self.seconds = 0.0
        self._store, self._rows, self._keep = store, rows, keep
        self._num_running: Counter[int] = Counter()
        # By prompt index, because several jobs may share a prompt, and the trainer gets its pixels once.
        self._read: dict[int, PromptImages | None] = {}

    def of(self, prompt_index: int) -> PromptImages | None:
        """Return the images of a prompt that a job was taken for."""
        return self._read.get(prompt_index)

    def prepare(self, jobs: Sequence[Job]) -> list[Job]:
        """Add images to the jobs whose prompts have images."""
        started = time.perf_counter()
        self._num_running.update(job.prompt_index for job in jobs)
        seeing = {job.prompt_index for job in jobs if self._store.num_images[self._rows[job.prompt_index]]}
        new = np.array(sorted(seeing - self._read.keys()), dtype=np.int64)
        if len(new):
            # Load in file order, so that each row group is read only once.
            assert self._store.stored_images is not None
            new = new[self._store.stored_images.read_order(self._rows[new])]
        with ThreadPoolExecutor(torch.get_num_threads()) as readers:
            prompts = readers.map(self._store.encoded, self._rows[new].tolist())
            self._read.update(
                (prompt_index, prompt.images) for prompt_index, prompt in zip(new.tolist(), prompts, strict=True)
            )
        self.seconds += time.perf_counter() - started
        return [replace(job, images=self.of(job.prompt_index)) for job in jobs]

    def on_job_end(self, job: Job) -> None:
        """Record the end of a job that was prepared here."""
        self._num_running[job.prompt_index] -= 1
        if not self._keep and not self._num_running[job.prompt_index]:
            self._read.pop(job.prompt_index, None)

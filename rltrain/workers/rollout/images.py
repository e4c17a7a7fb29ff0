"""The images of a task's prompts, read by the process whose engine answers them.

Opening and scaling an image takes tens of milliseconds of a core, and an engine asks for many prompts at once. So
several are read at the same time; only the replica that takes a job reads its images.
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


class PicturesOfTask:
    """Gives jobs their prompts with images. rows: of the task's prompts in the store. seconds: spent so far.

    keep: the pixels are wanted after the last job of a prompt has ended.
    """

    def __init__(self, store: PromptStore, rows: NDArray[np.int32], *, keep: bool) -> None:
        self.seconds = 0.0
        self._store, self._rows, self._keep = store, rows, keep
        self._num_running: Counter[int] = Counter()
        # By place: several jobs may answer one prompt, and the trainer then gets its pixels once.
        self._read: dict[int, PromptImages | None] = {}

    def of(self, place: int) -> PromptImages | None:
        """What the trainer gets of a prompt that a job has been taken for."""
        return self._read.get(place)

    def prepare(self, jobs: Sequence[Job]) -> list[Job]:
        """The jobs, those of prompts with images with these."""
        started = time.perf_counter()
        self._num_running.update(job.place for job in jobs)
        seeing = {job.place for job in jobs if self._store.num_images[self._rows[job.place]]}
        new = np.array(sorted(seeing - self._read.keys()), dtype=np.int64)
        if len(new):
            # A batch takes rows from all over a file, and each row group should be read once.
            assert self._store.pictures is not None
            new = new[self._store.pictures.as_they_stand(self._rows[new])]
        with ThreadPoolExecutor(torch.get_num_threads()) as readers:
            prompts = readers.map(self._store.encoded, self._rows[new].tolist())
            self._read.update((place, prompt.images) for place, prompt in zip(new.tolist(), prompts, strict=True))
        self.seconds += time.perf_counter() - started
        return [replace(job, images=self.of(job.place)) for job in jobs]

    def ended(self, job: Job) -> None:
        """A job that was prepared here has ended."""
        self._num_running[job.place] -= 1
        if not self._keep and not self._num_running[job.place]:
            self._read.pop(job.place, None)

"""What an engine has sampled so far, answer by answer, on the host."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from rltrain.errors import DataError
from rltrain.ragged import Ragged
from rltrain.workers.rollout.base import Finished, Generation, Job

Ints = NDArray[np.int64]


@dataclass
class Answer:
    """One answer as an engine of its own hands it over. reason: stop, length or abort."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    reason: str = "abort"
    seconds: float = 0.0


class Taken:
    """A job that an engine of its own works on; ``finished`` is told when its last answer has ended."""

    def __init__(self, job: Job, finished: Finished | None) -> None:
        self.answers = [Answer() for _ in job.samples]
        self._job = job
        self._finished = finished
        self._num_running = len(self.answers)

    def end(self) -> None:
        """One more answer has ended."""
        self._num_running -= 1
        if not self._num_running and self._finished and all(answer.reason != "abort" for answer in self.answers):
            self._finished(self._job, [answer.tokens for answer in self.answers])


def generation_of(answers: Sequence[Answer]) -> Generation:
    """The answers, in the order in which their jobs were taken."""
    chain = itertools.chain.from_iterable
    lengths = torch.tensor([len(answer.tokens) for answer in answers], dtype=torch.long)
    return Generation(
        Ragged(torch.tensor([*chain(answer.tokens for answer in answers)], dtype=torch.int32), lengths),
        Ragged(torch.tensor([*chain(answer.log_probs for answer in answers)], dtype=torch.float32), lengths),
        truncated=torch.tensor([answer.reason == "length" for answer in answers], dtype=torch.bool),
        aborted=torch.tensor([answer.reason == "abort" for answer in answers], dtype=torch.bool),
        seconds=torch.tensor([answer.seconds for answer in answers]),
    )


class Answers:
    """Answers are numbered in the order in which their jobs were taken. By answer: seeds, prompt_lengths (with what was given), given
    (how many tokens were), lengths (new tokens), ended.

    max_model_len: most tokens of prompt and answer together; finished: told of each job when its last answer has ended.
    """

    def __init__(self, max_tokens: int, max_model_len: int, finished: Finished | None) -> None:
        self.seeds: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        self.prompt_lengths, self.given, self.lengths = (np.zeros(0, dtype=np.int64) for _ in range(3))
        self._limits, self._owners = (np.zeros(0, dtype=np.int64) for _ in range(2))
        self.ended, self._truncated = (np.zeros(0, dtype=bool) for _ in range(2))
        self.num_running = 0
        self._max_tokens = max_tokens
        self._max_model_len = max_model_len
        self._finished = finished
        self._started = time.perf_counter()
        self._jobs: list[Job] = []
        self._num_open: list[int] = []
        self._tokens: list[list[int]] = []
        self._log_probs: list[list[float]] = []
        self._seconds: list[float] = []

    def add(self, jobs: Sequence[Job]) -> Ints:
        """The numbers of the answers to these jobs. Raises DataError for a prompt that leaves no room for an answer."""
        counts = [len(job.samples) for job in jobs]
        total, before = sum(counts), len(self.seeds)
        prompt_lengths = np.repeat([len(job.prompt) for job in jobs], counts)
        given = np.array([len(part) for job in jobs for part in job.given or [()] * len(job.samples)], dtype=np.int64)
        limits = np.minimum(self._max_tokens, self._max_model_len - prompt_lengths) - given
        if limits.min(initial=1) < 1:
            raise DataError(
                f"a prompt of {prompt_lengths.max()} tokens leaves no room for an answer within "
                f"actor_rollout_ref.rollout.max_model_len={self._max_model_len}. Raise it, or lower data.max_prompt_length."
            )
        self.seeds = np.concatenate([self.seeds, *(job.seeds for job in jobs)])
        self.prompt_lengths = np.concatenate([self.prompt_lengths, prompt_lengths + given])
        self.given = np.concatenate([self.given, given])
        self.lengths = np.concatenate([self.lengths, np.zeros(total, dtype=np.int64)])
        self._limits = np.concatenate([self._limits, limits])
        self._owners = np.concatenate([self._owners, np.repeat(len(self._jobs) + np.arange(len(jobs)), counts)])
        self.ended, self._truncated = (
            np.concatenate([flags, np.zeros(total, dtype=bool)]) for flags in (self.ended, self._truncated)
        )
        self._jobs += jobs
        self._num_open += counts
        self._tokens += [[] for _ in range(total)]
        self._log_probs += [[] for _ in range(total)]
        self._seconds += [0.0] * total
        self.num_running += total
        return np.arange(before, before + total)

    def write(
        self, numbers: Ints, tokens: NDArray[np.int64], log_probs: NDArray[np.float32], ends: NDArray[np.bool_]
    ) -> None:
        """One more token of each of these answers; those that have ended already are left as they are. ends: it is an end token."""
        running = ~self.ended[numbers]
        numbers, ends = numbers[running], ends[running]
        found = zip(numbers.tolist(), tokens[running].tolist(), log_probs[running].tolist(), strict=True)
        for number, token, log_prob in found:
            self._tokens[number].append(token)
            self._log_probs[number].append(log_prob)
        self.lengths[numbers] += 1
        full = self.lengths[numbers] == self._limits[numbers]
        self._truncated[numbers] = full & ~ends
        self.ended[numbers] = ends | full
        for number in numbers[ends | full].tolist():
            self._end(number)

    def _end(self, number: int) -> None:
        self._seconds[number] = time.perf_counter() - self._started
        self.num_running -= 1
        owner = int(self._owners[number])
        self._num_open[owner] -= 1
        if not self._num_open[owner] and self._finished:
            own = np.flatnonzero(self._owners == owner).tolist()
            self._finished(self._jobs[owner], [self._tokens[each] for each in own])

    def result(self) -> Generation:
        """What has not ended by now is given up."""
        aborted = torch.from_numpy(~self.ended)
        seconds = torch.tensor(self._seconds)
        seconds[aborted] = time.perf_counter() - self._started
        lengths = torch.tensor([len(row) for row in self._tokens], dtype=torch.long)
        chain = itertools.chain.from_iterable
        return Generation(
            tokens=Ragged(torch.tensor([*chain(self._tokens)], dtype=torch.int32), lengths),
            log_probs=Ragged(torch.tensor([*chain(self._log_probs)], dtype=torch.float32), lengths),
            truncated=torch.from_numpy(self._truncated),
            aborted=aborted,
            seconds=seconds,
        )

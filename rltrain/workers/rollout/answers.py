"""The tokens that an engine has sampled so far, answer by answer, on the host."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from rltrain.base.columns.ragged import Ragged
from rltrain.base.errors import DataError
from rltrain.workers.rollout.contract import Finished, Generation, Job

Ints = NDArray[np.int64]


@dataclass
class SampledAnswer:
    """One answer of an external engine."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    reason: str = "abort"
    """Stop, length, or the engine's word for an answer that was given up."""
    seconds: float = 0.0

    @property
    def whole(self) -> bool:
        return self.reason in ("stop", "length")


class RunningJob:
    """A job that an engine works on; ``finished`` is called when its last answer has ended."""

    def __init__(self, job: Job, finished: Finished | None) -> None:
        self.answers = [SampledAnswer() for _ in job.samples]
        self._job = replace(job, images=None)  # known until the call ends, and pixels are large
        self._finished = finished
        self._num_running = len(self.answers)

    def end(self) -> None:
        """One more answer has ended."""
        self._num_running -= 1
        # A job with an answer that was given up is not reported: its answers are begun anew or go on in a later step.
        if not self._num_running and self._finished and all(answer.whole for answer in self.answers):
            self._finished(self._job, [answer.tokens for answer in self.answers])


def generation_of(answers: Sequence[SampledAnswer]) -> Generation:
    """The answers, in the order in which their jobs were taken."""
    chain = itertools.chain.from_iterable
    lengths = torch.tensor([len(answer.tokens) for answer in answers], dtype=torch.long)
    return Generation(
        Ragged(torch.tensor([*chain(answer.tokens for answer in answers)], dtype=torch.int32), lengths),
        Ragged(torch.tensor([*chain(answer.log_probs for answer in answers)], dtype=torch.float32), lengths),
        truncated=torch.tensor([answer.reason == "length" for answer in answers], dtype=torch.bool),
        aborted=torch.tensor([not answer.whole for answer in answers], dtype=torch.bool),
        seconds=torch.tensor([answer.seconds for answer in answers]),
    )


class RunningAnswers:
    """All answers of a call, numbered in the order in which their jobs were taken.

    Per answer: seeds, prompt_lengths (given tokens included), shifts (of its positions, `Job.position_shift`), given
    (tokens it began with), lengths (new tokens), ended. max_model_len: most tokens of prompt and answer together.
    finished: called per job when its last answer has ended.
    """

    def __init__(self, max_tokens: int, max_model_len: int, finished: Finished | None) -> None:
        self.seeds: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        self.prompt_lengths, self.shifts, self.given, self.lengths, self._limits = (
            np.zeros(0, dtype=np.int64) for _ in range(5)
        )
        self.ended = np.zeros(0, dtype=bool)
        self.num_running = 0
        self._max_tokens = max_tokens
        self._max_model_len = max_model_len
        self._finished = finished
        self._started = time.perf_counter()
        self._answers: list[SampledAnswer] = []
        self._owners: list[RunningJob] = []

    def add(self, jobs: Sequence[Job]) -> Ints:
        """The numbers of the answers to these jobs. Raises DataError for a prompt that leaves no room for an answer."""
        counts = [len(job.samples) for job in jobs]
        total, before = sum(counts), len(self._answers)
        prompt_lengths = np.repeat([len(job.prompt) for job in jobs], counts)
        given = np.array([len(part) for job in jobs for part in job.given or [()] * len(job.samples)], dtype=np.int64)
        # Both limits count given tokens: they are part of the answer, and the model sees them.
        limits = np.minimum(self._max_tokens, self._max_model_len - prompt_lengths) - given
        if limits.min(initial=1) < 1:
            raise DataError(
                f"a prompt of {prompt_lengths.max()} tokens leaves no room for an answer within "
                f"actor_rollout_ref.rollout.max_model_len={self._max_model_len}. "
                "Raise it, or lower data.max_prompt_length."
            )
        self.seeds = np.concatenate([self.seeds, *(job.seeds for job in jobs)])
        self.prompt_lengths = np.concatenate([self.prompt_lengths, prompt_lengths + given])
        self.shifts = np.concatenate([self.shifts, np.repeat([job.asked.position_shift for job in jobs], counts)])
        self.given = np.concatenate([self.given, given])
        self.lengths = np.concatenate([self.lengths, np.zeros(total, dtype=np.int64)])
        self._limits = np.concatenate([self._limits, limits])
        self.ended = np.concatenate([self.ended, np.zeros(total, dtype=bool)])
        for job in jobs:
            taken = RunningJob(job, self._finished)
            self._answers += taken.answers
            self._owners += [taken] * len(taken.answers)
        self.num_running += total
        return np.arange(before, before + total)

    def write(
        self, numbers: Ints, tokens: NDArray[np.int64], log_probs: NDArray[np.float32], ends: NDArray[np.bool_]
    ) -> None:
        """Append a token per answer; answers that have ended stay unchanged. ends: whether it is an end token."""
        running = ~self.ended[numbers]
        numbers, ends = numbers[running], ends[running]
        found = zip(numbers.tolist(), tokens[running].tolist(), log_probs[running].tolist(), strict=True)
        for number, token, log_prob in found:
            answer = self._answers[number]
            answer.tokens.append(token)
            answer.log_probs.append(log_prob)
        self.lengths[numbers] += 1
        over = ends | (self.lengths[numbers] == self._limits[numbers])
        self.ended[numbers] = over
        for number, end in zip(numbers[over].tolist(), ends[over].tolist(), strict=True):
            self.num_running -= 1
            # An end token at the last possible place still ends the answer: it is whole, not cut.
            self._answers[number].reason = "stop" if end else "length"
            self._answers[number].seconds = time.perf_counter() - self._started
            self._owners[number].end()

    def result(self) -> Generation:
        """All answers; those that have not ended are given up."""
        for number in np.flatnonzero(~self.ended).tolist():
            self._answers[number].seconds = time.perf_counter() - self._started
        return generation_of(self._answers)

"""The turns that the embedded engine is working on, as arrays for its loop and as lists for whoever asked."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rltrain.base.errors import DataError
from rltrain.workers.rollout.contract import Job, Source, Turn, turns_of

Ints = NDArray[np.int64]


class RunningTurns:
    """All turns of a call, numbered in the order in which their jobs were taken.

    Per turn: seeds, prompt_lengths (given tokens included), shifts (of its positions, `Job.position_shift`), given
    (tokens it began with), lengths (new tokens), ended. max_model_len: most tokens of prompt and answer together.
    source: is told of every turn that has ended.
    """

    def __init__(self, max_tokens: int, max_model_len: int, source: Source) -> None:
        self.seeds: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        self.prompt_lengths, self.shifts, self.given, self.lengths, self._limits = (
            np.zeros(0, dtype=np.int64) for _ in range(5)
        )
        self.ended = np.zeros(0, dtype=bool)
        self.num_running = 0
        self._max_tokens = max_tokens
        self._max_model_len = max_model_len
        self._source = source
        self._started = time.perf_counter()
        self._turns: dict[int, Turn] = {}

    def add(self, jobs: Sequence[Job]) -> Ints:
        """The numbers of the turns of these jobs. Raises DataError for a prompt that leaves no room for an answer."""
        counts = [len(job.samples) for job in jobs]
        total, before = sum(counts), len(self.ended)
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
        turns = [turn for job in jobs for turn in turns_of(job)]
        self._turns.update(enumerate(turns, before))
        self.num_running += total
        return np.arange(before, before + total)

    def write(
        self, numbers: Ints, tokens: NDArray[np.int64], log_probs: NDArray[np.float32], ends: NDArray[np.bool_]
    ) -> None:
        """Append a token per turn; turns that have ended stay unchanged. ends: whether it is an end token."""
        running = ~self.ended[numbers]
        numbers, ends = numbers[running], ends[running]
        drawn = zip(numbers.tolist(), tokens[running].tolist(), log_probs[running].tolist(), strict=True)
        for number, token, log_prob in drawn:
            turn = self._turns[number]
            turn.tokens.append(token)
            turn.log_probs.append(log_prob)
        self.lengths[numbers] += 1
        over = ends | (self.lengths[numbers] == self._limits[numbers])
        self.ended[numbers] = over
        self.num_running -= int(over.sum())
        for number, end in zip(numbers[over].tolist(), ends[over].tolist(), strict=True):
            # An end token at the last possible place still ends the answer: it is whole, not cut.
            self._turns[number].reason = "stop" if end else "length"
            self._tell(number)

    def give_up(self) -> None:
        """Tell of all that are still running."""
        for number in list(self._turns):
            self._tell(number)

    def _tell(self, number: int) -> None:
        # The lists end here: whoever asked has copied them.
        turn = self._turns.pop(number)
        turn.seconds = time.perf_counter() - self._started
        self._source.ended(turn)

"""Running turns of the embedded engine, as arrays for its loop and as `Turn` objects for the source."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rltrain.common.errors import DataError
from rltrain.workers.rollout.contract import Job, Key, Source, Turn, turns_of
from rltrain.workers.rollout.stops import StopTexts

Ints = NDArray[np.int64]


class EndedTurn(NamedTuple):
    """Turn that has ended. row: row in the batch. tokens: all tokens after the prompt."""

    row: int
    key: Key
    tokens: NDArray[np.int32]


_NOTHING = np.zeros(0, dtype=np.int32)


class RunningTurns:
    """All turns of a call, numbered in the order in which their jobs were taken.

    Per turn: seeds, prompt_lengths (including given tokens), shifts (of positions: `EncodedPrompt.position_shift`),
    given (tokens at the start), lengths (new tokens), ended. max_model_len: maximum tokens of prompt and response.
    source: receives every turn that ends. stops: texts that end one.
    """

    def __init__(self, max_tokens: int, max_model_len: int, source: Source, stops: StopTexts) -> None:
        self.seeds: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)
        self.prompt_lengths, self.shifts, self.given, self.lengths, self._limits = (
            np.zeros(0, dtype=np.int64) for _ in range(5)
        )
        self.ended = np.zeros(0, dtype=bool)
        self.num_running = 0
        self._max_tokens = max_tokens
        self._max_model_len = max_model_len
        self._source, self._stops = source, stops
        self._started = time.perf_counter()
        self._turns: dict[int, tuple[Turn, NDArray[np.int32]]] = {}

    def add(self, jobs: Sequence[Job], reused: Mapping[Key, int] | None = None) -> Ints:
        """Add the turns of these jobs and return their numbers. reused: `Turn.num_reused` of turns that reuse a cache.

        Raises DataError for a prompt that leaves no room for a response.
        """
        counts = [len(job.samples) for job in jobs]
        total, before = sum(counts), len(self.ended)
        prompt_lengths = np.repeat([len(job.prompt) for job in jobs], counts)
        parts = [part for job in jobs for part in job.given or [_NOTHING] * len(job.samples)]
        given = np.array([len(part) for part in parts], dtype=np.int64)
        # Both limits count given tokens: they are part of the response, and the model sees them.
        limits = np.minimum(self._max_tokens, self._max_model_len - prompt_lengths) - given
        if limits.min(initial=1) < 1:
            raise DataError(
                f"a prompt of {prompt_lengths.max()} tokens leaves no space for a response within "
                f"actor_rollout_ref.rollout.max_model_len={self._max_model_len}. Raise it, or lower "
                "data.max_prompt_length."
            )
        self.seeds = np.concatenate([self.seeds, *(job.seeds for job in jobs)])
        self.prompt_lengths = np.concatenate([self.prompt_lengths, prompt_lengths + given])
        shifts = [text.position_shift for job in jobs for text in job.begun or [job.asked] * len(job.samples)]
        self.shifts = np.concatenate([self.shifts, np.array(shifts, dtype=np.int64)])
        self.given = np.concatenate([self.given, given])
        self.lengths = np.concatenate([self.lengths, np.zeros(total, dtype=np.int64)])
        self._limits = np.concatenate([self._limits, limits])
        self.ended = np.concatenate([self.ended, np.zeros(total, dtype=bool)])
        turns = [turn for job in jobs for turn in turns_of(job)]
        for turn in turns:
            turn.num_reused = (reused or {}).get((turn.prompt_index, turn.sample), 0)
        self._turns.update(enumerate(zip(turns, parts, strict=True), before))
        self.num_running += total
        return np.arange(before, before + total)

    def record_experts(self, numbers: Ints, experts: Iterable[NDArray[np.integer[Any]]]) -> None:
        """Append to `Turn.experts` of these turns, in order."""
        for number, part in zip(numbers.tolist(), experts, strict=True):
            if number in self._turns:
                self._turns[number][0].experts.append(part)

    def write(
        self, numbers: Ints, tokens: NDArray[np.int64], log_probs: NDArray[np.float32], ends: NDArray[np.bool_]
    ) -> list[EndedTurn]:
        """Append a token per turn; ended turns stay unchanged. ends: True for end tokens. Reports turns that ended to
        the source, and returns them.
        """
        running = ~self.ended[numbers]
        rows = np.flatnonzero(running)
        numbers, ends = numbers[running], ends[running]
        drawn = zip(numbers.tolist(), tokens[running].tolist(), log_probs[running].tolist(), strict=True)
        for index, (number, token, log_prob) in enumerate(drawn):
            turn, _ = self._turns[number]
            turn.tokens.append(token)
            turn.log_probs.append(log_prob)
            if self._stops and self._stops.end_of(turn.earlier, turn.tokens, len(turn.tokens) - 1):
                ends[index] = True
        self.lengths[numbers] += 1
        over = ends | (self.lengths[numbers] == self._limits[numbers])
        self.ended[numbers] = over
        self.num_running -= int(over.sum())
        ended = []
        for row, number, end in zip(rows[over].tolist(), numbers[over].tolist(), ends[over].tolist(), strict=True):
            turn, given = self._turns[number]
            # An end token at the last position still completes the response: it is not truncated.
            turn.reason = "stop" if end else "length"
            ended.append(
                EndedTurn(row, (turn.prompt_index, turn.sample), np.array([*given, *turn.tokens], dtype=np.int32))
            )
            self._tell(number)
        return ended

    def abort(self) -> None:
        """Abort all running turns and report them."""
        for number in list(self._turns):
            self._tell(number)

    def _tell(self, number: int) -> None:
        # Release the lists, because the source has copied them.
        turn, _ = self._turns.pop(number)
        turn.seconds = time.perf_counter() - self._started
        self._source.on_turn_end(turn)

"""KV offload of conversations that wait for a reply, so that the next turn computes only new tokens.

The text of the next turn begins with all tokens that the row has computed. Its keys, values and states are copied out
of the batch so that another sequence can use the slot, and copied back before the new tokens. A copy may be dropped at
any time; the text is then computed like a new prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rltrain.models.attention.recurrent import State
from rltrain.workers.rollout.contract import Job, Key, Source
from rltrain.workers.rollout.embedded.running import EndedTurn


@dataclass(frozen=True)
class OffloadedRow:
    """Copy of a row's cache."""

    length: int
    """Number of cached tokens, including the prompt."""
    pairs: Mapping[tuple[int, int], tuple[Tensor, Tensor]]
    """Keys and values [kv heads, length, d] by layer and call."""
    states: Mapping[int, State]
    """States of recurrent layers after these tokens."""

    @property
    def num_bytes(self) -> int:
        """Memory in bytes."""
        parts = [*self.pairs.values(), *self.states.values()]
        return sum(tensor.nbytes for part in parts for tensor in part)


class OffloadedRows:
    """Offloaded rows of one `generate` call, longest waiting first."""

    def __init__(self) -> None:
        self._rows: dict[Key, tuple[NDArray[np.int32], OffloadedRow]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, turn: EndedTurn, row: OffloadedRow) -> None:
        """Keep the row of a turn that has ended."""
        self._rows[turn.key] = turn.tokens, row

    def take(self, jobs: Sequence[Job]) -> dict[Key, OffloadedRow]:
        """Remove and return the rows that these jobs continue."""
        kept = {}
        for job in jobs:
            for sample, given in zip(job.samples.tolist(), job.given or [], strict=bool(job.given)):
                tokens, row = self._rows.pop((job.prompt_index, sample), (None, None))
                # Keys and values are valid only if the text still begins with the cached tokens.
                if row and np.array_equal(given[: len(tokens)], tokens):  # type: ignore[arg-type]
                    kept[job.prompt_index, sample] = row
        return kept

    def drop_ended(self, source: Source) -> None:
        """Drop the rows of conversations that have no next turn."""
        self._rows = {key: kept for key, kept in self._rows.items() if source.is_pending(*key)}

    def fit(self, room_bytes: int) -> None:
        """Drop the rows that have waited longest, until the rest fits in this memory."""
        total = sum(row.num_bytes for _, row in self._rows.values())
        while self._rows and total > room_bytes:
            _, row = self._rows.pop(next(iter(self._rows)))
            total -= row.num_bytes

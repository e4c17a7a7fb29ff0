"""Keys and values of conversations that wait to be answered, so that a next turn computes only what is new.

The text of a next turn begins with all that the row has computed. Its keys, values and states are copied out of the
batch, where the row's place goes to another, and copied back in front of the new tokens. Nobody depends on a copy: it
may be dropped at any time, and the text is then computed as that of a new prompt.
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
class KeptRow:
    """What a cache keeps of one row."""

    length: int
    """Its first tokens, prompt included, that it is kept of."""
    pairs: Mapping[tuple[int, int], tuple[Tensor, Tensor]]
    """Keys and values [kv heads, length, d] by layer and call."""
    states: Mapping[int, State]
    """Of recurrent layers, behind these tokens."""

    @property
    def num_bytes(self) -> int:
        """Memory of it."""
        parts = [*self.pairs.values(), *self.states.values()]
        return sum(tensor.nbytes for part in parts for tensor in part)


class ParkedRows:
    """Rows of a `generate` whose conversations wait, the one that waits longest first."""

    def __init__(self) -> None:
        self._rows: dict[Key, tuple[NDArray[np.int32], KeptRow]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, turn: EndedTurn, row: KeptRow) -> None:
        """Keep the row of a turn that has ended."""
        self._rows[turn.key] = turn.tokens, row

    def take(self, jobs: Sequence[Job]) -> dict[Key, KeptRow]:
        """The rows that samples of these jobs go on from, which are no longer parked."""
        kept = {}
        for job in jobs:
            for sample, given in zip(job.samples.tolist(), job.given or [], strict=bool(job.given)):
                tokens, row = self._rows.pop((job.place, sample), (None, None))
                # Of any other text its keys and values would be wrong.
                if row and np.array_equal(given[: len(tokens)], tokens):  # type: ignore[arg-type]
                    kept[job.place, sample] = row
        return kept

    def drop_over(self, source: Source) -> None:
        """Drop the rows of conversations that do not go on."""
        self._rows = {key: kept for key, kept in self._rows.items() if source.goes_on(*key)}

    def fit(self, room_bytes: int) -> None:
        """Drop those that wait longest, until the others take at most so much memory."""
        total = sum(row.num_bytes for _, row in self._rows.values())
        while self._rows and total > room_bytes:
            _, row = self._rows.pop(next(iter(self._rows)))
            total -= row.num_bytes

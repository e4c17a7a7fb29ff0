"""States of recurrent layers for the rows of the embedded engine (`models.attention.recurrent`).

A prompt's state is computed once. Unlike keys and values it is changed by the first token of a response, so every row
gets a copy when it is added to the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rltrain.models.attention.recurrent import State


class RowStates:
    """States of all recurrent layers by row, or by place for prompts whose rows are not in the batch yet."""

    def __init__(self) -> None:
        self._rows: dict[int, State] = {}
        self._prompts: dict[int, dict[int, State]] = {}
        self._entering: list[tuple[int, int]] = []

    @property
    def num_layers(self) -> int:
        """Number of layers with a state."""
        return len(self._rows.keys() | self._prompts.keys())

    def add(self, places: Sequence[int], num_rows: Sequence[int]) -> None:
        """Register prompts at these places, and their numbers of rows."""
        self._entering += zip(places, num_rows, strict=True)

    @property
    def num_bytes(self) -> int:
        """Memory of the rows' states in bytes."""
        return sum(value.nbytes for state in self._rows.values() for value in state)

    def of_prompts(self, layer: int, places: Sequence[int | None]) -> State:
        """Return the states after the computed parts of prompts (None: zeros). At least one place is not None."""
        read = self._prompts[layer]
        nothing = State(
            *(torch.zeros_like(value) for value in read[next(place for place in places if place is not None)])
        )
        states = [nothing if place is None else read[place] for place in places]
        return State(*(torch.cat(parts) for parts in zip(*states, strict=True)))

    def keep_prompts(self, layer: int, places: Iterable[int], state: State) -> None:
        """Store the states of prompts, in the order of ``places``."""
        parts = zip(*(value.split(1) for value in state), strict=True)
        self._prompts.setdefault(layer, {}).update(zip(places, map(State._make, parts), strict=True))

    def of_rows(self, layer: int) -> State:
        """Return the states of all rows."""
        return self._rows[layer]

    def of_row(self, row: int) -> dict[int, State]:
        """Return copies of a row's states, by layer."""
        self.enter()
        return {layer: State(*(value[row : row + 1].clone() for value in state)) for layer, state in self._rows.items()}

    def keep_rows(self, layer: int, state: State) -> None:
        """Store the states of all rows."""
        self._rows[layer] = state

    def enter(self) -> None:
        """Append the rows of the new prompts to the batch."""
        for layer, read in self._prompts.items():
            new = [[value.expand(count, *value.shape[1:]) for value in read[place]] for place, count in self._entering]
            old = [self._rows[layer]] if layer in self._rows else []
            self._rows[layer] = State(*(torch.cat(parts) for parts in zip(*old, *new, strict=True)))
        self._prompts, self._entering = {}, []

    def select_rows(self, order: Tensor) -> None:
        """Keep the rows with these numbers, in this order."""
        for layer, state in self._rows.items():
            self._rows[layer] = State(*(value.index_select(0, order.to(value.device)) for value in state))

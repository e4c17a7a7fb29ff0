"""Batch: the one data structure between phases."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rltrain.ragged import Ragged

Column: TypeAlias = Ragged | Tensor | list[Any]
Rows: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]


class Batch:
    """n samples, column by column.

    A column is a `Ragged` (tokens, log-probs: one row a sample), a `Tensor` of shape [n, ...] (lengths, scores) or a list
    of n Python objects (texts). A column that is not there is a KeyError that lists those that are.
    """

    def __init__(self, columns: Mapping[str, Column] | Batch | None = None) -> None:
        self._columns: dict[str, Column] = {}
        if columns is not None:
            self.update(columns)

    def update(self, columns: Mapping[str, Column] | Batch) -> None:
        """Add or replace columns; every column has one row a sample."""
        for name, column in columns.items():
            if self._columns and len(column) != len(self):
                raise ValueError(f"column '{name}' has {len(column)} rows, the batch has {len(self)}")
            self._columns[name] = column

    @property
    def num_samples(self) -> int:
        return len(next(iter(self._columns.values()))) if self._columns else 0

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def items(self) -> ItemsView[str, Column]:
        return self._columns.items()

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> Column:
        try:
            return self._columns[name]
        except KeyError:
            known = ", ".join(sorted(self._columns)) or "none"
            raise KeyError(f"the batch has no column '{name}' (columns: {known})") from None

    def ragged(self, name: str) -> Ragged:
        """The column ``name``, which must be ragged."""
        column = self[name]
        if not isinstance(column, Ragged):
            raise TypeError(f"column '{name}' is a {type(column).__name__}, not a Ragged")
        return column

    def dense(self, name: str) -> Tensor:
        """The column ``name``, which must be a tensor."""
        column = self[name]
        if not isinstance(column, Tensor):
            raise TypeError(f"column '{name}' is a {type(column).__name__}, not a Tensor")
        return column

    def select(self, rows: Rows) -> Batch:
        """The given samples, in the given order."""
        return Batch({name: _select(column, rows) for name, column in self._columns.items()})

    def split(self, counts: Sequence[int]) -> list[Batch]:
        """Consecutive parts of ``counts[i]`` samples."""
        parts = [Batch() for _ in counts]
        for name, column in self._columns.items():
            for part, piece in zip(parts, _split(column, counts), strict=True):
                part._columns[name] = piece
        return parts

    @classmethod
    def concat(cls, parts: Sequence[Batch]) -> Batch:
        """Samples of all parts, which must have the same columns."""
        return cls({name: _concat([part[name] for part in parts]) for name in parts[0]})

    def to(self, device: torch.device | str) -> Batch:
        return Batch({name: column if isinstance(column, list) else column.to(device) for name, column in self.items()})

    def __repr__(self) -> str:
        return f"Batch(samples={len(self)}, columns={sorted(self._columns)})"


def _select(column: Column, rows: Rows) -> Column:
    if isinstance(column, Ragged):
        return column.select(rows)
    if isinstance(column, Tensor):
        return column[torch.as_tensor(rows, dtype=torch.long, device=column.device)]
    return [column[row] for row in rows]


def _split(column: Column, counts: Sequence[int]) -> Sequence[Column]:
    if isinstance(column, Ragged):
        return column.split(counts)
    if isinstance(column, Tensor):
        return column.split(list(counts))
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [column[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _concat(columns: Sequence[Column]) -> Column:
    first = columns[0]
    if isinstance(first, Ragged):
        return Ragged.concat(columns)  # type: ignore[arg-type]
    if isinstance(first, Tensor):
        return torch.cat(columns)  # type: ignore[arg-type]
    return [item for column in columns for item in column]  # type: ignore[union-attr]

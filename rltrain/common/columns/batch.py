"""Batch: the data structure that is passed between phases.

Several responses share a prompt, and prompts (and their images) can be larger than responses. Therefore a batch stores
prompts in a *dictionary-encoded column*, like Arrow's DictionaryArray: every value once, and an index per sample. The
index also shows which samples share a prompt, so tokens need not be compared. Batches do not share dictionaries: a part
of a batch gets only the values that its samples use.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rltrain.common.columns.ragged import Ragged
from rltrain.common.device import send

Values: TypeAlias = Ragged | Tensor | list[Any]
RowNumbers: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]


class DictionaryColumn:
    """Column of n samples that stores each value once: sample i has ``values[index[i]]``. index: [n], int64."""

    __slots__ = ("index", "values")

    def __init__(self, values: Values, index: Tensor) -> None:
        self.values = values
        self.index = index

    def __len__(self) -> int:
        return len(self.index)

    def select(self, rows: RowNumbers) -> DictionaryColumn:
        """Return the given samples, in the given order, with the values that they use."""
        # A copy, because arrays from Ray are read-only, and torch would warn. `unique` also renumbers the values, so
        # that a part of a batch contains no unused prompt.
        entries, index = self.index[torch.tensor(rows, device=self.index.device).long()].unique(return_inverse=True)
        return DictionaryColumn(_select(self.values, entries.tolist()), index)

    def by_group(self, groups: NDArray[np.integer[Any]]) -> DictionaryColumn:
        """Return one value per group, from its first sample. groups [n]: samples of a group have equal values."""
        _, first, index = np.unique(groups, return_index=True, return_inverse=True)
        return DictionaryColumn(
            _select(self.values, self.index[torch.from_numpy(first)].tolist()), torch.from_numpy(index)
        )

    def to(self, device: torch.device | str) -> DictionaryColumn:
        return DictionaryColumn(_to(self.values, device), send(self.index, torch.device(device)))


Column: TypeAlias = Values | DictionaryColumn
_Kind = TypeVar("_Kind")


class Batch:
    """n samples, stored by column.

    A column is a `Ragged` (responses, log-probs: one row per sample), a `Tensor` of shape [n, ...] (lengths, scores), a
    list of n Python objects (texts) or a `DictionaryColumn` (prompts). A missing column raises KeyError with a list of
    the existing ones.
    """

    def __init__(self, columns: Mapping[str, Column] | Batch | None = None) -> None:
        self._columns: dict[str, Column] = {}
        if columns is not None:
            self.update(columns)

    def update(self, columns: Mapping[str, Column] | Batch) -> None:
        """Add or replace columns with one row per sample. Raises ValueError for another number of rows."""
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
            column_names = ", ".join(sorted(self._columns)) or "none"
            raise KeyError(f"the batch has no column '{name}' (columns: {column_names})") from None

    def ragged(self, name: str) -> Ragged:
        """Return the column ``name``. Raises TypeError if it is not ragged."""
        return self._of_kind(name, Ragged)

    def dense(self, name: str) -> Tensor:
        """Return the column ``name``. Raises TypeError if it is not a tensor."""
        return self._of_kind(name, Tensor)

    def dictionary(self, name: str) -> DictionaryColumn:
        """Return the column ``name``. Raises TypeError if it is not dictionary-encoded."""
        return self._of_kind(name, DictionaryColumn)

    def _of_kind(self, name: str, kind: type[_Kind]) -> _Kind:
        column = self[name]
        if not isinstance(column, kind):
            raise TypeError(f"column '{name}' is a {type(column).__name__}, not a {kind.__name__}")
        return column

    def select(self, rows: RowNumbers) -> Batch:
        """Return the given samples, in the given order."""
        return Batch({name: _select(column, rows) for name, column in self._columns.items()})

    def split(self, counts: Sequence[int]) -> list[Batch]:
        """Return consecutive parts of ``counts[i]`` samples."""
        parts = [Batch() for _ in counts]
        for name, column in self._columns.items():
            for part, piece in zip(parts, _split(column, counts), strict=True):
                # The fields are set directly. `update` would check the columns of every part, but parts with the same
                # counts have equal lengths.
                part._columns[name] = piece
        return parts

    @classmethod
    def concat(cls, parts: Sequence[Batch]) -> Batch:
        """Concatenate parts, which must have the same columns."""
        return cls({name: _concat([part[name] for part in parts]) for name in parts[0]})

    def to(self, device: torch.device | str) -> Batch:
        return Batch({name: _to(column, device) for name, column in self.items()})

    def __repr__(self) -> str:
        return f"Batch(samples={len(self)}, columns={sorted(self._columns)})"


_AnyColumn = TypeVar("_AnyColumn", bound=Column)


def _select(column: _AnyColumn, rows: RowNumbers) -> _AnyColumn:
    selection: Any
    if isinstance(column, Ragged | DictionaryColumn):
        selection = column.select(rows)
    elif isinstance(column, Tensor):
        selection = column[torch.tensor(rows, dtype=torch.long, device=column.device)]
    else:
        selection = [column[row] for row in rows]
    return selection


def _to(column: _AnyColumn, device: torch.device | str) -> _AnyColumn:
    if isinstance(column, list):
        return column
    return send(column, torch.device(device)) if isinstance(column, Tensor) else column.to(device)  # type: ignore[return-value]


def _split(column: Column, counts: Sequence[int]) -> Sequence[Column]:
    if isinstance(column, Ragged):
        return column.split(counts)
    if isinstance(column, Tensor):
        return column.split(list(counts))
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [_select(column, range(end - count, end)) for end, count in zip(ends, counts, strict=True)]


def _concat(columns: Sequence[Any]) -> Column:
    first = columns[0]
    if isinstance(first, Ragged):
        return Ragged.concat(columns)
    if isinstance(first, Tensor):
        return torch.cat(list(columns))
    if isinstance(first, DictionaryColumn):
        # Values of the parts are not compared, so a prompt in two parts is stored twice until `by_group`.
        starts = np.cumsum([0, *(len(column.values) for column in columns)]).tolist()
        # zip is not strict, because the last start is the end of all values and has no column.
        index = torch.cat([column.index + start for column, start in zip(columns, starts, strict=False)])
        return DictionaryColumn(_concat([column.values for column in columns]), index)  # type: ignore[arg-type]
    return [item for column in columns for item in column]

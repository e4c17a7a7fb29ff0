"""Ragged: n rows of different length, stored end to end.

Answers differ widely in length, so a padded tensor would be padding for a large part, and every sum would need a mask.
Here there is neither. Left out: arithmetic, which is done on ``values``; `Ragged.like` gives the result its rows back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Ragged:
    """Rows of different length in one tensor.

    ``values`` has shape [total, ...] and ``lengths`` shape [n] (int64, same device), with ``lengths.sum() == total``.
    Row i is ``values[offsets[i] : offsets[i + 1]]``. Rows may be empty.
    """

    __slots__ = ("lengths", "values")

    def __init__(self, values: Tensor, lengths: Tensor) -> None:
        total = int(lengths.sum())
        if lengths.dim() != 1 or values.dim() < 1 or values.shape[0] != total:
            raise ValueError(
                f"lengths {tuple(lengths.shape)} add up to {total}, values have shape {tuple(values.shape)}"
            )
        self.values = values
        self.lengths = lengths

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor]) -> Ragged:
        """Join tensors of shape [length_i, ...] (at least one, of one dtype)."""
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.long, device=rows[0].device)
        return cls(torch.cat(list(rows)), lengths)

    @property
    def offsets(self) -> Tensor:
        """Start of every row and the end of the last: shape [n + 1]."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    @property
    def row_ids(self) -> Tensor:
        """The row that each value belongs to: shape [total]."""
        rows = torch.arange(len(self), device=self.lengths.device)
        # Without output_size, repeat_interleave waits for the device to learn how long its result is.
        return rows.repeat_interleave(self.lengths, output_size=self.values.shape[0])

    @property
    def positions(self) -> Tensor:
        """The place of each value in its row, counted from 0: shape [total]."""
        return torch.arange(self.values.shape[0], device=self.lengths.device) - self.offsets[:-1][self.row_ids]

    def __len__(self) -> int:
        return self.lengths.shape[0]

    def __getitem__(self, row: int) -> Tensor:
        # A range resolves negative numbers, and raises IndexError where a slice would silently be empty.
        row = range(len(self))[row]
        start = int(self.lengths[:row].sum())
        return self.values[start : start + int(self.lengths[row])]

    def rows(self) -> list[Tensor]:
        """All rows as views."""
        return list(self.values.split(self.lengths.tolist()))

    def select(self, rows: Tensor | Sequence[int] | NDArray[np.integer[Any]]) -> Ragged:
        """The given rows, in the given order; a row may be taken more than once."""
        index = torch.as_tensor(rows, dtype=torch.long, device=self.lengths.device)
        lengths = self.lengths[index]
        total = int(lengths.sum())
        # All values of a row move by the same distance, so one index for all rows takes the place of a loop over them.
        shift = self.offsets[:-1][index] - torch.nn.functional.pad(lengths.cumsum(0), (1, 0))[:-1]
        where = shift.repeat_interleave(lengths, output_size=total) + torch.arange(total, device=lengths.device)
        return Ragged(self.values[where], lengths)

    def split(self, counts: Sequence[int]) -> list[Ragged]:
        """Consecutive parts of ``counts[i]`` rows."""
        lengths = self.lengths.split(list(counts))
        values = self.values.split([int(part.sum()) for part in lengths])
        return [Ragged(part, part_lengths) for part, part_lengths in zip(values, lengths, strict=True)]

    @classmethod
    def concat(cls, parts: Sequence[Ragged]) -> Ragged:
        return cls(torch.cat([part.values for part in parts]), torch.cat([part.lengths for part in parts]))

    def sum(self) -> Tensor:
        """Sum of each row: shape [n, ...]; an empty row sums to 0. Sums of bools are counts."""
        values = self.values.long() if self.values.dtype == torch.bool else self.values
        return values.new_zeros(len(self), *values.shape[1:]).index_add(0, self.row_ids, values)

    def mean(self) -> Tensor:
        """Mean of each row: shape [n, ...]; the mean of an empty row is 0."""
        count = self.lengths.clamp(min=1).view(-1, *[1] * (self.values.dim() - 1))
        return self.sum() / count

    def broadcast(self, per_row: Tensor) -> Ragged:
        """One number per row, repeated over its values: [n] -> the lengths of this Ragged."""
        return Ragged(per_row[self.row_ids], self.lengths)

    def like(self, values: Tensor) -> Ragged:
        """Other values of the same row lengths."""
        return Ragged(values, self.lengths)

    def to(self, device: torch.device | str) -> Ragged:
        return Ragged(self.values.to(device), self.lengths.to(device))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ragged):
            return NotImplemented
        return torch.equal(self.lengths, other.lengths) and torch.equal(self.values, other.values)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Ragged(rows={len(self)}, values={tuple(self.values.shape)}, dtype={self.values.dtype})"

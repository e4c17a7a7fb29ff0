"""Ragged: n rows of different length, stored end to end.

Response lengths differ widely, so a padded tensor would be mostly padding, and every sum would need a mask. Ragged data
needs neither. Lengths stay on the host, because reading them from an accelerator would wait for all its kernels.
Arithmetic is done on ``values``, and `Ragged.like` restores the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rltrain.common.device import send


class _Rows:
    """Lengths [n] on the host and their cached device tensors, shared by all data with the same rows."""

    __slots__ = ("ids", "lengths", "sent", "total")

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths.cpu()
        self.total = int(self.lengths.sum())
        self.sent: dict[torch.device, Tensor] = {}
        self.ids: dict[torch.device, Tensor] = {}

    def __reduce__(self) -> tuple[type[_Rows], tuple[Tensor]]:
        return _Rows, (self.lengths,)  # cached tensors are not pickled

    def lengths_on(self, device: torch.device) -> Tensor:
        if device not in self.sent:
            self.sent[device] = send(self.lengths, device)
        return self.sent[device]

    def ids_on(self, device: torch.device) -> Tensor:
        if device not in self.ids:
            # Compute the ids on the host. A device would have to synchronise to know the length of the result.
            self.ids[device] = send(torch.arange(len(self.lengths)).repeat_interleave(self.lengths), device)
        return self.ids[device]


class Ragged:
    """Rows of different length in one tensor.

    ``values`` has shape [total, ...] and ``lengths`` shape [n] (int64, on the host), with ``lengths.sum() == total``.
    Row i is ``values[offsets[i] : offsets[i + 1]]``. Rows may be empty. Derived tensors (sums, row ids) are on the
    device of the values.
    """

    __slots__ = ("_rows", "values")

    def __init__(self, values: Tensor, lengths: Tensor | _Rows) -> None:
        rows = lengths if isinstance(lengths, _Rows) else _Rows(lengths)
        if rows.lengths.dim() != 1 or values.dim() < 1 or values.shape[0] != rows.total:
            raise ValueError(
                f"lengths {tuple(rows.lengths.shape)} add up to {rows.total}, values have shape {tuple(values.shape)}"
            )
        self.values = values
        self._rows = rows

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor]) -> Ragged:
        """Concatenate tensors of shape [length_i, ...] (at least one, of one dtype)."""
        return cls(torch.cat(list(rows)), torch.tensor([len(row) for row in rows], dtype=torch.long))

    @property
    def lengths(self) -> Tensor:
        """Number of values of each row: shape [n], on the host."""
        return self._rows.lengths

    @property
    def offsets(self) -> Tensor:
        """Start of every row and the end of the last: shape [n + 1], on the host."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    @property
    def row_ids(self) -> Tensor:
        """Row index of each value: shape [total]."""
        return self._rows.ids_on(self.values.device)

    @property
    def positions(self) -> Tensor:
        """Index of each value in its row: shape [total]."""
        starts = send(self.offsets[:-1], self.values.device)
        return torch.arange(self.values.shape[0], device=self.values.device) - starts[self.row_ids]

    @property
    def from_end(self) -> Tensor:
        """Index of each value in its row, counted from 0 at the row's end: shape [total]."""
        ends = send(self.offsets[1:], self.values.device)
        return ends[self.row_ids] - 1 - torch.arange(self.values.shape[0], device=self.values.device)

    def __len__(self) -> int:
        return self.lengths.shape[0]

    def __getitem__(self, row: int) -> Tensor:
        # Indexing a range resolves negative indices. It also raises IndexError where a slice would be empty.
        row = range(len(self))[row]
        start = int(self.lengths[:row].sum())
        return self.values[start : start + int(self.lengths[row])]

    def rows(self) -> list[Tensor]:
        """Return all rows as views."""
        return list(self.values.split(self.lengths.tolist()))

    def select(self, rows: Tensor | Sequence[int] | NDArray[np.integer[Any]]) -> Ragged:
        """Return the given rows, in the given order. A row may be repeated."""
        # A copy, because arrays from Ray are read-only, and torch would warn.
        numbers = rows if isinstance(rows, Tensor) else np.array(rows, dtype=np.int64)
        index = torch.as_tensor(numbers, dtype=torch.long, device="cpu")
        lengths = self.lengths[index]
        total = int(lengths.sum())
        # All values of a row are shifted by the same distance, so one index replaces a loop over rows.
        shift = self.offsets[:-1][index] - torch.nn.functional.pad(lengths.cumsum(0), (1, 0))[:-1]
        where = shift.repeat_interleave(lengths, output_size=total) + torch.arange(total)
        return Ragged(self.values[send(where, self.values.device)], lengths)

    def split(self, counts: Sequence[int]) -> list[Ragged]:
        """Return consecutive parts of ``counts[i]`` rows."""
        lengths = self.lengths.split(list(counts))
        values = self.values.split([int(part.sum()) for part in lengths])
        return [Ragged(part, part_lengths) for part, part_lengths in zip(values, lengths, strict=True)]

    @classmethod
    def concat(cls, parts: Sequence[Ragged]) -> Ragged:
        return cls(torch.cat([part.values for part in parts]), torch.cat([part.lengths for part in parts]))

    def sum(self) -> Tensor:
        """Return the sum of each row: shape [n, ...]; an empty row sums to 0. Sums of bools are counts."""
        values = self.values.long() if self.values.dtype == torch.bool else self.values
        return values.new_zeros(len(self), *values.shape[1:]).index_add(0, self.row_ids, values)

    def mean(self) -> Tensor:
        """Return the mean of each row: shape [n, ...]; the mean of an empty row is 0."""
        count = self._rows.lengths_on(self.values.device).clamp(min=1).view(-1, *[1] * (self.values.dim() - 1))
        return self.sum() / count

    def broadcast(self, per_row: Tensor) -> Ragged:
        """Repeat one number per row [n] over the values of the row."""
        return Ragged(per_row[self.row_ids], self._rows)

    def like(self, values: Tensor) -> Ragged:
        """Return other values with the same row lengths."""
        return Ragged(values, self._rows)

    def to(self, device: torch.device | str) -> Ragged:
        """Copy the values to another device (to an accelerator without waiting, see `device.send`)."""
        return self.like(send(self.values, torch.device(device)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ragged):
            return NotImplemented
        return torch.equal(self.lengths, other.lengths) and torch.equal(self.values, other.values)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Ragged(rows={len(self)}, values={tuple(self.values.shape)}, dtype={self.values.dtype})"

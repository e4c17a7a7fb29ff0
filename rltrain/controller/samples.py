"""Samples: what the driver knows of a batch. Numbers it owns; payload it only points at.

Payload (tokens, log-probs, texts) stays in Ray's object store where a worker produced it. The driver hands out `Request`s:
which objects to fetch and which rows of them, resolved inside the worker that needs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from rltrain import columns as c
from rltrain.batch import Batch, Column, DictionaryColumn
from rltrain.ragged import Ragged

Array = NDArray[Any]


@dataclass(frozen=True)
class Part:
    """One object in the store: the given columns of the given samples; sample ``ids[i]`` is its row ``rows[i]``."""

    ref: Any
    columns: tuple[str, ...]
    ids: Array
    rows: Array


def whole(ref: Any, columns: tuple[str, ...], ids: Array) -> Part:
    """An object that holds the samples ``ids`` in that order and nothing else."""
    return Part(ref, columns, ids, np.arange(len(ids)))


@dataclass(frozen=True)
class Piece:
    """Rows ``rows`` of the object behind ``ref[0]`` are wanted at ``places``. A ref in a list is not fetched by Ray itself."""

    ref: list[Any]
    columns: tuple[str, ...]
    rows: Array
    places: Array


@dataclass(frozen=True)
class Request:
    """A batch to be put together by the worker that receives it. groups [n]: samples of one group share their prompt."""

    num_samples: int
    pieces: list[Piece]
    numbers: dict[str, Array] = field(default_factory=dict)
    groups: Array | None = None

    @property
    def as_batch(self) -> Batch:
        """This request as an argument of a call: the type says what the worker will receive."""
        return cast(Batch, self)


class Samples:
    """n samples, known by their ids 0..n-1. ``numbers[name]`` is one number a sample."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.numbers: dict[str, Array] = {}
        self._parts: dict[tuple[int, tuple[str, ...]], Part] = {}

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, name: str) -> Array:
        try:
            return self.numbers[name]
        except KeyError:
            raise KeyError(f"the samples have no number '{name}' (known: {', '.join(sorted(self.numbers))})") from None

    def update(self, numbers: Mapping[str, Array]) -> None:
        """Add per-sample numbers [n]."""
        for name, values in numbers.items():
            if len(values) != self.num_samples:
                raise ValueError(f"'{name}' has {len(values)} numbers for {self.num_samples} samples")
            self.numbers[name] = np.asarray(values)

    def attach(self, parts: Sequence[Part]) -> None:
        """Add payload columns that now exist in the object store."""
        for part in parts:
            name = (id(part.ref), part.columns)
            if known := self._parts.get(name):  # so that one object is fetched once
                ids, rows = np.concatenate([known.ids, part.ids]), np.concatenate([known.rows, part.rows])
                part = Part(part.ref, part.columns, ids, rows)
            self._parts[name] = part

    def adopt(self, other: Samples, ids: Array, places: Array, numbers: Sequence[str] = ()) -> None:
        """Take the payload, and the given numbers, of the samples ``ids`` of ``other``: they are my samples ``places``."""
        new_id = np.full(len(other), -1)
        new_id[ids] = places
        for part in other._parts.values():
            kept = new_id[part.ids] >= 0
            if kept.any():  # else nothing of the object is needed any more
                self.attach([Part(part.ref, part.columns, new_id[part.ids][kept], part.rows[kept])])
        for name in numbers:
            self[name][places] = other[name][ids]

    def parts_with(self, column: str) -> list[Part]:
        """The objects that hold ``column``."""
        return [part for part in self._parts.values() if column in part.columns]

    @classmethod
    def join(cls, pieces: Sequence[tuple[Samples, Array]]) -> Samples:
        """The chosen samples (by id, in order) of several `Samples` as one, numbered anew from 0. A number that some lack is NaN there."""
        joined = cls(sum(len(ids) for _, ids in pieces))
        start = 0
        for samples, ids in pieces:
            joined.adopt(samples, ids, start + np.arange(len(ids)))
            start += len(ids)
        for name in dict.fromkeys(name for samples, _ in pieces for name in samples.numbers):
            columns = [samples.numbers.get(name, np.full(len(samples), np.nan))[ids] for samples, ids in pieces]
            joined.update({name: np.concatenate(columns)})
        return joined

    def request(
        self, ids: Array, columns: Sequence[str], numbers: Sequence[str] = (), optional: Sequence[str] = ()
    ) -> Request:
        """The given samples in the given order. Raises KeyError when a column is not there for every one of them.

        Of ``optional`` columns those rows come that there are.
        """
        columns = [*columns, *optional]
        pieces = []
        for part in self._parts.values():
            wanted = tuple(name for name in part.columns if name in columns)
            row_of = np.full(self.num_samples, -1, dtype=np.int32)
            row_of[part.ids] = part.rows
            places = np.flatnonzero(row_of[ids] >= 0).astype(np.int32)
            if wanted and len(places):
                pieces.append(Piece([part.ref], wanted, row_of[ids[places]], places))
        for name in columns:
            have = sum(len(piece.rows) for piece in pieces if name in piece.columns)
            if have != len(ids) and name not in optional:
                raise KeyError(f"column '{name}' is there for {have} of {len(ids)} samples")
        groups = self[c.GROUP][ids].astype(np.int32) if c.GROUP in self.numbers else None
        return Request(len(ids), pieces, {name: self[name][ids] for name in numbers}, groups)


def assemble(request: Request, objects: Sequence[Batch | list[Any]]) -> Batch:
    """The requested batch, from the fetched objects (one a piece). A list is an object of one column.

    Of a ragged column that some samples lack, their rows are empty.
    """
    batch = Batch()
    if not request.num_samples:
        return batch
    for name in dict.fromkeys(name for piece in request.pieces for name in piece.columns):
        having = [(piece, found) for piece, found in zip(request.pieces, objects, strict=True) if name in piece.columns]
        joined = Batch.concat([Batch({name: _column(found, name)}).select(piece.rows) for piece, found in having])
        places = np.concatenate([piece.places for piece, _ in having])
        column = joined.select(np.argsort(places, kind="stable"))[name]
        if isinstance(column, Ragged) and len(column) < request.num_samples:
            lengths = torch.zeros(request.num_samples, dtype=torch.long)
            lengths[torch.from_numpy(np.sort(places)).long()] = column.lengths
            column = Ragged(column.values, lengths)
        elif isinstance(column, DictionaryColumn) and request.groups is not None:
            column = column.by_group(request.groups)  # replicas that answered one prompt have a copy each
        batch.update({name: column})
    batch.update({name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in request.numbers.items()})
    return batch


def _column(found: Batch | list[Any], name: str) -> Column:
    return found if isinstance(found, list) else found[name]


_REFERENCE_BYTES = 28


def driver_bytes(value: Any) -> int:
    """Bytes that ``value`` takes through the driver: arrays by their size, a reference as 28 bytes, other leaves as 8."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Piece):
        return _REFERENCE_BYTES + value.rows.nbytes + value.places.nbytes
    if is_dataclass(value):
        return driver_bytes(vars(value))
    if isinstance(value, Mapping):
        return sum(driver_bytes(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(driver_bytes(item) for item in value)
    return 8

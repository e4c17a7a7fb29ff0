"""Driver's view of a batch: numbers per sample, and references to the payload.

Problem: tokens and log-probs of a step are gigabytes, and every pass distributes the samples differently. Choice: the
payload stays in Ray's object store on the worker that produced it. The driver sends a `Request` per rank, with the
objects to fetch and their rows, which the receiving worker resolves. `cross_node` reduces the transfers between nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from rltrain.common.columns import names as c
from rltrain.common.columns.batch import Batch, DictionaryColumn
from rltrain.common.columns.ragged import Ragged
from rltrain.config.passes import PASS_OF_CALL

Array = NDArray[Any]


@dataclass(frozen=True)
class StoredRows:
    """Columns of the object ``ref`` in the store: sample ``ids[i]`` is row ``rows[i]`` of the object."""

    ref: Any
    columns: tuple[str, ...]
    ids: Array
    rows: Array
    node: int = 0
    """Node that stores the object (`WorkerGroup.nodes`)."""
    piece: int | None = None
    """Index of the object in a list of objects."""


def whole(ref: Any, columns: tuple[str, ...], ids: Array, node: int = 0) -> StoredRows:
    """Return all rows of an object on ``node`` that consists of the samples ``ids``, in this order."""
    return StoredRows(ref, columns, ids, np.arange(len(ids)), node)


@dataclass(frozen=True)
class Request:
    """Batch to be assembled by the receiving worker; ids in ``parts`` are positions in the batch."""

    num_samples: int
    parts: list[StoredRows]
    numbers: dict[str, Array] = field(default_factory=dict)
    groups: Array | None = None
    """[n]: samples of one group share their prompt, on all replicas."""

    @property
    def as_batch(self) -> Batch:
        """Request as an argument of a call, typed as the Batch that the worker receives."""
        return cast(Batch, self)


class Samples:
    """n samples with ids 0..n-1. ``numbers[name]``: one number per sample."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.numbers: dict[str, Array] = {}
        self._parts: dict[tuple[int, tuple[str, ...]], StoredRows] = {}
        # Cache of `_where`, until parts change.
        self._found: tuple[list[StoredRows], dict[tuple[str, ...], Array]] | None = None

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, name: str) -> Array:
        try:
            return self.numbers[name]
        except KeyError:
            raise KeyError(f"the samples have no number '{name}', only {', '.join(sorted(self.numbers))}") from None

    def update(self, numbers: Mapping[str, Array]) -> None:
        """Add per-sample numbers [n]."""
        for name, values in numbers.items():
            if len(values) != self.num_samples:
                raise ValueError(f"'{name}' has {len(values)} numbers for {self.num_samples} samples")
            self.numbers[name] = np.asarray(values)

    def put(self, ids: Array, numbers: Mapping[str, Array]) -> None:
        """Set numbers of the samples ``ids``; the others keep theirs, or 0."""
        for name, values in numbers.items():
            earlier_values = self.numbers.get(name, np.zeros(len(self), values.dtype))
            self.numbers[name] = earlier_values.astype(values.dtype, copy=not earlier_values.flags.writeable)
            self.numbers[name][ids] = values

    def attach(self, parts: Sequence[StoredRows]) -> None:
        """Add payload columns that exist in the object store."""
        self._found = None
        for part in parts:
            # The id is unique while the stored part keeps the reference alive.
            name = (id(part.ref), part.columns)
            if kept_part := self._parts.get(name):  # merge, so that an object is fetched once
                ids, rows = (np.concatenate(pair) for pair in ((kept_part.ids, part.ids), (kept_part.rows, part.rows)))
                part = replace(part, ids=ids, rows=rows)
            self._parts[name] = part

    def adopt(self, other: Samples, ids: Array, places: Array, numbers: Sequence[str] = ()) -> None:
        """Take payload and numbers of the samples ``ids`` of ``other``, as the samples ``places`` of this batch."""
        # -1 marks samples that are not taken; their rows are not requested.
        new_id = np.full(len(other), -1)
        new_id[ids] = places
        for part in other._parts.values():
            is_kept = new_id[part.ids] >= 0
            if is_kept.any():  # otherwise the object is unused
                self.attach([replace(part, ids=new_id[part.ids][is_kept], rows=part.rows[is_kept])])
        for name in numbers:
            self[name][places] = other[name][ids]

    def forget(self) -> None:
        """Drop the payload. The numbers stay."""
        self._parts.clear()
        self._found = None

    def _where(self) -> tuple[list[StoredRows], dict[tuple[str, ...], Array]]:
        """Return all parts, and an array [2, n] by set of columns: for every sample the number of its part (-1: none)
        and its row in that part.

        Cached, because every rank needs it in every pass: searching all parts for each would be quadratic in the ranks.
        """
        if self._found is None:
            places: dict[tuple[str, ...], Array] = {}
            for number, part in enumerate(self._parts.values()):
                if part.columns not in places:
                    places[part.columns] = np.full((2, len(self)), -1, dtype=np.int32)
                places[part.columns][:, part.ids] = [np.full(len(part.ids), number), part.rows]
            self._found = list(self._parts.values()), places
        return self._found

    def parts_with(self, column: str) -> list[StoredRows]:
        """Return the parts that have ``column``."""
        return [part for part in self._parts.values() if column in part.columns]

    def nodes(self, column: str) -> Array:
        """Return the node [n] that stores each sample's ``column``."""
        node_of_sample = np.zeros(self.num_samples, dtype=np.int64)
        for part in self.parts_with(column):
            node_of_sample[part.ids] = part.node
        return node_of_sample

    @classmethod
    def join(cls, pieces: Sequence[tuple[Samples, Array]]) -> Samples:
        """Join selected samples (by id, in order) of several `Samples`, with ids from 0.

        A number that some pieces lack is NaN for their samples, and a text is "". If a column has numbers, texts in it
        count as missing.
        """
        joined = cls(sum(len(ids) for _, ids in pieces))
        start = 0
        for samples, ids in pieces:
            joined.adopt(samples, ids, start + np.arange(len(ids)))
            start += len(ids)
        for name in dict.fromkeys(name for samples, _ in pieces for name in samples.numbers):
            columns_by_piece = [samples.numbers.get(name) for samples, _ in pieces]
            is_text = all(values is None or values.dtype == object for values in columns_by_piece)
            nothing = np.array([""], dtype=object) if is_text else np.array([np.nan])
            columns = [
                nothing.repeat(len(ids)) if values is None or (values.dtype == object) != is_text else values[ids]
                for values, (_, ids) in zip(columns_by_piece, pieces, strict=True)
            ]
            joined.update({name: np.concatenate(columns)})
        return joined

    def request(
        self, ids: Array, columns: Sequence[str], numbers: Sequence[str] = (), optional: Sequence[str] = ()
    ) -> Request:
        """Return a request of the given samples in this order. Raises KeyError if a column is missing for any of them.

        An ``optional`` column may be missing for some samples, which get empty rows. A prompt is sent with its images
        and the response's images, if the run has any.
        """
        optional = (*optional, c.IMAGES, c.RESPONSE_IMAGES) if c.PROMPT in columns else optional
        columns = [*columns, *optional]
        parts = []
        stored_parts, where = self._where()
        for stored_columns, (number_of, row_of) in where.items():
            wanted_columns = tuple(name for name in stored_columns if name in columns)
            if not wanted_columns or not len(ids):
                continue
            # Narrow dtypes, because the driver sends row numbers and positions with every request.
            places = np.argsort(number_of[ids], kind="stable").astype(np.int32)
            numbers_found, starts = np.unique(number_of[ids[places]], return_index=True)
            for number, its in zip(numbers_found.tolist(), np.split(places, starts[1:]), strict=True):
                if number >= 0:
                    parts.append(replace(stored_parts[number], columns=wanted_columns, ids=its, rows=row_of[ids[its]]))
        for name in columns:
            have = sum(len(part.rows) for part in parts if name in part.columns)
            if have != len(ids) and name not in optional:
                raise KeyError(f"column '{name}' exists for {have} of {len(ids)} samples only")
        groups = self[c.GROUP][ids].astype(np.int32) if c.GROUP in self.numbers else None
        return Request(len(ids), parts, {name: self[name][ids] for name in numbers}, groups)


FETCH_SECONDS: defaultdict[str, float] = defaultdict(float)
"""Seconds in which this process waited for requested rows, by `Call.name`, since the last `take_fetch_seconds`."""


def take_fetch_seconds() -> dict[str, float]:
    """Return ``timing_s/fetch/PASS`` of this process since the last call."""
    seconds = {f"timing_s/fetch/{PASS_OF_CALL[call]}": s for call, s in FETCH_SECONDS.items() if call in PASS_OF_CALL}
    FETCH_SECONDS.clear()
    return seconds


def assemble(request: Request, objects: Sequence[Batch | list[Any]]) -> Batch:
    """Assemble the requested batch from the fetched objects (one per part). A list is an object with a single column.

    A sample without a value in a ragged column gets an empty row.
    """
    batch = Batch()
    if not request.num_samples:
        return batch
    for name in dict.fromkeys(name for part in request.parts for name in part.columns):
        pairs = [
            (part, stored_object)
            for part, stored_object in zip(request.parts, objects, strict=True)
            if name in part.columns
        ]
        joined = Batch.concat(
            [_only(name, pick(replace(part, columns=(name,)), stored_object)) for part, stored_object in pairs]
        )
        places = np.concatenate([part.ids for part, _ in pairs])
        # Rows are joined by object; sorting by position restores the order of the request.
        column = joined.select(np.argsort(places, kind="stable"))[name]
        if isinstance(column, Ragged) and len(column) < request.num_samples:
            # A sample without a value gets length 0, so the values are unchanged.
            lengths = torch.zeros(request.num_samples, dtype=torch.long)
            lengths[torch.from_numpy(np.sort(places)).long()] = column.lengths
            column = Ragged(column.values, lengths)
        elif isinstance(column, DictionaryColumn) and request.groups is not None:
            column = column.by_group(request.groups)  # every replica that served a prompt has a copy of it
        batch.update({name: column})
    batch.update(
        {
            name: torch.from_numpy(np.require(values, requirements=["C", "W"]))
            for name, values in request.numbers.items()
        }
    )
    return batch


def pick(part: StoredRows, stored_object: Batch | list[Any]) -> Batch | list[Any]:
    """Return the rows of ``part`` from the object ``stored_object``. A list is an object with a single column."""
    if isinstance(stored_object, list):
        return [stored_object[row] for row in part.rows.tolist()]
    return Batch({name: stored_object[name] for name in part.columns}).select(part.rows)


def _only(name: str, stored: Batch | list[Any]) -> Batch:
    return Batch({name: stored}) if isinstance(stored, list) else stored


# Length of Ray's object id.
_REFERENCE_BYTES = 28


def driver_bytes(value: Any) -> int:
    """Return the bytes of ``value`` through the driver: arrays by size, 28 per reference, 8 per other leaf."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, StoredRows):
        return _REFERENCE_BYTES + value.rows.nbytes + value.ids.nbytes
    if is_dataclass(value):
        return driver_bytes(vars(value))
    if isinstance(value, Mapping):
        return sum(driver_bytes(item) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(driver_bytes(item) for item in value)
    return 8

"""Pictures of rows: where they stand, and reading those of one row when they are asked for.

Every process that needs a picture opens the parquet file itself, so that no picture passes through the driver or Ray's
object store. Parquet is read by row group. Some groups stay in memory, because a batch takes rows from all over a file.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rltrain.errors import DataError

# Of encoded pictures, in each process.
_CACHE_BYTES = 256 << 20


@dataclass(frozen=True)
class Pictures:
    """The pictures of rows. files: parquet files. column: that of pictures. file, number [rows]: where a row stands."""

    files: tuple[str, ...]
    column: str
    file: np.ndarray
    number: np.ndarray

    def of(self, row: int) -> list[Any]:
        """The pictures of a row, as `open_image` takes them; a path is relative to the folder of the row's file."""
        path = self.files[self.file[row]]
        try:
            found = _GROUPS.row(path, self.column, int(self.number[row]))
        except (OSError, IndexError, pa.ArrowException) as error:
            raise DataError(f"the pictures in {self.origin(row)} cannot be read any more: {error}") from error
        return [_beside(path, each) for each in found or ()]

    def origin(self, row: int) -> str:
        """Where a row stands, for messages."""
        return f"{self.files[self.file[row]]!r} row {self.number[row]}"


def _beside(path: str, image: Any) -> Any:
    """An entry of the column, its path (if it has no bytes) taken from the folder of the parquet file."""
    entry = image if isinstance(image, Mapping) else {"path": image} if isinstance(image, str) else {"bytes": image}
    if entry.get("bytes") or not entry.get("path"):
        return entry
    return {"path": Path(path).expanduser().parent / Path(entry["path"]).expanduser()}


class _Groups:
    """Row groups of a column, the latest ones kept."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str, int], pa.ChunkedArray] = OrderedDict()
        self._lock = Lock()

    def row(self, path: str, column: str, number: int) -> Any:
        """The value of a row."""
        with self._lock:
            file, ends = _opened(path)
            group = int(np.searchsorted(ends, number, side="right"))
            if group == len(ends):
                raise IndexError(f"it has {ends[-1] if len(ends) else 0} rows")
            values = self._kept.pop((path, column, group), None)
            if values is None:
                values = file.read_row_group(group, columns=[column]).column(column)
            self._kept[path, column, group] = values
            while len(self._kept) > 1 and sum(each.nbytes for each in self._kept.values()) > _CACHE_BYTES:
                self._kept.popitem(last=False)
        start = int(ends[group - 1]) if group else 0
        return values.slice(number - start, 1).to_pylist()[0]


@lru_cache(maxsize=16)
def _opened(path: str) -> tuple[pq.ParquetFile, np.ndarray]:
    file = pq.ParquetFile(Path(path).expanduser(), page_checksum_verification=True)
    sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    return file, np.cumsum(sizes)


_GROUPS = _Groups()

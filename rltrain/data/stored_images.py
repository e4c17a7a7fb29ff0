"""Images of rows: their location, the check of all images before a run, and on-demand loading.

Every process that needs an image opens the parquet file itself, so that no image passes through the driver or Ray's
object store. Parquet is read by row group. Some groups are cached, because a batch has rows from everywhere in a file.
The check before a run streams the files, reads image headers and detects damage. It decodes pixels only if necessary.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import socket
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rltrain.common.errors import DataError, host_error
from rltrain.common.images import file_bytes, image_entry
from rltrain.data.images import LEAST_PIXELS, MOST_ROW_PIXELS, image_size

log = logging.getLogger(__name__)

# Maximum bytes of the encoded images that each process caches.
CACHE_BYTES = 128 << 20
# Limit of a row group, because Arrow cannot store more in one array of a nested column.
MAX_GROUP_BYTES = (2 << 30) - 1
# Number of rows that the check reads at once, and its maximum number of threads. Threads help, because decoders and
# disk reads release the GIL.
CHUNK_ROWS, _MOST_THREADS = 64, 16


@dataclass(frozen=True)
class ImageColumn:
    """Image column of a parquet file."""

    path: str
    column: str

    @property
    def absolute(self) -> ImageColumn:
        """The same file with an absolute path, for processes with another working directory."""
        return replace(self, path=str(Path(self.path).expanduser().absolute()))

    def value(self, number: int) -> Any:
        """Return the field of row ``number``."""
        return _GROUPS.value(self, number)

    def check_groups(self) -> None:
        """Raise DataError for row groups that are too large to be read, and warn about groups that exceed the cache,
        because Arrow decodes only whole groups.
        """
        metadata = _opened(self.path)[0].metadata
        largest = max((self._group_bytes(metadata.row_group(i)) for i in range(metadata.num_row_groups)), default=0)
        if largest <= CACHE_BYTES:
            return
        problem = (
            f"{self.path!r} holds {largest / 2**20:,.0f} MiB of column {self.column!r} in one row group, %s. Write it "
            "again with small ones: row_group_size=32 in pyarrow (docs/data.md has the lines)."
        )
        if largest > MAX_GROUP_BYTES:
            raise DataError(problem % "more than can be read")
        log.warning(problem, "and every process that reads images keeps one and takes three times as much to read it")

    def _group_bytes(self, group: Any) -> int:
        leaves = map(group.column, range(group.num_columns))
        of_column = (leaf for leaf in leaves if f"{leaf.path_in_schema}.".startswith(f"{self.column}."))
        return sum(leaf.total_uncompressed_size for leaf in of_column)

    def stream(self, numbers: np.ndarray) -> Iterator[Any]:
        """Yield the fields of rows, by ascending row numbers. Memory does not grow with the file."""
        file, ends = _opened(self.path)
        groups = np.searchsorted(ends, numbers, side="right")
        for group in np.unique(groups).tolist():
            start = int(ends[group - 1]) if group else 0
            places = numbers[groups == group] - start
            for batch in file.iter_batches(CHUNK_ROWS, row_groups=[group], columns=[self.column]):
                in_batch = places[(places >= 0) & (places < batch.num_rows)]
                yield from batch.column(0).take(pa.array(in_batch)).to_pylist()
                places = places - batch.num_rows


@dataclass(frozen=True)
class ImageTable:
    """Images from a program: pickled fields, and the ascending numbers of their rows."""

    path: str
    values: pa.ChunkedArray
    numbers: np.ndarray

    @property
    def absolute(self) -> ImageTable:
        """The table itself, which has no file (see `ImageColumn`)."""
        return self

    def check_groups(self) -> None:
        """Do nothing: there are no row groups (see `ImageColumn`)."""

    def value(self, number: int) -> Any:
        """Return the field of row ``number``."""
        return pickle.loads(self.values[int(np.searchsorted(self.numbers, number))].as_py())

    def stream(self, numbers: np.ndarray) -> Iterator[Any]:
        """Yield the fields of rows."""
        return map(self.value, numbers.tolist())


@dataclass(frozen=True)
class StoredImages:
    """Image locations of rows."""

    sources: tuple[ImageColumn | ImageTable, ...]
    source: np.ndarray
    """[rows]: index into ``sources``."""
    number: np.ndarray
    """[rows]: row number in the source."""
    digests: np.ndarray
    """[rows]: digest of the images at the check before the run."""

    def of(self, row: int) -> list[bytes]:
        """Return the image files of a row. Raises DataError if they have changed since the check before the run."""
        source = self.sources[self.source[row]]
        try:
            images = image_entries(source.value(int(self.number[row])), source.path)
        except (OSError, IndexError, pa.ArrowException) as error:
            raise host_error(error) or DataError(f"its images cannot be read any more: {error}") from error
        files = []
        for number, entry in enumerate(images, 1):
            try:
                files.append(file_bytes(entry))
            except DataError as error:
                raise DataError(f"image {number} of {len(images)}: {error}") from error
        # Without the digest, a changed image with the same number of tokens would go unnoticed.
        if joint_digest([_digest(file) for file in files]) != self.digests[row]:
            raise DataError("the images have changed since the run was started.")
        return files

    def read_order(self, rows: np.ndarray) -> np.ndarray:
        """Return the order in which the images of ``rows`` are read fastest, [rows]."""
        return np.lexsort((self.number[rows], self.source[rows]))

    def check_files_exist(self) -> None:
        """Raise DataError for a file that is missing on this node."""
        for source in self.sources:
            if isinstance(source, ImageColumn) and not Path(source.path).exists():
                raise DataError(
                    f"data file {source.path!r} is not on node {socket.gethostname()}. Every node reads the images "
                    "of its prompts: put the file into a folder that all nodes share, or under this path on each."
                )

    def origin(self, row: int) -> str:
        """Return the location of a row, for messages."""
        return f"{self.sources[self.source[row]].path!r} row {self.number[row]}"


def image_entries(value: Any, path: str) -> list[Any]:
    """Return the images of a field that contains one image or a list.

    A path without bytes is relative to the folder of the parquet file at ``path``.
    """
    folder = Path(path).expanduser().parent
    return [
        image_entry(image, folder) for image in (value if isinstance(value, list) else [] if value is None else [value])
    ]


# -- check before a run ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageCheck:
    """Result of the check of a row's images."""

    content: list[str] | None = None
    """Digest per file, or None."""
    sizes: tuple[tuple[int, int], ...] = ()
    """Width and height of each image."""
    problem: str | None = None
    """Problem of one image, or None."""


def check_images(source: ImageColumn | ImageTable, numbers: np.ndarray, column: str) -> Iterator[ImageCheck]:
    """Check the images of each row, by ascending row numbers."""
    source.check_groups()
    values = source.stream(numbers)
    with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as threads:
        while chunk := list(islice(values, CHUNK_ROWS)):
            yield from threads.map(lambda value: _check(value, source.path, column), chunk)


def _check(value: Any, path: str, column: str) -> ImageCheck:
    content: list[str] = []
    sizes: list[tuple[int, int]] = []
    for number, entry in enumerate(image_entries(value, path)):
        try:
            file = file_bytes(entry)
            sizes.append(image_size({**entry, "bytes": file}))
            if (area := sum(max(width * height, LEAST_PIXELS) for width, height in sizes)) > MOST_ROW_PIXELS:
                raise DataError(f"the images up to here have {area:,} pixels; a row has at most {MOST_ROW_PIXELS:,}.")
        except DataError as error:
            return ImageCheck(content, problem=f"field '{column}[{number}]': {error}")
        content.append(_digest(file))
    return ImageCheck(None if value is None else content, tuple(sizes))


def _digest(file: bytes) -> str:
    return hashlib.sha256(file).hexdigest()


def joint_digest(content: Sequence[str] | None) -> int:
    """Return a 64-bit digest of a row's images from their digests."""
    return int.from_bytes(hashlib.blake2b("".join(content or ()).encode(), digest_size=8).digest(), "big")


# -- row groups --------------------------------------------------------------------------------------------------------


class _Groups:
    """LRU cache of row groups of columns."""

    def __init__(self) -> None:
        self._cached: OrderedDict[tuple[pq.ParquetFile, str, int], pa.ChunkedArray] = OrderedDict()
        self._lock = Lock()

    def value(self, of: ImageColumn, number: int) -> Any:
        """Return the field of a row."""
        with self._lock:
            file, ends = _opened(of.path)
            group = int(np.searchsorted(ends, number, side="right"))
            if group == len(ends):
                raise IndexError(f"it has no row {number}")
            values = self._cached.pop((file, of.column, group), None)
            if values is None:
                values = file.read_row_group(group, columns=[of.column]).column(of.column)
            self._cached[file, of.column, group] = values
            while len(self._cached) > 1 and sum(cached.nbytes for cached in self._cached.values()) > CACHE_BYTES:
                self._cached.popitem(last=False)
        return values[number - (int(ends[group - 1]) if group else 0)].as_py()


def _opened(path: str) -> tuple[pq.ParquetFile, np.ndarray]:
    """Return a Parquet file and the cumulative row counts of its row groups."""
    stat = Path(path).expanduser().stat()
    return _opened_version(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=16)
def _opened_version(path: str, changed_ns: int, num_bytes: int) -> tuple[pq.ParquetFile, np.ndarray]:
    file = pq.ParquetFile(Path(path).expanduser(), page_checksum_verification=True)
    return file, np.cumsum([file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)])


_GROUPS = _Groups()

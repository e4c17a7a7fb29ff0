"""Images and videos of rows: their location, the check of all images before a run, and on-demand loading.

Every process that needs an image opens the parquet file itself, so that no image passes through the driver or Ray's
object store. Parquet is read by row group. Some groups are cached, because a batch has rows from everywhere in a file.
The check before a run streams the files, reads image headers and detects damage. It decodes the pixels of images only
if necessary, and all frames of videos.
"""

from __future__ import annotations

import hashlib
import json
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
from rltrain.data.checks import VIDEOS
from rltrain.data.images import LEAST_PIXELS, MOST_ROW_PIXELS, image_size
from rltrain.data.media.videos import StoredVideo, VideoSize

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
    """Columns of images and of videos of a parquet file, each None if it does not exist."""

    path: str
    column: str | None
    videos: str | None = None

    @property
    def absolute(self) -> ImageColumn:
        """The same file with an absolute path, for processes with another working directory."""
        return replace(self, path=str(Path(self.path).expanduser().absolute()))

    @property
    def _columns(self) -> tuple[str | None, str | None]:
        return self.column, self.videos

    def value(self, number: int) -> tuple[Any, Any]:
        """Return the images and the videos of row ``number``."""
        images, videos = (_GROUPS.value(self.path, name, number) if name else None for name in self._columns)
        return images, videos

    def check_groups(self) -> None:
        """Raise DataError for row groups that are too large to be read, and warn about groups that exceed the cache,
        because Arrow decodes only whole groups.
        """
        metadata = _opened(self.path)[0].metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        for column in filter(None, self._columns):
            largest = max((_group_bytes(group, column) for group in groups), default=0)
            if largest <= CACHE_BYTES:
                continue
            problem = (
                f"{self.path!r} holds {largest / 2**20:,.0f} MiB of column {column!r} in one row group, %s. Write it "
                "again with small ones: row_group_size=32 in pyarrow (docs/data.md has the lines)."
            )
            if largest > MAX_GROUP_BYTES:
                raise DataError(problem % "more than can be read")
            log.warning(
                problem, "and every process that reads images keeps one and takes three times as much to read it"
            )

    def stream(self, numbers: np.ndarray) -> Iterator[tuple[Any, Any]]:
        """Yield the fields of rows, by ascending row numbers. Memory does not grow with the file."""
        columns = list(filter(None, self._columns))
        file, ends = _opened(self.path)
        groups = np.searchsorted(ends, numbers, side="right")
        for group in np.unique(groups).tolist():
            start = int(ends[group - 1]) if group else 0
            places = numbers[groups == group] - start
            for batch in file.iter_batches(CHUNK_ROWS, row_groups=[group], columns=columns):
                in_batch = pa.array(places[(places >= 0) & (places < batch.num_rows)])
                images, videos = (
                    batch.column(name).take(in_batch).to_pylist() if name else [None] * len(in_batch)
                    for name in self._columns
                )
                yield from zip(images, videos, strict=True)
                places = places - batch.num_rows


def _group_bytes(group: Any, column: str) -> int:
    leaves = map(group.column, range(group.num_columns))
    of_column = (leaf for leaf in leaves if f"{leaf.path_in_schema}.".startswith(f"{column}."))
    return sum(leaf.total_uncompressed_size for leaf in of_column)


@dataclass(frozen=True)
class ImageTable:
    """Images and videos from a program: pickled fields, and the ascending numbers of their rows."""

    path: str
    values: pa.ChunkedArray
    videos: pa.ChunkedArray
    numbers: np.ndarray

    @property
    def absolute(self) -> ImageTable:
        """The table itself, which has no file (see `ImageColumn`)."""
        return self

    def check_groups(self) -> None:
        """Do nothing: there are no row groups (see `ImageColumn`)."""

    def value(self, number: int) -> tuple[Any, Any]:
        """Return the images and the videos of row ``number``."""
        place = int(np.searchsorted(self.numbers, number))
        return pickle.loads(self.values[place].as_py()), pickle.loads(self.videos[place].as_py())

    def stream(self, numbers: np.ndarray) -> Iterator[tuple[Any, Any]]:
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
    first: np.ndarray
    """[rows]: number of the row's first image or video in ``sizes``."""
    sizes: np.ndarray
    """[images and videos, 2 or 9]: see `size_table`."""

    def of(self, row: int) -> list[bytes | StoredVideo]:
        """Return the image files and then the videos of a row. Raises DataError if they have changed since the check
        before the run.
        """
        source = self.sources[self.source[row]]
        try:
            fields = source.value(int(self.number[row]))
        except (OSError, IndexError, pa.ArrowException) as error:
            raise host_error(error) or DataError(f"its images cannot be read any more: {error}") from error
        media = []
        for kind, number, count, entry in _entries(fields):
            try:
                media.append(_read_medium(kind, entry, source.path))
            except DataError as error:
                raise DataError(f"{kind} {number + 1} of {count}: {error}") from error
        # Without the digest, a changed image with the same number of tokens would go unnoticed.
        if joint_digest([digest for medium in media for digest in _digests(medium)]) != self.digests[row]:
            raise DataError("the images have changed since the run was started.")
        sizes = sizes_of(self.sizes[self.first[row] :][: len(media)])
        return [
            replace(medium, size=size) if isinstance(medium, StoredVideo) else medium
            for medium, size in zip(media, sizes, strict=True)
        ]

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
    return [image_entry(image, folder) for image in _listed(value)]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def size_table(sizes: Sequence[tuple[float, ...]]) -> np.ndarray:
    """Return sizes of images, and of videos with zeros after the sizes of images, [n, 2 or 9]."""
    if not any(isinstance(size, VideoSize) for size in sizes):
        return np.array(sizes, dtype=np.int32).reshape(-1, 2)
    number = len(VideoSize._fields)
    return np.array([(*size, *[0.0] * (number - len(size))) for size in sizes])


def sizes_of(table: np.ndarray) -> list[Any]:
    """Return the sizes of rows of a `size_table`: width and height of an image, or a `VideoSize`."""
    return [VideoSize(*size) if any(size[2:]) else (int(size[0]), int(size[1])) for size in table.tolist()]


# -- check before a run ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageCheck:
    """Result of the check of a row's images and videos."""

    content: list[str] | None = None
    """Digest per image file, or None."""
    videos: list[str] | None = None
    """Digest per file of a video, and options of videos, or None."""
    sizes: tuple[tuple[float, ...], ...] = ()
    """Width and height of each image, then a `VideoSize` of each video."""
    problem: str | None = None
    """Problem of one image or video, or None."""

    @property
    def digest(self) -> int:
        """Digest of all images and videos."""
        return joint_digest([*(self.content or ()), *(self.videos or ())])


def check_images(source: ImageColumn | ImageTable, numbers: np.ndarray, column: str) -> Iterator[ImageCheck]:
    """Check the images and videos of each row, by ascending row numbers."""
    source.check_groups()
    values = source.stream(numbers)
    with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as threads:
        while chunk := list(islice(values, CHUNK_ROWS)):
            yield from threads.map(lambda fields: _check(fields, source.path, column), chunk)


def _check(fields: tuple[Any, Any], path: str, column: str) -> ImageCheck:
    content: dict[str, list[str]] = {"image": [], "video": []}
    sizes: list[tuple[float, ...]] = []
    for kind, number, _, entry in _entries(fields):
        try:
            medium = _read_medium(kind, entry, path)
            sizes.append(medium.measure() if isinstance(medium, StoredVideo) else image_size(medium))
            area = sum(max(width * height, LEAST_PIXELS) for width, height, *of_video in sizes if not of_video)
            if area > MOST_ROW_PIXELS:
                raise DataError(f"the images up to here have {area:,} pixels; a row has at most {MOST_ROW_PIXELS:,}.")
        except DataError as error:
            name = column if kind == "image" else VIDEOS
            return ImageCheck(content["image"], problem=f"field '{name}[{number}]': {error}")
        content[kind] += _digests(medium)
    images, videos = (None if field is None else found for field, found in zip(fields, content.values(), strict=True))
    return ImageCheck(images, videos, tuple(sizes))


def _entries(fields: tuple[Any, Any]) -> Iterator[tuple[str, int, int, Any]]:
    """Yield kind, number from 0, number of its kind, and entry of a row's images and then videos."""
    for kind, entries in zip(("image", "video"), map(_listed, fields), strict=True):
        yield from ((kind, number, len(entries), entry) for number, entry in enumerate(entries))


def _read_medium(kind: str, entry: Any, path: str) -> bytes | StoredVideo:
    folder = Path(path).expanduser().parent
    return file_bytes(image_entry(entry, folder)) if kind == "image" else StoredVideo.read(entry, folder)


def _digests(medium: bytes | StoredVideo) -> list[str]:
    if isinstance(medium, StoredVideo):
        options = [json.dumps(medium.options, sort_keys=True)] if medium.options else []
        return [_digest(file) for file in medium.files] + options
    return [_digest(medium)]


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

    def value(self, path: str, column: str, number: int) -> Any:
        """Return the field of a row."""
        with self._lock:
            file, ends = _opened(path)
            group = int(np.searchsorted(ends, number, side="right"))
            if group == len(ends):
                raise IndexError(f"it has no row {number}")
            values = self._cached.pop((file, column, group), None)
            if values is None:
                values = file.read_row_group(group, columns=[column]).column(column)
            self._cached[file, column, group] = values
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

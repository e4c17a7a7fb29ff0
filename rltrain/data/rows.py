"""Rows in verl's schema: checks, and errors that name the file, the row and the field.

Files come from many programs, and a wrong field could otherwise surface hours later, as a crash in a scorer or a prompt
"None". Therefore every row is checked before anything starts. A ``Rows`` stores the Arrow tables and builds a
``PromptRow`` on demand: a process that gets it from Ray's object store shares the memory. The `datasets` library is not
used, because only its parquet reader would be needed, which is Arrow's. Neither is pandas, because chat templates do
not accept its arrays.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rltrain.common.errors import DataError
from rltrain.config.schema import DataConfig
from rltrain.data.checks import VIDEOS, Keys, row_problem
from rltrain.data.files import files_of
from rltrain.data.stored_images import (
    ImageCheck,
    ImageColumn,
    StoredImages,
    check_images,
    image_entries,
    size_table,
    sizes_of,
)
from rltrain.data.tables import PickledTable, Table, limit_rows, open_table, unreadable

# Field with tool arguments, whose null keys are dropped, because they are not arguments.
_OF_TOOLS = "tools_kwargs"
_NUM_SHOWN = 5
# The columns of verl's files.
KEYS = Keys()
_MOST_PATHS = 3
# The check converts rows to Python objects, which take many times the memory of the table. So rows are read in chunks.
_READ_CHUNK_ROWS = 1024
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class PromptRow:
    """One row of a file in verl's schema. ``prompt`` is a list of ``{"role": ..., "content": ...}`` messages."""

    data_source: str
    prompt: list[dict[str, Any]]
    ability: str | None
    reward_style: str
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)
    agent_name: str | None = None
    """Agent of the conversation (`row_tools`). None: the run's default."""


@dataclass(frozen=True)
class _Checks:
    """Results of the check of each row."""

    digests: np.ndarray
    """[rows, 16]: digests of the content; image_ends, image_digests [rows], sizes: see `size_table`."""
    image_ends: np.ndarray
    sizes: np.ndarray
    image_digests: np.ndarray


class Rows:
    """Rows of one or more files, in file order: an immutable, picklable sequence of ``PromptRow``."""

    def __init__(self, files: Sequence[Table], keys: Keys, index: np.ndarray, checks: _Checks):
        self._files = tuple(files)
        self._keys = keys
        self._index = index
        self._checks = checks
        ends = np.cumsum([file.table.num_rows for file in self._files]).tolist()
        self._starts = [0, *ends[:-1]]

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, position: int) -> PromptRow:
        file, row = self._locate(position)
        return _build(file.records(file.table.column_names, row)[0], self._keys)

    def __iter__(self) -> Iterator[PromptRow]:
        for position in range(len(self)):
            yield self[position]

    def __repr__(self) -> str:
        return f"<Rows: {len(self)} of {self.paths}>"

    @property
    def paths(self) -> str:
        """File names of the rows, for messages."""
        num_more = len(self._files) - _MOST_PATHS
        names = ", ".join(file.path for file in self._files[: _MOST_PATHS + (num_more == 1)])
        return f"{names}, … ({num_more} more)" if num_more > 1 else names

    def origin(self, position: int) -> str:
        """Return the location of a row, for messages: ``'train.parquet' row 17`` (rows are counted from 0)."""
        file, row = self._locate(position)
        return f"{file.path!r} row {file.numbers[row]}"

    @property
    def num_images(self) -> np.ndarray:
        """Images and videos per row, int64."""
        return np.diff(self._checks.image_ends, prepend=0)[self._index]

    @property
    def num_media(self) -> np.ndarray:
        """Images and videos per row, [rows, 2], int64."""
        sizes = self._checks.sizes
        ends = np.cumsum(np.concatenate([[0], (sizes[:, 2] > 0) if sizes.shape[1] > 2 else np.zeros(len(sizes))]))
        num_videos = np.diff(ends[self._checks.image_ends], prepend=0).astype(np.int64)[self._index]
        return np.stack([self.num_images - num_videos, num_videos], axis=1)

    def image_sizes(self, position: int) -> list[Any]:
        """Return width and height of a row's images, upright, (0, 0) if Pillow is not installed; then the `VideoSize`
        of its videos.
        """
        row = int(self._index[position])
        start = self._checks.image_ends[row - 1] if row else 0
        return sizes_of(self._checks.sizes[start : self._checks.image_ends[row]])

    def images(self, position: int) -> list[Any]:
        """Read and return the images of a row as stored in the file."""
        file, row = self._locate(position)
        return image_entries(file.images.value(int(file.numbers[row]))[0], file.path) if file.images else []

    def stored_images(self) -> StoredImages:
        """Return the locations of the images and videos of these rows."""
        sources = tuple((file.images or ImageColumn(file.path, self._keys.image)).absolute for file in self._files)
        numbers = np.concatenate([file.numbers for file in self._files])[self._index]
        checks, first = self._checks, np.concatenate([[0], self._checks.image_ends])[self._index]
        digests = checks.image_digests[self._index]
        return StoredImages(sources, self._file_numbers().astype(np.int32), numbers, digests, first, checks.sizes)

    def without_images(self) -> "Rows":
        """Return these rows for text-only readers, without in-memory images, which would be pickled."""
        return Rows([replace(file, images=None) for file in self._files], self._keys, self._index, self._checks)

    def select(self, indices: Sequence[int] | np.ndarray) -> "Rows":
        """Return the rows at ``indices``, in that order, as new ``Rows``. No data is copied."""
        return Rows(self._files, self._keys, self._index[np.asarray(indices, dtype=np.int64)], self._checks)

    def data_sources(self) -> dict[str, int]:
        """Return the position of the first row per data source."""
        first: dict[str, int] = {}
        for position, name in enumerate(self.sources()):
            first.setdefault(name, position)
        return first

    def sources(self) -> list[str]:
        """Return the data source of every row."""
        source = self._keys.source
        names = [record[source] for file in self._files for record in file.records([source], 0, file.table.num_rows)]
        return [names[row] for row in self._index.tolist()]

    def files(self) -> list[str]:
        """Return the file of every row."""
        return [self._files[number].path for number in self._file_numbers().tolist()]

    def _file_numbers(self) -> np.ndarray:
        return np.searchsorted(self._starts, self._index, side="right") - 1

    def fingerprint(self) -> str:
        """Return a digest of the rows' content and order. Files and other columns do not matter."""
        digest = hashlib.sha256(f"{self._keys}\n".encode())
        # There is one digest per row, so that order and selection can change without rereading the files.
        digest.update(np.ascontiguousarray(self._checks.digests[self._index]).tobytes())
        return f"rows:{digest.hexdigest()}"

    def identity(self) -> str:
        """Return the `fingerprint`, followed by a space and a description (number of rows and files)."""
        return f"{self.fingerprint()} {len(self)} rows of {self.paths}"

    def _locate(self, position: int) -> tuple[Table, int]:
        if not -len(self) <= position < len(self):
            raise IndexError(f"row {position} of {len(self)}")
        row = int(self._index[position])
        number = bisect_right(self._starts, row) - 1
        return self._files[number], row - self._starts[number]


def read_rows(files: str | Sequence[str], *, keys: Keys = KEYS, max_rows: int = -1, seed: int | None = None) -> Rows:
    """Read and check files in verl's schema (parquet, json, jsonl; patterns and folders). Every row is checked.

    ``max_rows`` limits the rows over all files (0 or less: all), drawn by ``seed`` (None: the first). Raises DataError
    with file, row, field, problem and fix, for up to five problems at once.
    """
    return _check_usable(*scan_rows(files, keys=keys, max_rows=max_rows, seed=seed))


def rows_of(records: Iterable[dict[str, Any]], name: str, numbers: np.ndarray, *, keys: Keys = KEYS) -> Rows:
    """Return rows of plain values from a program, checked like file rows.

    ``name`` and ``numbers`` [n], ascending, are for messages. Raises DataError like `read_rows`.
    """
    return _check_usable(*_check_tables([PickledTable.of(records, name, keys, numbers)], keys))


def keys_of(data: DataConfig) -> Keys:
    """Return the column names of the configuration."""
    return Keys(data.prompt_key, data.reward_fn_key, data.image_key)


def _check_usable(rows: Rows, problems: Sequence[str]) -> Rows:
    if problems:
        raise DataError(bad_rows(problems))
    if not len(rows):
        raise DataError(f"no usable row in {rows.paths}.")
    return rows


def scan_rows(
    files: str | Sequence[str], *, keys: Keys = KEYS, max_rows: int = -1, seed: int | None = None
) -> tuple[Rows, list[str]]:
    """Return the valid rows, possibly none, and one problem per invalid row.

    Raises DataError for a file that cannot be read or misses a column.
    """
    paths = [files] if isinstance(files, (str, Path)) else list(files)
    if not paths:
        raise DataError("no data file was given. Try data.train_files=train.parquet data.val_files=test.parquet.")
    tables = [open_table(file, keys) for path in paths for file in files_of(str(path))]
    return _check_tables(limit_rows(tables, max_rows, seed), keys)


def _check_tables(files: Sequence[Table], keys: Keys) -> tuple[Rows, list[str]]:
    numbers, problems, start = [], [], 0
    digests = bytearray()
    image_checks: list[ImageCheck] = []
    for file in files:
        bad = _check_table(file, keys, digests, image_checks)
        problems += list(bad.values())
        numbers += [start + row for row in range(file.table.num_rows) if row not in bad]
        start += file.table.num_rows
    checks = _Checks(
        np.frombuffer(digests, dtype=np.uint8).reshape(-1, _DIGEST_BYTES),
        np.cumsum([len(check.sizes) for check in image_checks], dtype=np.int64),
        size_table([size for check in image_checks for size in check.sizes]),
        np.array([check.digest for check in image_checks], dtype=np.uint64),
    )
    return Rows(files, keys, np.asarray(numbers, dtype=np.int64), checks), problems


def _check_images(file: Table, keys: Keys) -> Iterator[ImageCheck]:
    """Check the images of every row of a file."""
    try:
        yield from check_images(file.images, file.numbers, keys.image) if file.images else repeat(ImageCheck())
    except (OSError, pa.ArrowException) as error:
        raise unreadable(file.path, error) from error


def _check_table(file: Table, keys: Keys, digests: bytearray, image_checks: list[ImageCheck]) -> dict[int, str]:
    """Return the problem per bad row, by row number. Appends a digest and image check per row."""
    bad: dict[int, str] = {}
    checks = _check_images(file, keys)
    for start in range(0, file.table.num_rows, _READ_CHUNK_ROWS):
        try:
            records = file.records(file.table.column_names, start, _READ_CHUNK_ROWS)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file.path!r} rows {start} and after contain text that is not UTF-8 ({error})."
            ) from error
        for row, record in enumerate(records, start):
            check = next(checks)
            image_checks.append(check)
            # A row is hashed as JSON with sorted keys, because the order of a struct's fields depends on the program
            # that wrote it.
            normalised = _normalised(record | {keys.image: check.content, VIDEOS: check.videos})
            content = json.dumps(normalised, sort_keys=True, default=_digest_of_bytes)
            digests += hashlib.blake2b(content.encode(), digest_size=_DIGEST_BYTES).digest()
            problem = row_problem(record, keys) or check.problem
            if problem:
                bad[row] = f"{file.path!r} row {file.numbers[row]}: {problem}"
    return bad


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of a prompt without the nulls that Parquet adds.

    In Parquet, all structs of a column have the same keys, at any depth, with null for missing ones, but templates test
    whether a key exists. The content of a message with tool calls may be null.
    """
    fields = without_nulls(message)
    return {"content": "", **fields} if fields.get("tool_calls") else fields


def without_nulls(value: Any) -> Any:
    """Return a value without null keys, at any depth. Null items of a list are kept."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _normalised(value: Any) -> Any:
    """Return a normalized value, independent of the program that stored it: without nulls, whole floats as integers."""
    if isinstance(value, dict):
        return {str(key): _normalised(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_normalised(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _digest_of_bytes(value: Any) -> str:
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else str(value)


def _build(record: dict[str, Any], keys: Keys) -> PromptRow:
    reward = record["reward_model"]
    prompt = [_message(message) for message in record[keys.prompt]]
    extra = record.get("extra_info") or {}
    return PromptRow(
        data_source=record[keys.source],
        prompt=prompt,
        ability=record.get("ability"),
        reward_style=reward.get("style") or "rule",
        ground_truth=reward.get("ground_truth"),
        extra_info={name: without_nulls(value) if name == _OF_TOOLS else value for name, value in extra.items()},
        agent_name=record.get("agent_name") or None,
    )


def bad_rows(problems: Sequence[str]) -> str:
    """Return a message about bad rows, one line each."""
    return first_lines("1 bad row:" if len(problems) == 1 else f"{len(problems)} bad rows:", problems)


def first_lines(title: str, lines: Sequence[str]) -> str:
    """Return a title followed by the first of these lines."""
    remainder = [f"… and {len(lines) - _NUM_SHOWN} more"] if len(lines) > _NUM_SHOWN else []
    return "\n  ".join([title, *lines[:_NUM_SHOWN], *remainder])

"""Rows of files as Arrow tables: parquet as stored, JSON with pickled fields; and random subsets of rows."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rltrain.common.errors import DataError, RltrainError, first_line, host_error
from rltrain.common.seeds import stream
from rltrain.common.storage import patiently
from rltrain.data.checks import VIDEOS, Keys, check_columns, check_schema
from rltrain.data.files import MAX_EXPANSION, MAX_FILE_BYTES, files_of, kind_of, records
from rltrain.data.stored_images import ImageColumn, ImageTable

log = logging.getLogger(__name__)
_MAX_TEXT_BYTES = 64 << 20


@dataclass(frozen=True)
class Table:
    """Used rows of a file (without images and videos), and their row numbers."""

    path: str
    table: pa.Table
    numbers: np.ndarray
    images: ImageColumn | ImageTable | None = None
    """Location of the images and videos."""

    def records(self, names: Sequence[str], start: int, number: int = 1) -> list[dict[str, Any]]:
        """Return columns ``names`` of ``number`` rows from ``start`` on."""
        return self.table.select(names).slice(start, number).to_pylist()


class PickledTable(Table):
    """Rows from a source other than a table. Each field is pickled, because Arrow requires one type per column."""

    @classmethod
    def of(
        cls, rows: Iterable[dict[str, Any]], path: str, keys: Keys, numbers: np.ndarray | None = None, place: str = ""
    ) -> PickledTable:
        """Store the columns of ``keys`` from rows of plain values.

        numbers [rows]: ascending; None: 0, 1, …. path: for messages. place: the file to whose folder relative image
        paths refer ("": ``path``). Images in the rows stay in memory.
        """
        columns: dict[str, list[bytes]] = {
            column: [] for column in (*keys.required(), *keys.optional(), VIDEOS, keys.image)
        }
        has_images = False
        for row in rows:
            for column, values in columns.items():
                values.append(pickle.dumps(row.get(column)))
            has_images = has_images or bool(row.get(keys.image) or row.get(VIDEOS))
        table = pa.table({column: pa.array(cells, pa.large_binary()) for column, cells in columns.items()})
        numbers = np.arange(table.num_rows) if numbers is None else numbers
        media = (table.column(keys.image), table.column(VIDEOS))
        images = ImageTable(place or path, *media, numbers) if has_images else None
        return cls(path, table.drop_columns([keys.image, VIDEOS]), numbers, images)

    def records(self, names: Sequence[str], start: int, number: int = 1) -> list[dict[str, Any]]:
        """Return columns ``names`` of rows (see `Table`)."""
        packed = super().records(names, start, number)
        return [{name: pickle.loads(value) for name, value in record.items()} for record in packed]


def open_table(path: str, keys: Keys) -> Table:
    """Open all rows of a file. Raises DataError if it is unreadable or lacks a column, and StorageError."""
    return _read_patiently(path, partial(_read, path, _local(path), keys))


def plain_records(path: str) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield file, row number and all columns of each row of the files that ``path`` names.

    Raises like `open_table`, except that no column is required.
    """

    def read(name: str, file: Path) -> list[dict[str, Any]]:
        if (kind := kind_of(name, file)) != "parquet":
            return list(records(name, file, kind))
        with pq.ParquetFile(file, page_checksum_verification=True) as source:
            _check_sizes(name, file, set(source.schema_arrow.names))
            return source.read().to_pylist()

    for name in files_of(path):
        for number, record in enumerate(_read_patiently(name, partial(read, name, _local(name)))):
            if not isinstance(record, dict):
                raise DataError(f"{name!r} row {number} is a {type(record).__name__}; each must be an object.")
            yield name, number, record


def num_rows(path: str) -> int:
    """Return the number of rows of a file. Raises like `open_table`. For a parquet file only the footer is read."""

    def count(file: Path) -> int:
        if (kind := kind_of(path, file)) != "parquet":
            return sum(1 for _ in records(path, file, kind))
        return pq.ParquetFile(file).metadata.num_rows

    return _read_patiently(path, partial(count, _local(path)))


def _local(path: str) -> Path:
    if "://" in path:
        raise DataError(f"{path!r} is a remote address; copy the file to a local disk and give its path.")
    return Path(path).expanduser()


def _read_patiently(path: str, read: Any) -> Any:
    local = _local(path)
    try:
        return patiently(local, read)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"data file {path!r} does not exist (looked at {local.absolute()}).") from None
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise unreadable(path, error) from error


def _read(path: str, file: Path, keys: Keys) -> Table:
    kind = kind_of(path, file)
    if kind == "csv":
        raise DataError(
            f"data file {path!r} is a csv table, whose cells cannot hold messages. Convert it: "
            f"python -m rltrain.data_preprocess.jsonl --input {path} --output FOLDER (see its --help)."
        )
    # The path is absolute, because other processes that read the images may have another working directory.
    place = str(file.absolute())
    if kind == "json":
        replaced: list[int] = []
        json_records = list(records(path, file, kind, replaced.append))
        if misfit := next(
            (
                f"row {row} is a {type(record).__name__}"
                for row, record in enumerate(json_records)
                if not isinstance(record, dict)
            ),
            "",
        ):
            raise DataError(f'{path!r} {misfit}; each must be an object such as {{"prompt": [...], ...}}.')
        check_columns(path, list(dict.fromkeys(name for record in json_records for name in record)), keys)
        if replaced:
            log.warning(
                "%r: a lone surrogate (half a character) became � in %d rows, first in row %d.",
                path,
                len(replaced),
                replaced[0],
            )
        return PickledTable.of(json_records, path, keys, place=place)
    _check_sizes(path, file, {*keys.required(), *keys.optional()} - {keys.image})
    # With page checksums, a flipped bit causes an error instead of a wrong value.
    with pq.ParquetFile(file, page_checksum_verification=True) as source:
        check_schema(path, source.schema_arrow, keys)
        # Drop unused columns, which would only fill Ray's object store.
        names, columns = source.schema_arrow.names, {*keys.required(), *keys.optional()} - {keys.image, VIDEOS}
        table = source.read(columns=[name for name in names if name in columns])
    media = [name if name in names else None for name in (keys.image, VIDEOS)]
    return Table(path, table, np.arange(table.num_rows), ImageColumn(place, *media) if any(media) else None)


def _check_sizes(path: str, file: Path, columns: set[str]) -> None:
    """Raise DataError for texts that are much larger in memory than in the file, before they are decoded.

    Dictionary encoding can reduce any text to a few bytes per row. Such columns are read as dictionaries, which takes
    only the memory of the distinct texts.
    """
    with pq.ParquetFile(file) as source:
        groups = range(source.metadata.num_row_groups)
        first_row, total, most = 0, 0, max(MAX_FILE_BYTES, MAX_EXPANSION * file.stat().st_size)
        for group, about in ((group, source.metadata.row_group(group)) for group in groups):
            chunks = [about.column(place) for place in range(about.num_columns)]
            texts = [
                chunk.path_in_schema
                for chunk in chunks
                if chunk.physical_type == "BYTE_ARRAY"
                and chunk.path_in_schema.partition(".")[0] in columns
                and chunk.num_values * chunk.total_uncompressed_size > _MAX_TEXT_BYTES
            ]
            total += sum(8 * chunk.num_values for chunk in chunks)
            total += sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema not in texts)
            for leaf in texts:
                with pq.ParquetFile(file, read_dictionary=[leaf]) as encoded:
                    sizes, rows = _text_sizes(encoded.read_row_group(group, columns=[leaf]).column(0))
                total += int(sizes.sum())
                if sizes.max(initial=0) > _MAX_TEXT_BYTES:
                    row = first_row + int(rows[sizes.argmax()])
                    raise DataError(
                        f"data file {path!r} row {row}: {leaf} has {sizes.max():,} bytes; a text has at most "
                        f"{_MAX_TEXT_BYTES:,}. Remove the row."
                    )
            if total > most:
                raise DataError(
                    f"data file {path!r} row group {group}: its {file.stat().st_size:,} bytes expand to more than "
                    f"{most:,} in memory. Rewrite it without repeating large texts."
                )
            first_row += about.num_rows


def _text_sizes(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of each text of a single-leaf column [n], and its row [n]."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    array = pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array
    rows = np.arange(len(array))
    while pa.types.is_nested(array.type):
        if pa.types.is_struct(array.type):
            array = array.flatten()[0]
        else:
            rows = rows[pc.list_parent_indices(array).to_numpy(zero_copy_only=False)]
            array = pc.list_flatten(array)
    values = array.dictionary if pa.types.is_dictionary(array.type) else array
    sizes = pc.fill_null(pc.binary_length(values), 0)
    taken = pc.fill_null(sizes.take(array.indices), 0) if values is not array else sizes
    return taken.to_numpy(zero_copy_only=False).astype(np.int64), rows


def unreadable(path: str, error: Exception) -> RltrainError:
    """Return the error for a file that Arrow or the system cannot read."""
    return host_error(error) or DataError(
        f"data file {path!r} cannot be read as parquet: it is truncated, damaged or of another format "
        f"({first_line(error)[:200]}). Write or copy it again."
    )


def draw_rows(total: int, most: int, seed: int | None) -> np.ndarray:
    """Return at most ``most`` of the numbers below ``total`` (0 or less: all), drawn by ``seed`` (None: the first).
    Sorted, [n], int64.
    """
    if not 0 < most < total:
        return np.arange(total)
    if seed is None:
        return np.arange(most)
    # As in `BatchOrder`, rows are sorted by raw numbers, because NumPy guarantees their stream.
    return np.sort(np.argsort(stream(seed, "subset").random_raw(total), kind="stable")[:most])


def limit_rows(files: list[Table], max_rows: int, seed: int | None) -> list[Table]:
    """Return the files with at most ``max_rows`` of their rows (0 or less: all), in file order."""
    total = sum(len(file.numbers) for file in files)
    if not 0 < max_rows < total:
        return files
    rows = draw_rows(total, max_rows, seed)
    starts = np.cumsum([0, *(len(file.numbers) for file in files)])
    return [_take_rows(file, _between(rows, *ends)) for file, ends in zip(files, pairwise(starts), strict=True)]


def _take_rows(file: Table, rows: np.ndarray) -> Table:
    # Rows are taken batch by batch. Arrow may concatenate all chunks of a column before taking rows, and the images of
    # a file do not fit into one chunk.
    batches = file.table.to_batches()
    starts = np.cumsum([0, *(batch.num_rows for batch in batches)])
    pieces = zip(batches, pairwise(starts), strict=True)
    parts = [batch.take(pa.array(_between(rows, *ends))) for batch, ends in pieces]
    return replace(file, table=pa.Table.from_batches(parts, file.table.schema), numbers=rows)


def _between(rows: np.ndarray, start: int, end: int) -> np.ndarray:
    """Return those ascending ``rows`` in [start, end), relative to ``start``."""
    return rows[np.searchsorted(rows, start) : np.searchsorted(rows, end)] - start

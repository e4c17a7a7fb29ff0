"""Data files: resolution of names, detection of file types, and the records of JSON and CSV.

A name may be a pattern or a folder, and its ending may be wrong or missing. Therefore the first bytes determine the
type, and the error for an unsupported file names its type: for example, a Git LFS pointer is not reported as a damaged
parquet file. The layout of JSON is determined by its content; ambiguous content is an error.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from io import BufferedReader, BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from rltrain.common.errors import DataError, first_line, host_error, short
from rltrain.common.storage import bounded_lines, matching

_HEAD_BYTES = 512
# Maximum size of a decompressed file: this many bytes, or this multiple of the file size if that is more. The same
# limit applies to a line.
MAX_FILE_BYTES, MAX_EXPANSION = 2 << 30, 64
_MAX_LINE_BYTES, _MAX_LINE_EXPANSION = 256 << 20, 8
_JSON = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz")
_TEST = re.compile(r"(^|[^a-z])(test|val|valid|validation|dev|eval)([^a-z]|$)")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_COMPRESSED: tuple[tuple[bytes, Callable[[Path], Any]], ...] = (
    (b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ\0", lzma.open),
    (b"\x28\xb5\x2f\xfd", lambda file: pa.input_stream(str(file), compression="zstd")),
)  # fmt: skip
# UTF-16 encodings, with and without a byte order mark, because other programs write JSON and CSV in them.
_WIDE = ((b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"), (b"{\0", "utf-16-le"), (b"[\0", "utf-16-le"))
_TO_PARQUET = "write it as parquet (in pandas: to_parquet)"
# First bytes of unsupported files, with a description and a fix.
_UNSUPPORTED = (
    (rb"version https://git-lfs", "a Git LFS pointer, not the data: run `git lfs pull` where it was cloned"),
    (rb"(\.\./|/)*(\.git/)?annex/objects", "a git-annex pointer, not the data: run `git annex get` on it"),
    (rb"\s*<", "a web page (or XML), not the data: download the file itself (on the Hub: /resolve/ for /blob/)"),
    (rb"PK\x03\x04", "a zip archive or an Excel workbook: unpack it, or save it as csv"),
    (rb"7z\xbc\xaf|Rar!|.{257}ustar", "an archive: unpack it"),
    (rb"ARROW1|FEA1", "an Arrow (feather) file: pandas.read_feather(FILE).to_parquet('data.parquet')"),
    (rb"\xff\xff\xff\xff", "an Arrow stream, as datasets keeps: Dataset.from_file(FILE).to_parquet('data.parquet')"),
    (rb"PARE", "an encrypted parquet file: write it without encryption"),
    (rb"\x80[\x02-\x05]", f"a pickle, which could run any code: {_TO_PARQUET}"),
    (
        rb"ORC|Obj\x01|\x89HDF|\x93NUMPY|SQLite format 3",
        f"a file of another program (ORC, Avro, HDF5, …): {_TO_PARQUET}",
    ),
    (rb"%PDF|\x89PNG|\xff\xd8\xff|GIF8", "a document or an image, not a table"),
)


def files_of(name: str) -> list[str]:
    """Return the files of a path, a pattern or a folder, sorted by name. A path without a match is returned unchanged.

    Raises DataError for a folder without readable files, or with both training and test files.
    """
    paths = [Path(name)] if "://" in name else matching(name)
    if not paths:
        return [name]
    if len(paths) == 1 and paths[0].is_dir():
        return _of_folder(name, paths[0])
    return [str(path) for path in paths] if paths != [Path(name).expanduser()] else [name]


def _of_folder(name: str, folder: Path) -> list[str]:
    inside = sorted(file for file in folder.iterdir() if file.is_file() and file.name[0] not in "._")
    by_kind = ([file for file in inside if file.name.endswith(kinds)] for kinds in (".parquet", _JSON))
    files = next(filter(None, by_kind), [])
    if any(file.name in ("dataset_info.json", "state.json", "dataset_dict.json") for file in inside):
        way_out = "It was saved by datasets: load_from_disk(FOLDER)['train'].to_parquet('train.parquet')."
        raise DataError(f"{name!r} is a folder of Arrow files. {way_out}")
    if not files:
        below = next((file for kind in (".parquet", *_JSON) for file in sorted(folder.rglob(f"*{kind}"))), None)
        hint = f" Did you mean {str(below.parent)!r}?" if below else ""
        raise DataError(f"{name!r} is a folder without a parquet or jsonl file.{hint}")
    tests = [file for file in files if _TEST.search(file.stem.lower())]
    if 0 < len(tests) < len(files):
        names = ", ".join(file.name for file in files[:4])
        raise DataError(
            f"{name!r} is a folder with files of several splits ({names}{', …' if len(files) > 4 else ''}). "
            f"Name the ones to use, such as '{name}/train*{files[0].suffix}'."
        )
    return [str(file) for file in files]


def kind_of(name: str, file: Path) -> str:
    """Return ``parquet``, ``json`` or ``csv``. Raises DataError, which names the type, for any other file; OSError."""
    if file.stat().st_size == 0:
        raise DataError(f"data file {name!r} is empty (0 bytes); write it again.")
    with file.open("rb") as stream:
        is_compressed = stream.read(8).startswith(tuple(magic for magic, _ in _COMPRESSED))
    with _content(name, file) as content:
        head = content.read(_HEAD_BYTES)
    if head.startswith(b"PAR1"):
        if is_compressed:
            raise DataError(f"data file {name!r} is a compressed parquet file: unpack it (gunzip).")
        return "parquet"
    for first, kind in _UNSUPPORTED:
        if re.match(first, head, re.DOTALL):
            raise DataError(f"data file {name!r} is {kind}.")
    if head.lstrip()[:1] in (b"{", b"["):
        return "json"
    stem = re.sub(r"\.(gz|bz2|xz|zst)$", "", file.name.lower())
    if stem.endswith((".csv", ".tsv")):
        return "csv"
    if stem.endswith((".jsonl", ".ndjson", ".json")):
        return "json"
    if stem.endswith(".parquet") or b"\0" in head:
        return "parquet"
    raise DataError(
        f"data file {name!r} is text of an unknown type. Supported: parquet, json, jsonl and csv, also compressed, "
        "detected by the first bytes."
    )


def records(name: str, file: Path, kind: str, replaced: Callable[[int], object] = lambda row: None) -> Iterator[Any]:
    """Yield the records of a ``json`` or ``csv`` file, in order. Raises DataError with the line for unreadable content.

    replaced(row): called for each record with a lone surrogate (half a character, which cannot be stored), which is
    replaced by �.
    """
    with _content(name, file) as content:
        try:
            yield from _csv(_lines(content, file)) if kind == "csv" else _json(_lines(content, file), replaced)
        except (_BadContent, DataError) as error:
            raise DataError(f"data file {name!r} cannot be read as {kind}: {error}") from None


class _BadContent(Exception):
    """The line number and problem of bad content."""


@contextmanager
def _content(name: str, file: Path) -> Iterator[BinaryIO]:
    """Open a file, decompressed and as UTF-8. A truncated file raises an error with its name."""
    with file.open("rb") as stream:
        head = stream.read(8)
    opener: Any = next(
        (unpacker for magic, unpacker in _COMPRESSED if head.startswith(magic)), partial(open, mode="rb")
    )
    try:
        with opener(file) as stream, BufferedReader(stream) as buffered:
            wide = next((code for first, code in _WIDE if buffered.peek(4).startswith(first)), None)
            if wide and len(data := buffered.read((most := _max_line(file)) + 1)) > most:
                raise DataError(f"data file {name!r} becomes more than {most:,} bytes of UTF-16. Save it as UTF-8.")
            yield BytesIO(data.decode(wide).encode()) if wide else buffered
    except (OSError, EOFError, zlib.error, lzma.LZMAError, pa.ArrowException, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise host_error(error) or DataError(
            f"data file {name!r} cannot be unpacked or is not text: it is truncated or damaged "
            f"({short(first_line(error))}). Write or copy it again."
        ) from error


def _max_line(file: Path) -> int:
    return max(_MAX_LINE_BYTES, _MAX_LINE_EXPANSION * file.stat().st_size)


def _lines(content: BinaryIO, file: Path) -> Iterator[str]:
    """The lines of a file. Raises for a line that is not UTF-8 or expands to far more than the file size."""
    total, most = 0, max(MAX_FILE_BYTES, MAX_EXPANSION * file.stat().st_size)
    for number, raw in enumerate(bounded_lines(content, _max_line(file)), 1):
        if (total := total + len(raw)) > most:
            raise _BadContent(f"line {number} is after {most:,} bytes, {MAX_EXPANSION} times the size of the file.")
        try:
            yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise _BadContent(f"line {number} is not UTF-8. Save it as UTF-8.") from None


# -- JSON --------------------------------------------------------------------------------------------------------------


def _json(content: Iterator[str], replaced: Callable[[int], object]) -> Iterator[Any]:
    for row, (text, value) in enumerate(_values(content)):
        if _SURROGATE.search(text) and (repaired := _without_surrogates(value)) != value:
            replaced(row)
            value = repaired
        yield value


def _values(content: Iterator[str]) -> Iterator[tuple[str, Any]]:
    """Yield records with their source text (for a document: "" if it has no lone surrogates)."""
    lines = ((number, line) for number, line in enumerate(content, 1) if line.strip())
    number, text = next(lines, (0, ""))
    try:
        first = json.loads(text, object_pairs_hook=_object) if text else None
    except (ValueError, RecursionError):
        first = None
    if not isinstance(first, dict):  # the file does not contain one record per line
        text = "".join([text, *(line for _, line in lines)])
        source_text = text if _SURROGATE.search(text) else ""
        yield from ((source_text, record) for value in _documents(text, number) for record in _of_document(value))
        return
    second = next(lines, None)
    if second is None:
        yield from ((text, record) for record in _of_document(first))
        return
    yield text, first
    for number, line in chain([second], lines):
        try:
            yield line, json.loads(line, object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
            raise _no_json(number, error) from None


def _refuse_twice(names: Iterable[str]) -> None:
    """Raise _BadContent for a repeated name, because only the last value would be read."""
    if repeated := [name for name, times in Counter(names).items() if times > 1]:
        raise _BadContent(f"the name {repeated[0]!r} occurs more than once. Rename or drop one of them.")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        _refuse_twice(name for name, _ in pairs)
    return value


def _no_json(number: int, error: Exception) -> _BadContent:
    at = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
    return _BadContent(f"line {number} is not complete JSON ({short(getattr(error, 'msg', error))}{at}).")


def _documents(text: str, first_line_number: int) -> Iterator[Any]:
    """Yield consecutive JSON values of a text, each on any number of lines."""
    decoder, at = json.JSONDecoder(object_pairs_hook=_object), 0
    while rest := re.compile(r"\S").search(text, at):
        try:
            value, at = decoder.raw_decode(text, rest.start())
        except (ValueError, RecursionError) as error:
            number = text.count("\n", 0, getattr(error, "pos", 0)) + first_line_number
            raise _no_json(number, error) from None
        yield value


def _of_document(value: Any) -> list[Any]:
    """Return the records of a value that is a whole file: a list, a list under one name, or columns."""
    if isinstance(value, list):
        return value
    if not isinstance(value, dict) or not value:
        return [value]
    columns = list(value.values())
    lengths = {len(column) if isinstance(column, list | dict) else -1 for column in columns}
    if len(lengths) == 1 and min(lengths) > 0:
        are_lists = all(
            isinstance(column, list) and not any(isinstance(cell, dict) for cell in column) for column in columns
        )
        # pandas writes a table as columns of numbered rows.
        are_numbered = all(isinstance(column, dict) and all(map(str.isdigit, column)) for column in columns)
        if are_lists or are_numbered:
            by_row = zip(*(column if are_lists else column.values() for column in columns), strict=True)
            return [dict(zip(value, row, strict=True)) for row in by_row]
    tables = [
        column
        for column in columns
        if isinstance(column, list) and column and all(isinstance(cell, dict) for cell in column)
    ]
    if len(tables) == 1 and not any(isinstance(column, list) and column is not tables[0] for column in columns):
        # A list of messages is not a list of records.
        return [value] if {"role", "from", "content", "value"} & tables[0][0].keys() else tables[0]
    return [value]


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(name): _without_surrogates(item) for name, item in value.items()}
    return value


# -- CSV ---------------------------------------------------------------------------------------------------------------


def _csv(lines: Iterator[str]) -> Iterator[dict[str, str | None]]:
    """Yield rows by the names in the first line. The most frequent separator in it is used. An empty cell is None."""
    header = next(lines, "")
    sign = max(",;\t", key=header.count)
    csv.field_size_limit(1 << 30)
    rows = csv.reader(chain([header], lines), delimiter=sign, strict=True)
    try:
        names = next(rows, [])
        _refuse_twice(name for name in names if name)  # several columns may have no name, as some programs write them
        for row in filter(None, rows):
            if len(row) != len(names):
                raise _BadContent(f"line {rows.line_num} has {len(row)} cells, but the first line has {len(names)}.")
            yield {name: cell or None for name, cell in zip(names, row, strict=True)}
    except csv.Error as error:
        raise _BadContent(f"line {rows.line_num} is not a complete csv line ({error}).") from None

"""Access to storage that may be full or temporarily unavailable, such as network storage during a server restart."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from rltrain.common.background import heartbeat
from rltrain.common.clock import SYSTEM, Backoff
from rltrain.common.errors import DataError, StorageError, write_error

T = TypeVar("T")
_PATTERN = re.compile(r"[*?[]")
TRIED_S, BACKOFF = 5.0, Backoff(0.5, 0.5)
clock = SYSTEM


def patiently(path: Path, read: Callable[[], T]) -> T:
    """Call ``read``, which accesses ``path``, and retry for seconds if storage fails.

    Raises StorageError if it does not recover. A missing file or a folder is not a storage failure: these OSErrors, and
    errors without errno, are raised unchanged.
    """
    deadline = 0.0
    while True:
        try:
            return read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise
        except OSError as error:
            if error.errno is None:  # not a system error: a library read unusable data
                raise
            # The deadline counts from the first failure, because a successful read may also take long.
            deadline = deadline or clock.monotonic() + TRIED_S
            if clock.monotonic() > deadline:
                raise StorageError(
                    f"{path} cannot be read: {error.strerror or error}. This does not mean that the file is damaged. "
                    "Check the storage and its permissions, and run the same command again. If a file of a checkpoint "
                    "is lost for good, move the checkpoint's folder away."
                ) from error
        clock.sleep(BACKOFF.pause_s(1))


def bounded_lines(stream: BinaryIO, most: int) -> Iterator[bytes]:
    """Return the lines of a file, of at most ``most`` bytes each, because a compressed file may contain lines of any
    length. Raises DataError."""
    number = 0
    while line := stream.readline(most + 1):
        number += 1
        if len(line) > most:
            raise DataError(f"line {number} has more than {most:,} bytes.")
        yield line


def matching(name: str) -> list[Path]:
    """Return the file or folder at this path, or the files that match it as a pattern (``*``, ``?``, ``[…]``, ``**``),
    sorted by name. Empty without a match.
    """
    path = Path(name).expanduser()
    if path.exists():
        return [path]
    if not _PATTERN.search(name):
        return []
    paths = (Path(entry) for entry in glob.glob(str(path), recursive=True))
    return sorted(file for file in paths if file.is_file())


def distinct_suffixes(paths: Sequence[Path], separator: str) -> list[str]:
    """Return the shortest suffixes, of equally many parts, that distinguish different absolute paths."""
    parts = [path.parts[1:] for path in paths]
    length = 1
    while len({part[-length:] for part in parts}) < len(parts):
        length += 1
    return [separator.join(part[-length:]) for part in parts]


def run_folder(run: Path) -> Path:
    """Return ``run``, a user-given path. Raises DataError if it is not a folder."""
    if not run.is_dir():
        raise DataError(f"{run} is not a folder. Give the run folder (trainer.default_local_dir).")
    return run


def json_lines(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON-lines file, [] if it is missing. Skips truncated lines. Raises StorageError."""
    values = []
    for line in lines_of(file):
        with suppress(ValueError):
            values.append(json.loads(line))
    return [value for value in values if isinstance(value, dict)]


def lines_of(file: Path, keepends: bool = False) -> list[str]:
    """Return the lines of a file, [] if it is missing. Raises StorageError, and OSError if it is not a file."""
    try:
        return patiently(file, partial(file.read_text, encoding="utf-8", errors="replace")).splitlines(keepends)
    except FileNotFoundError:
        return []


def sync(path: Path) -> int:
    """Sync a file or folder to disk. Return its size, which is reliable on network storage once the file is open."""
    heartbeat()  # a checkpoint has many files
    # A folder can only be opened for reading, which is enough for fsync.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Convert an OSError inside the context to a DiskError or StorageError that names ``path``."""
    try:
        yield
    except OSError as error:
        way_out = "Free space or allow writing there, and run the same command again."
        raise write_error(f"{path} cannot be written: {error}", error, lambda: way_out) from error


@contextmanager
def swapping(file: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces ``file`` at the end, so that ``file`` is either complete or unchanged.

    Creates its folder. Raises OSError.
    """
    temporary = file.with_name(f".{file.name}.tmp")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield a temporary path as `swapping`. Raises DiskError or StorageError."""
    with disk_errors(file), swapping(file) as temporary:
        yield temporary


def write_json(file: Path, value: Any) -> None:
    """Write a file atomically. Raises DiskError or StorageError."""
    write_text(file, json.dumps(value, indent=1, default=str) + "\n")


def write_text(file: Path, text: str) -> Path:
    """Write a file atomically. Return its path. Raises DiskError or StorageError."""
    with replacing(file) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return file


def read_json(file: Path) -> dict[str, Any] | None:
    """Return the content of a `write_json` file, or None if it is missing. Raises DataError and StorageError."""
    try:
        value = json.loads(patiently(file, file.read_bytes))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise DataError(f"{file} cannot be read ({error}). Move it away and rerun the command.") from error
    return value


def converter_hint(name: str) -> str:
    """Return how to create files of a data set with a hub name, such as openai/gsm8k; else ""."""
    owner, _, leaf = name.partition("/")
    module = leaf.lower().replace("-", "_")
    if not owner.strip("./~") or not module.isidentifier():
        return ""
    known = (Path(__file__).parents[1] / "data_preprocess" / f"{module}.py").exists()
    makes = f"rltrain data {module}" if known else f"rltrain data jsonl --input FILES (of hf download {name})"
    return f" Data is read from files: `{makes} --output data/{module}` makes them."

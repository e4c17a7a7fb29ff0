"""The manifest of a checkpoint: which files it has, and whether they are as they were written."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from rltrain.base.background import heartbeat
from rltrain.base.clock import SYSTEM, Clock
from rltrain.base.errors import CheckpointError, DiskError, StorageError
from rltrain.base.storage import patiently
from rltrain.models.files.safe import METADATA, read_metadata
from rltrain.run.checkpoints.foreign import describe_verl_checkpoint
from rltrain.workers.node import altered

MANIFEST, RECORD = "manifest.json", "progress.json"
# In progress.json of a checkpoint without the state of its optimizers: the `checkpoint_digest` that it had with it.
THINNED = "thinned"
# A digest has the name of its hash, which finds what chance has changed, and not what people have.
_DIGEST = "xxh3_128"
# Above this the workers read a file.
_LARGE_BYTES = 2**22
# Network storage may show seconds later what another node has written.
_SEEN_S, _POLL_S = 10.0, 0.1


def write_manifest(folder: Path, step: int, digests: Mapping[str, str] | None = None, clock: Clock = SYSTEM) -> None:
    """List the files of a checkpoint in it, and bring all to the disk.

    digests: by path, of what was hashed while it was written; other files are small and read here. Raises DiskError
    where a file that has a digest is not there.
    """
    # Listed before the manifest, which is not in itself. Without the syncs a power failure could leave empty files.
    files = {
        str(file.relative_to(folder)): {
            "bytes": sync(file),
            _DIGEST: (digests or {}).get(str(file)) or xxhash.xxh3_128(file.read_bytes()).hexdigest(),
        }
        for file in _written(folder, digests or {}, clock)
    }
    (folder / MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=1), encoding="utf-8")
    for entry in [folder / MANIFEST, folder, *(entry for entry in folder.rglob("*") if entry.is_dir())]:
        sync(entry)


def _written(folder: Path, digests: Mapping[str, str], clock: Clock) -> list[Path]:
    """Return the files of a save. Raises DiskError if one with a digest does not appear."""

    def missing() -> list[str]:
        return sorted(digests.keys() - {str(file) for file in folder.rglob("*") if file.is_file()})

    if (lost := missing()) and not clock.poll(lambda: not missing(), _SEEN_S, _POLL_S):
        raise DiskError(
            f"{lost[0]} was written and is not there ({len(lost)} of {len(digests)} such files are missing): "
            "the node that wrote it may have lost its mount of the run folder"
        )
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def find_damage(folder: Path, contents: bool = True) -> str | None:
    """What is wrong with a checkpoint folder, or None: the sizes of all files and the contents of the small ones.

    Of large files `large_files` knows the digests, which take time to compare. Raises StorageError where something
    cannot be read now, which is no damage.
    """
    try:
        files = _manifest(folder)
    except (OSError, ValueError, RecursionError) as error:
        return describe_verl_checkpoint(folder) or f"its {MANIFEST} cannot be read ({error})"
    for name, expected in files.items():
        file = folder / name
        try:
            status = patiently(file, file.stat)
        except (OSError, ValueError):  # a name that cannot be one
            return f"{name} is missing"
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is missing"
        if status.st_size != expected["bytes"]:
            return f"{name} has {status.st_size} bytes instead of {expected['bytes']}"
    if not contents:
        return None
    if problems := altered(_digests(folder, files, large=False)):
        return problems[0]
    try:
        read_record(folder)
        for file in patiently(folder, lambda: list(folder.glob(f"*/{METADATA}"))):
            read_metadata(file.parent)
    except CheckpointError as error:
        return str(error)
    return None


def _manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """The files of a checkpoint -> what is known of each: size and digest. Raises ValueError for anything else."""
    file = folder / MANIFEST
    content = json.loads(patiently(file, file.read_bytes))
    files = content.get("files") if isinstance(content, dict) else None
    if not isinstance(files, dict) or RECORD not in files:
        raise ValueError(f"it does not list {RECORD}")
    for name, entry in files.items():
        if not isinstance(entry, dict) or type(entry.get("bytes")) is not int:
            raise ValueError(f"it has no size of {name}")
    # One of many is lost by a flipped bit; none are there in checkpoints that were made before there were digests.
    lacking = [name for name, entry in files.items() if not isinstance(entry.get(_DIGEST), str)]
    if lacking and len(lacking) < len(files):
        raise ValueError(f"it has no digest of {lacking[0]}")
    return files


def _digests(folder: Path, files: dict[str, dict[str, Any]], *, large: bool) -> list[tuple[Path, str]]:
    entries = [(folder / name, entry) for name, entry in files.items() if _DIGEST in entry]
    return [
        (file, entry[_DIGEST])
        for file, entry in entries
        if (entry["bytes"] > _LARGE_BYTES and file.name != METADATA) == large
    ]


def large_files(folder: Path) -> list[tuple[Path, str]]:
    """The large files of a checkpoint and their digests, in the order of the ranks that have written them."""
    files = _digests(folder, _manifest(folder), large=True)
    # Of equal names, those with fewer digits have the smaller number. A rank that reads its own has it in its cache.
    return sorted(files, key=lambda entry: (entry[0].parent, len(entry[0].name), entry[0].name))


def has_digests(folder: Path) -> bool:
    """Whether the manifest knows more of the files than their sizes."""
    return any(_DIGEST in entry for entry in _manifest(folder).values())


def size_of(folder: Path) -> int:
    """Bytes that the manifest of a checkpoint lists; 0 where it cannot be read now."""
    try:
        return sum(entry["bytes"] for entry in _manifest(folder).values())
    except (OSError, ValueError, StorageError):
        return 0


def read_record(folder: Path) -> dict[str, Any]:
    """``progress.json`` of a checkpoint. Raises CheckpointError where it is not what a save has written."""
    file = folder / RECORD
    try:
        record = json.loads(patiently(file, file.read_bytes))
        if not isinstance(record, dict) or type(record.get("global_step")) is not int:
            raise ValueError("it has no global_step")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read ({error})") from error
    return record


def is_thinned(folder: Path) -> bool:
    """Whether it has no state of an optimizer any more. Raises CheckpointError."""
    return THINNED in read_record(folder)


def checkpoint_digest(folder: Path) -> str:
    """A digest of all files of a checkpoint, and of those that it had before its optimizers' state was dropped.

    Raises CheckpointError.
    """
    before = read_record(folder).get(THINNED)
    return before if isinstance(before, str) else xxhash.xxh3_128((folder / MANIFEST).read_bytes()).hexdigest()


def sync(path: Path) -> int:
    """Bring a file or folder to the disk. Returns its size, which network storage is sure of once a file is open."""
    heartbeat()  # a checkpoint has many files
    # A folder can be opened for reading only, and that is enough for fsync.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)

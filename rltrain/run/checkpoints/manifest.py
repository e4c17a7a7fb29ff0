"""The manifest of a checkpoint: the list of its files, and checks that they are intact."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from rltrain.common.clock import SYSTEM, Clock
from rltrain.common.errors import CheckpointError, DiskError, StorageError
from rltrain.common.storage import patiently, sync
from rltrain.models.files.safe import METADATA, read_metadata
from rltrain.run.checkpoints.foreign import describe_verl_checkpoint
from rltrain.workers.diagnostics.node import checksum_mismatches

MANIFEST, RECORD = "manifest.json", "progress.json"
# Key in progress.json of a thinned checkpoint: its `checkpoint_digest` before thinning.
THINNED = "thinned"
# Manifest key of a file's digest, named after its hash function. It detects accidental changes, not deliberate ones.
_DIGEST = "xxh3_128"
# Larger files are read by the workers.
_LARGE_BYTES = 2**22
# Network storage may show files of another node seconds later.
_SEEN_S, _POLL_S = 10.0, 0.1


def write_manifest(folder: Path, step: int, digests: Mapping[str, str] | None = None, clock: Clock = SYSTEM) -> None:
    """Write the manifest of a checkpoint and sync all files to disk.

    digests: by path, for files that were hashed during writing. Other files are small and are read here. Raises
    DiskError if a file with a digest is missing.
    """
    # The files are listed before the manifest exists, because it does not list itself. Without the syncs a power
    # failure could leave empty files.
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
    """Return the files of a checkpoint. Raises DiskError if a file with a digest is missing."""

    def missing() -> list[str]:
        return sorted(digests.keys() - {str(file) for file in folder.rglob("*") if file.is_file()})

    if (lost := missing()) and not clock.poll(lambda: not missing(), _SEEN_S, _POLL_S):
        raise DiskError(
            f"{lost[0]} was written but is missing ({len(lost)} of {len(digests)} such files are missing): "
            "the node that wrote it may have lost its mount of the run folder"
        )
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def find_damage(folder: Path, contents: bool = True) -> str | None:
    """Return the damage of a checkpoint, or None, by the sizes of all files and the contents of small ones. Digests of
    large files take time to compare; see `large_files`. Raises StorageError if a file cannot be read now, which is not
    damage.
    """
    try:
        files = _manifest(folder)
    except (OSError, ValueError, RecursionError) as error:
        return describe_verl_checkpoint(folder) or f"its {MANIFEST} cannot be read ({error})"
    for name, expected in files.items():
        file = folder / name
        try:
            status = patiently(file, file.stat)
        except (OSError, ValueError):  # the name is invalid
            return f"{name} is missing"
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is missing"
        if status.st_size != expected["bytes"]:
            return f"{name} has {status.st_size} bytes instead of {expected['bytes']}"
    if not contents:
        return None
    if problems := checksum_mismatches(_digests(folder, files, large=False)):
        return problems[0]
    try:
        read_record(folder)
        for file in patiently(folder, lambda: list(folder.glob(f"*/{METADATA}"))):
            read_metadata(file.parent)
    except CheckpointError as error:
        return str(error)
    return None


def _manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the files of a checkpoint -> their size and digest. Raises ValueError for an invalid manifest."""
    file = folder / MANIFEST
    content = json.loads(patiently(file, file.read_bytes))
    files = content.get("files") if isinstance(content, dict) else None
    if not isinstance(files, dict) or RECORD not in files:
        raise ValueError(f"it does not list {RECORD}")
    for name, entry in files.items():
        if not isinstance(entry, dict) or type(entry.get("bytes")) is not int:
            raise ValueError(f"it lacks the size of {name}")
    # A single missing digest is damage. Old checkpoints have no digests at all.
    lacking = [name for name, entry in files.items() if not isinstance(entry.get(_DIGEST), str)]
    if lacking and len(lacking) < len(files):
        raise ValueError(f"it lacks the digest of {lacking[0]}")
    return files


def _digests(folder: Path, files: dict[str, dict[str, Any]], *, large: bool) -> list[tuple[Path, str]]:
    entries = [(folder / name, entry) for name, entry in files.items() if _DIGEST in entry]
    return [
        (file, entry[_DIGEST])
        for file, entry in entries
        if (entry["bytes"] > _LARGE_BYTES and file.name != METADATA) == large
    ]


def large_files(folder: Path) -> list[tuple[Path, str]]:
    """Return the large files of a checkpoint and their digests, in the order of the ranks that wrote them."""
    files = _digests(folder, _manifest(folder), large=True)
    # Sort by rank (shorter names have smaller numbers), so that a rank can read the file that it wrote itself, which
    # may still be in the page cache.
    return sorted(files, key=lambda entry: (entry[0].parent, len(entry[0].name), entry[0].name))


def has_digests(folder: Path) -> bool:
    """Return whether the manifest contains digests in addition to sizes."""
    return any(_DIGEST in entry for entry in _manifest(folder).values())


def size_of(folder: Path) -> int:
    """Return the total size in the manifest of a checkpoint in bytes; 0 if it cannot be read now."""
    try:
        return sum(entry["bytes"] for entry in _manifest(folder).values())
    except (OSError, ValueError, StorageError):
        return 0


def read_record(folder: Path) -> dict[str, Any]:
    """Return ``progress.json`` of a checkpoint. Raises CheckpointError if it is invalid."""
    file = folder / RECORD
    try:
        record = json.loads(patiently(file, file.read_bytes))
        if not isinstance(record, dict) or type(record.get("global_step")) is not int:
            raise ValueError("it has no global_step")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read ({error})") from error
    return record


def is_thinned(folder: Path) -> bool:
    """Return whether the optimizer state was removed from the checkpoint. Raises CheckpointError."""
    return THINNED in read_record(folder)


def checkpoint_digest(folder: Path) -> str:
    """Return a digest of all files of a checkpoint. Thinning does not change it.

    Raises CheckpointError.
    """
    before = read_record(folder).get(THINNED)
    return before if isinstance(before, str) else xxhash.xxh3_128((folder / MANIFEST).read_bytes()).hexdigest()

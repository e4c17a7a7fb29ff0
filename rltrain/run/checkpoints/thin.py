"""Removal of optimizer state from old checkpoints. This reduces them to a third of their size and keeps the weights
unchanged.

DCP's files hold one tensor after another, and ``.metadata`` has their offsets. So the other tensors are copied byte for
byte into new files, without loading them. The thinned checkpoint is written next to the old one and then takes its
name.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from rltrain.common.errors import CheckpointError
from rltrain.models.files.hashed import Digests, hashed
from rltrain.models.files.safe import METADATA, read_metadata
from rltrain.run.checkpoints.folder import RunFolder
from rltrain.run.checkpoints.manifest import (
    MANIFEST,
    RECORD,
    THINNED,
    checkpoint_digest,
    find_damage,
    large_files,
    read_record,
    size_of,
    write_manifest,
)
from rltrain.workers.diagnostics.node import checksum_mismatches

_OPTIMIZER = "optimizer."
_BUFFER = 16 << 20


def damage(folder: Path) -> str | None:
    """Return the damage of a checkpoint after reading all its files; None if it is complete. Raises StorageError."""
    return find_damage(folder) or next(iter(checksum_mismatches(large_files(folder))), None)


def optimizer_bytes(folder: Path) -> int:
    """Return the bytes of optimizer state in a checkpoint. Raises CheckpointError."""
    places = [place for role in _roles(folder) for place in _places(read_metadata(role), optimizer=True)]
    return sum(place.length for _, place in places)


def thin(run: RunFolder, step: int) -> int:
    """Remove the optimizer state from a checkpoint. Return the number of bytes freed.

    Raises CheckpointError if the checkpoint is damaged, and DiskError or StorageError if a write fails. In each case
    the checkpoint is unchanged.
    """
    folder = run.step_folder(step)
    if problem := damage(folder):
        raise CheckpointError(f"{folder} is damaged and was not changed: {problem}.")
    before, record = size_of(folder), read_record(folder)
    new = run.under_way(step)
    try:
        new.mkdir()
        digests = _copy(folder, new)
        (new / RECORD).write_text(
            json.dumps({**record, THINNED: checkpoint_digest(folder)}, indent=1), encoding="utf-8"
        )
        write_manifest(new, step, digests)
        run.replace(new, step)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return before - size_of(folder)


def _roles(folder: Path) -> list[Path]:
    return sorted(file.parent for file in folder.glob(f"*/{METADATA}"))


def _copy(folder: Path, new: Path) -> Digests:
    """Copy everything except optimizer state and progress.json. Return the digests of large files for the manifest."""
    digests = {str(new / file.relative_to(folder)): digest for file, digest in large_files(folder)}
    shards: set[Path] = set()
    for role in _roles(folder):
        metadata = read_metadata(role)
        shards |= {role / METADATA, *(role / place.relative_path for place in metadata.storage_data.values())}
        (new / role.name).mkdir()
        for shard in shards:
            digests.pop(str(new / shard.relative_to(folder)), None)
        _write_without_optimizer(metadata, role, new / role.name, digests)
    for file in sorted(folder.rglob("*")):
        target = new / file.relative_to(folder)
        if file.is_dir():
            target.mkdir(exist_ok=True)
        elif file not in shards and file.name not in (MANIFEST, RECORD):
            _link(file, target)
    return digests


def _write_without_optimizer(metadata: Any, role: Path, new: Path, digests: Digests) -> None:
    places = _places(metadata, optimizer=False)
    metadata.storage_data = {}
    for name in dict.fromkeys(place.relative_path for _, place in places):
        with open(role / name, "rb") as source, hashed(new / name, digests) as target:
            for index, place in places:
                if place.relative_path == name:
                    metadata.storage_data[index] = replace(place, offset=target.tell())
                    _copy_bytes(source, target, place.offset, place.length)
    kept = {index.fqn for index in metadata.storage_data}
    metadata.state_dict_metadata = {key: value for key, value in metadata.state_dict_metadata.items() if key in kept}
    metadata.planner_data = {key: path for key, path in (metadata.planner_data or {}).items() if key in kept}
    with hashed(new / METADATA, digests) as file:
        pickle.dump(metadata, file)


def _places(metadata: Any, *, optimizer: bool) -> Sequence[tuple[Any, Any]]:
    """Return (index, location), in file order, of either the optimizer state or all other tensors."""
    places = [
        (index, place)
        for index, place in metadata.storage_data.items()
        if index.fqn.startswith(_OPTIMIZER) == optimizer
    ]
    return sorted(places, key=lambda entry: (str(entry[1].relative_path), entry[1].offset))


def _copy_bytes(source: IO[bytes], target: IO[bytes], offset: int, length: int) -> None:
    source.seek(offset)
    while length:
        data = source.read(min(length, _BUFFER))
        if not data:
            raise CheckpointError(f"{source.name} is shorter than its {METADATA} says.")
        target.write(data)
        length -= len(data)


def _link(file: Path, target: Path) -> None:
    """Hard-link the file, or copy it where the storage has no hard links."""
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)

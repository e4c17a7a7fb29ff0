"""Digests of files that a configuration names by path, so that changed content is detected."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

# File names that a run itself writes.
_WRITTEN = ("reward.judge.cache",)
# Files of at least this size are sampled, because hashing all of a large model would take minutes.
_LARGE_BYTES, _PIECES, _PIECE_BYTES = 1 << 22, 16, 1 << 16


def digest_of_model(folder: Path, pattern: str = "*") -> str:
    """Return the digest of a folder's files that match ``pattern``, except model cards. Large files are sampled."""
    digest = xxhash.xxh3_128()
    for file in sorted(path for path in folder.glob(pattern) if path.is_file() and path.suffix != ".md"):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        for piece in _pieces(file):
            digest.update(piece)
    return digest.hexdigest()


@functools.cache  # cached, because a later call may read weights that were replaced after the run started
def digest_of_weights(folder: str) -> str | None:
    """Return the digest of a model's weights when this process first read them; None for a hub name."""
    path = Path(folder).expanduser()
    return digest_of_model(path, "*.safetensors") if path.is_dir() else None


def digest_of_files(files: Iterable[str | Path]) -> str:
    """Return the digest of whole files. A missing file contributes only its name."""
    digest = xxhash.xxh3_128()
    for name in files:
        path = Path(name).expanduser()
        digest.update(f"{path.name}\n".encode())
        if path.is_file():
            with path.open("rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()


def digests_of_values(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of every file that a value names: a path, FILE.py:NAME, or a list of these.

    settings: values by dotted key (`evaluate.models.flat`). The keys of the result are "content of KEY".
    """
    digests = {}
    for key, value in settings.items():
        names = [name for name in (value if isinstance(value, list) else [value]) if isinstance(name, str) and name]
        paths = [path for name in names for path in (name, name.rpartition(":")[0]) if path and _is_file(path)]
        if paths and key not in _WRITTEN:
            digests[f"content of {key}"] = digest_of_files(paths)
    return digests


def _is_file(path: str) -> bool:
    try:
        return Path(path).expanduser().is_file()
    except OSError:  # too long for a path
        return False


def _pieces(file: Path) -> Iterator[bytes]:
    """Yield all of a small file, or evenly spaced pieces of a large one."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size < _LARGE_BYTES:
            yield stream.read()
            return
        for number in range(_PIECES):
            stream.seek(number * (size - _PIECE_BYTES) // (_PIECES - 1))
            yield stream.read(_PIECE_BYTES)

"""Names, shapes and dtypes of the entries of checkpoint files, from their headers. No weight is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import cached_file

from rltrain.models.files.hashed import DTYPES
from rltrain.models.files.safe import UNREADABLE

# The kinds of files in search order, each with its index file.
KINDS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class NoEntries(Exception):
    """The reason why the entries of a checkpoint cannot be determined."""


@dataclass
class Entries:
    """Entries of a checkpoint, by the names in its files."""

    path: str
    paths: list[Path] = field(default_factory=list)
    """Paths of the checkpoint and of its files."""
    empty: dict[str, Tensor] = field(default_factory=dict)
    """Meta tensors with shape and dtype."""
    files: dict[str, list[Path]] = field(default_factory=dict)
    """Files with the entry. The last one counts, as in transformers."""
    opened: dict[str, Any] = field(default_factory=dict)
    """Open safetensors file of each entry. Entries of other kinds of files are missing."""

    def read(self, name: str) -> Tensor:
        """Return the tensor of an entry, from a memory-mapped file."""
        if name in self.opened:
            tensor: Tensor = self.opened[name].get_tensor(name)
            return tensor
        weights: Tensor = _unpickled(self.files[name][-1], "cpu")[name]
        return weights

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Return rows [first, last) of an entry."""
        part = self.opened[name].get_slice(name) if name in self.opened else self.read(name)
        selected_rows: Tensor = part[first:last] if self.empty[name].dim() else self.read(name)
        return selected_rows

    def differing(self) -> Iterator[str]:
        """Yield entries that have different values in several files."""
        for name, files in self.files.items():
            if len(files) > 1 and name in self.opened:
                first, *others = (_open(file).get_tensor(name) for file in files)
                if not all(torch.equal(first, other) for other in others):
                    yield name

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype of most numbers, or None without floating-point entries."""
        sizes: dict[torch.dtype, int] = {}
        for weight in self.empty.values():
            if weight.is_floating_point() and weight.dtype.itemsize > 1:
                sizes[weight.dtype] = sizes.get(weight.dtype, 0) + weight.numel()
        return max(sizes, key=lambda dtype: sizes[dtype], default=None)


def files_of(path: str, *, fetch: bool = False) -> list[Path]:
    """Return the weight files of a folder or hub name. Raises NoEntries if one is missing.

    fetch: download from the hub; otherwise use only files on this machine.
    """
    for single, index in KINDS:
        index_file = _here(path, index, fetch)
        names = index_names(index_file) if index_file else [single]
        files = [_here(path, name, fetch) for name in names]
        if index_file or files[0]:
            if None in files:
                raise NoEntries(f"it has no file {names[files.index(None)]}")
            return [file for file in files if file]
    raise NoEntries(f"it has no file {KINDS[0][0]}")


def index_names(index: Path) -> list[str]:
    """Return the files that an index names."""
    return sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))


def read_entries(path: str, *, fetch: bool = False) -> Entries:
    """Read the entries of a checkpoint. Raises NoEntries."""
    entries = Entries(path, files_of(path, fetch=fetch))
    for file in entries.paths:
        try:
            _add(entries, file)
        except (*UNREADABLE, RuntimeError, ValueError) as error:
            raise NoEntries(f"{file}: {error}") from error
    return entries


def _add(entries: Entries, file: Path) -> None:
    if file.suffix == ".safetensors":
        opened = _open(file)
        empty = {name: _empty(opened.get_slice(name)) for name in opened.keys()}  # noqa: SIM118 - not a dict
        entries.opened |= dict.fromkeys(empty, opened)
    else:
        empty = {name: value for name, value in _unpickled(file, "meta").items() if isinstance(value, Tensor)}
    entries.empty |= empty
    for name in empty:
        entries.files.setdefault(name, []).append(file)


def _empty(part: Any) -> Tensor:
    return torch.empty(part.get_shape(), dtype=_DTYPES.get(part.get_dtype(), torch.uint8), device="meta")


def _open(file: Path) -> Any:
    # The file is memory-mapped, so keeping it open takes only address space.
    return safe_open(file, "pt")


def _unpickled(file: Path, device: str) -> dict[str, Any]:
    weights = torch.load(file, map_location=device, mmap=True, weights_only=True)
    if not isinstance(weights, dict):
        raise ValueError(f"it contains a {type(weights).__name__} instead of weights by name")
    return weights


def _here(path: str, name: str, fetch: bool) -> Path | None:
    if Path(path).is_dir():
        return file if (file := Path(path, name)).is_file() else None
    if fetch:
        cached = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    else:
        cached = huggingface_hub.try_to_load_from_cache(path, name)
    return Path(cached) if isinstance(cached, str) else None

"""What the files of a checkpoint hold: names, shapes and kinds of numbers, from headers. No weight is read for it."""

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

from rltrain.models.files.safe import UNREADABLE

# The kinds of files in the order in which they are looked for, each with the index of several.
KINDS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


class NoEntries(Exception):
    """Why it cannot be said what the files hold."""


@dataclass
class Entries:
    """By name of an entry, as the files have it."""

    path: str
    paths: list[Path] = field(default_factory=list)
    """Both: of the checkpoint, and of its files."""
    empty: dict[str, Tensor] = field(default_factory=dict)
    """On the meta device: shape and dtype."""
    files: dict[str, list[Path]] = field(default_factory=dict)
    """Those that hold it. Of several the last counts, as for transformers."""
    opened: dict[str, Any] = field(default_factory=dict)
    """The open safetensors file; none of what is in another kind of file."""

    def read(self, name: str) -> Tensor:
        """The numbers of an entry, from a file that is mapped into memory."""
        if name in self.opened:
            tensor: Tensor = self.opened[name].get_tensor(name)
            return tensor
        weights: Tensor = _unpickled(self.files[name][-1], "cpu")[name]
        return weights

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Some rows of an entry."""
        part = self.opened[name].get_slice(name) if name in self.opened else self.read(name)
        selected_rows: Tensor = part[first:last] if self.empty[name].dim() else self.read(name)
        return selected_rows

    def differing(self) -> Iterator[str]:
        """Entries that stand in several files with other numbers."""
        for name, files in self.files.items():
            if len(files) > 1 and name in self.opened:
                first, *others = (_open(file).get_tensor(name) for file in files)
                if not all(torch.equal(first, other) for other in others):
                    yield name

    @property
    def dtype(self) -> torch.dtype | None:
        """That of most numbers; None where no entry has floating point."""
        sizes: dict[torch.dtype, int] = {}
        for weight in self.empty.values():
            if weight.is_floating_point() and weight.dtype.itemsize > 1:
                sizes[weight.dtype] = sizes.get(weight.dtype, 0) + weight.numel()
        return max(sizes, key=lambda dtype: sizes[dtype], default=None)


def files_of(path: str, *, fetch: bool = False) -> list[Path]:
    """The files with the weights of a folder or hub name. Raises NoEntries where one is not there.

    fetch: from the hub; else only what is on this machine.
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
    """The files that an index names."""
    return sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))


def read_entries(path: str, *, fetch: bool = False) -> Entries:
    """Raises NoEntries."""
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
    # Mapped, so an open file takes address space and no memory.
    return safe_open(file, "pt")


def _unpickled(file: Path, device: str) -> dict[str, Any]:
    weights = torch.load(file, map_location=device, mmap=True, weights_only=True)
    if not isinstance(weights, dict):
        raise ValueError(f"it holds a {type(weights).__name__} instead of weights by name")
    return weights


def _here(path: str, name: str, fetch: bool) -> Path | None:
    if Path(path).is_dir():
        return file if (file := Path(path, name)).is_file() else None
    if fetch:
        cached = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    else:
        cached = huggingface_hub.try_to_load_from_cache(path, name)
    return Path(cached) if isinstance(cached, str) else None

"""Weights in FSDP checkpoints of verl and its forks: one file per rank with its part of every weight.

``actor/model_world_size_W_rank_R.pt`` holds tensors by name: DTensors, which describe their sharding, or plain tensors.
Only tensors are unpickled (docs/security.md), from memory-mapped files, and weights are assembled one at a time. Not
supported: weights sharded in two dimensions (tensor parallelism), and Megatron checkpoints.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from rltrain.common.errors import CheckpointError, host_error
from rltrain.models.files.entries import Entries

# Unpickling a mesh warns that there are no process groups, but none are needed here.
_MESHES = logging.getLogger("torch.distributed.device_mesh")
_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")


class Shards(Entries):
    """Assembled entries of ``folder``. Raises CheckpointError if files are missing, damaged or not shards."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), paths=shard_files(folder))
        self._ranks = [_read(file) for file in self.paths]
        self._last: tuple[str, Tensor] | None = None
        self._replicated: set[str] = set()
        for file, weights in zip(self.paths, self._ranks, strict=True):
            if odd := sorted(weights.keys() ^ self._ranks[0].keys()):
                raise CheckpointError(f"{file} and {self.paths[0].name} differ in {odd[0]}. Copy the checkpoint again.")
        self.files = dict.fromkeys(self._ranks[0], self.paths)
        self.empty = {
            name: torch.empty(self._shape(name), dtype=self._dtype(name), device="meta") for name in self.files
        }

    def settle(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Mark plain tensors that have the given shape as replicated on every rank. All others are row shards in rank
        order."""
        for name, shape in shapes.items():
            first = self._ranks[0][name]
            if not isinstance(first, DTensor) and tuple(first.shape) == tuple(shape):
                self._replicated.add(name)
                self.empty[name] = torch.empty(shape, dtype=first.dtype, device="meta")

    def read(self, name: str) -> Tensor:
        """Return an assembled entry. Raises CheckpointError if its parts do not match its size."""
        if self._last is None or self._last[0] != name:
            self._last = None  # free it before the next one
            self._last = (name, self._put_together(name))
        return self._last[1]

    def differing(self) -> Any:
        """Yield nothing: every entry is in all files."""
        return iter(())

    def _put_together(self, name: str) -> Tensor:
        first = self._ranks[0][name]
        if isinstance(first, DTensor):
            ranks, dim = _cut(self.path, name, first)
            parts = [_local(self.path, name, self._ranks[rank][name]) for rank in ranks]
        else:
            having = self._ranks[:1] if name in self._replicated or not first.dim() else self._ranks
            dim, parts = 0, [weights[name] for weights in having]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
        if whole.shape != self.empty[name].shape:
            raise CheckpointError(
                f"{self.path}: the parts of {name} make {list(whole.shape)} instead of {list(self.empty[name].shape)}. "
                "Copy the checkpoint again."
            )
        return whole

    def _shape(self, name: str) -> tuple[int, ...]:
        first = self._ranks[0][name]
        if isinstance(first, DTensor) or not first.dim():
            return tuple(first.shape)
        return (sum(weights[name].shape[0] for weights in self._ranks), *first.shape[1:])

    def _dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = self._ranks[0][name].dtype
        return dtype


def shard_files(folder: Path) -> list[Path]:
    """Return the files of all ranks in order, or [] without shards. Raises CheckpointError if one is missing."""
    sizes: dict[int, dict[int, Path]] = {}
    for file in folder.glob("model_world_size_*_rank_*.pt"):
        if match := _FILE.fullmatch(file.name):
            sizes.setdefault(int(match[1]), {})[int(match[2])] = file
    if not sizes:
        return []
    if len(sizes) > 1:
        counts = " and ".join(map(str, sorted(sizes)))
        raise CheckpointError(f"{folder} has shards of {counts} ranks. Keep the files of one checkpoint.")
    ((world_size, files),) = sizes.items()
    if missing := [rank for rank in range(world_size) if rank not in files]:
        raise CheckpointError(
            f"{folder} lacks model_world_size_{world_size}_rank_{missing[0]}.pt ({len(missing)} of {world_size} "
            "files). Copy the files of all nodes into one folder."
        )
    return [files[rank] for rank in range(world_size)]


def _read(file: Path) -> dict[str, Any]:
    _MESHES.setLevel(logging.ERROR)
    try:
        weights = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # damaged bytes can make torch raise almost any error
        if known := host_error(error):
            raise known from error
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{file} cannot be read as tensors only: {reason}. Copy it again.") from error
    if not isinstance(weights, dict) or not all(isinstance(weight, Tensor) for weight in weights.values()):
        raise CheckpointError(f"{file} has other content than named tensors, so it is not a model shard of verl.")
    return weights


def _cut(path: str, name: str, weight: DTensor) -> tuple[list[int], int]:
    """Return the ranks that hold the parts of a weight, in order, and the sharded dimension."""
    mesh, placements = weight.device_mesh.mesh, weight.placements
    shards = [axis for axis, placement in enumerate(placements) if not isinstance(placement, Replicate)]
    if len(shards) > 1 or any(type(placements[axis]) is not Shard for axis in shards):
        raise CheckpointError(
            f"{path}: {name} is sharded as {placements}, but only weights sharded along one dimension can be merged. "
            "Merge the checkpoint with verl's own python -m verl.model_merger."
        )
    for axis in reversed(range(mesh.ndim)):
        if axis not in shards:
            mesh = mesh.select(axis, 0)  # all replicas are equal
    if not shards:
        return [int(mesh)], 0
    placement = placements[shards[0]]
    assert isinstance(placement, Shard)
    return mesh.tolist(), placement.dim


def _local(path: str, name: str, weight: Any) -> Tensor:
    if not isinstance(weight, DTensor):
        raise CheckpointError(f"{path}: {name} is sharded on some ranks only. Copy the checkpoint again.")
    return weight.to_local()

"""Weights in the FSDP checkpoints of verl's and of its descendants: a file a rank, each with its part of every weight.

``actor/model_world_size_W_rank_R.pt`` holds tensors by name: DTensors, which say how they are cut, or plain ones. They
are read as tensors alone (docs/security.md), from files that are mapped, and put together a weight at a time. Left out:
weights that are cut twice (tensor parallelism), and Megatron's folders.
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

from rltrain.base.errors import CheckpointError, host_error
from rltrain.models.files.entries import Entries

# Tells whoever unpickles a mesh that there are no process groups, of which nothing is needed here.
_MESHES = logging.getLogger("torch.distributed.device_mesh")
_FILE = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")


class Shards(Entries):
    """The entries of ``folder``, whole. Raises CheckpointError for files that are missing, damaged, or no shards."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), paths=shard_files(folder))
        self._ranks = [_read(file) for file in self.paths]
        self._last: tuple[str, Tensor] | None = None
        self._whole: set[str] = set()
        for file, weights in zip(self.paths, self._ranks, strict=True):
            if odd := sorted(weights.keys() ^ self._ranks[0].keys()):
                raise CheckpointError(f"{file} and {self.paths[0].name} differ in {odd[0]}. Copy the checkpoint again.")
        self.files = dict.fromkeys(self._ranks[0], self.paths)
        self.empty = {
            name: torch.empty(self._shape(name), dtype=self._dtype(name), device="meta") for name in self.files
        }

    def settle(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Say which plain tensors every rank has whole: those of this shape. Others are rows of one, by rank."""
        for name, shape in shapes.items():
            first = self._ranks[0][name]
            if not isinstance(first, DTensor) and tuple(first.shape) == tuple(shape):
                self._whole.add(name)
                self.empty[name] = torch.empty(shape, dtype=first.dtype, device="meta")

    def read(self, name: str) -> Tensor:
        """An entry put together. Raises CheckpointError where its parts are not of its size."""
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next one takes memory
            self._last = (name, self._put_together(name))
        return self._last[1]

    def differing(self) -> Any:
        """Every entry stands in all files."""
        return iter(())

    def _put_together(self, name: str) -> Tensor:
        first = self._ranks[0][name]
        if isinstance(first, DTensor):
            ranks, dim = _cut(self.path, name, first)
            parts = [_local(self.path, name, self._ranks[rank][name]) for rank in ranks]
        else:
            having = self._ranks[:1] if name in self._whole or not first.dim() else self._ranks
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
    """The files of all ranks, by rank; none where there are no shards. Raises CheckpointError where one is missing."""
    sizes: dict[int, dict[int, Path]] = {}
    for file in folder.glob("model_world_size_*_rank_*.pt"):
        if match := _FILE.fullmatch(file.name):
            sizes.setdefault(int(match[1]), {})[int(match[2])] = file
    if not sizes:
        return []
    if len(sizes) > 1:
        counts = " and ".join(map(str, sorted(sizes)))
        raise CheckpointError(f"{folder} holds shards of {counts} ranks. Keep those of one checkpoint.")
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
    except Exception as error:  # damaged bytes make torch raise almost anything
        if known := host_error(error):
            raise known from error
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{file} cannot be read as tensors alone: {reason}. Copy it again.") from error
    if not isinstance(weights, dict) or not all(isinstance(weight, Tensor) for weight in weights.values()):
        raise CheckpointError(f"{file} does not hold tensors by name alone, as verl's shards of a model do.")
    return weights


def _cut(path: str, name: str, weight: DTensor) -> tuple[list[int], int]:
    """The ranks that hold the parts of a weight, in order, and the dimension in which it is cut."""
    mesh, placements = weight.device_mesh.mesh, weight.placements
    shards = [axis for axis, placement in enumerate(placements) if not isinstance(placement, Replicate)]
    if len(shards) > 1 or any(type(placements[axis]) is not Shard for axis in shards):
        raise CheckpointError(
            f"{path}: {name} is cut as {placements}, and only weights that are cut once can be put together. Merge it "
            "with verl's own python -m verl.model_merger."
        )
    for axis in reversed(range(mesh.ndim)):
        if axis not in shards:
            mesh = mesh.select(axis, 0)  # its replicas are the same
    if not shards:
        return [int(mesh)], 0
    placement = placements[shards[0]]
    assert isinstance(placement, Shard)
    return mesh.tolist(), placement.dim


def _local(path: str, name: str, weight: Any) -> Tensor:
    if not isinstance(weight, DTensor):
        raise CheckpointError(f"{path}: {name} is cut on some ranks and not on others. Copy the checkpoint again.")
    return weight.to_local()

"""Files that someone else may have written: what is read of them is numbers, never code.

A pickle can call any function when it is read. torch reads tensors with an unpickler that knows tensors alone, but the
``.metadata`` of a sharded checkpoint with one that knows everything, and whatever that names as no tensor, too. So
``.metadata`` is read here, by an unpickler that knows the classes of a description of tensors.
"""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from rltrain.base.errors import CheckpointError, StorageError
from rltrain.base.storage import patiently

METADATA = ".metadata"
# What reading tensors raises where a file is damaged, or holds something else: torch and safetensors run nothing.
UNREADABLE = (OSError, EOFError, pickle.UnpicklingError, SafetensorError)
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    *(
        (_METADATA_MODULE, name)
        for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata")
    ),
    *((_METADATA_MODULE, name) for name in ("BytesStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING")),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not dtype and (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no description of tensors needs")
        return super().find_class(module, name)


def read_metadata(folder: str | os.PathLike[str]) -> Metadata:
    """Which tensors the files of ``folder`` hold. Raises CheckpointError for anything else; nothing of it is run."""
    file = Path(folder) / METADATA
    try:
        metadata = _Unpickler(io.BytesIO(patiently(file, file.read_bytes))).load()
        _check(metadata)
    except (StorageError, MemoryError):
        raise
    # Damaged bytes make the unpickler raise almost anything.
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read ({error}). Use only your own files.") from error
    metadata.storage_meta = metadata.storage_meta or StorageMeta()
    return metadata


def _check(metadata: Any) -> None:
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise ValueError("it does not describe tensors")
    for name, described in metadata.state_dict_metadata.items():
        # Anything else would be read as a pickle.
        if not isinstance(described, TensorStorageMetadata):
            raise ValueError(f"{name} is no tensor")
    for place in metadata.storage_data.values():
        if Path(place.relative_path).name != str(place.relative_path) or place.transform_descriptors:
            raise ValueError(f"it points at {place.relative_path}, which is none of its files")


class SafeReader(dcp.FileSystemReader):
    """Reads a sharded checkpoint as `read_metadata` does; torch itself reads the tensors as tensors alone."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(self.path)
        assert metadata.storage_meta
        metadata.storage_meta.load_id = self.load_id
        return metadata

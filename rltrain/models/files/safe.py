"""Safe reading of files from unknown sources: tensors only, never code.

A pickle can call any function when it is loaded. torch restricts its unpickler for tensors, but not for the
``.metadata`` of a sharded checkpoint or for entries that are not tensors. Therefore ``.metadata`` is read here, by an
unpickler that allows only the classes of tensor metadata.
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

from rltrain.common.errors import CheckpointError, StorageError
from rltrain.common.storage import patiently

METADATA = ".metadata"
# Errors that torch and safetensors raise for files that are damaged or contain anything but tensors. They run no code
# from such files.
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
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is not allowed in tensor metadata")
        return super().find_class(module, name)


def read_metadata(folder: str | os.PathLike[str]) -> Metadata:
    """Read the metadata of a sharded checkpoint, without running code. Raises CheckpointError if the file contains
    anything else."""
    file = Path(folder) / METADATA
    try:
        metadata = _Unpickler(io.BytesIO(patiently(file, file.read_bytes))).load()
        _check(metadata)
    except (StorageError, MemoryError):
        raise
    # Damaged bytes can make the unpickler raise almost any error.
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read ({error}). Use only your own files.") from error
    metadata.storage_meta = metadata.storage_meta or StorageMeta()
    return metadata


def _check(metadata: Any) -> None:
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise ValueError("it does not contain tensors")
    for name, described in metadata.state_dict_metadata.items():
        # Reject other entries, because torch would unpickle them.
        if not isinstance(described, TensorStorageMetadata):
            raise ValueError(f"{name} is no tensor")
    for place in metadata.storage_data.values():
        if Path(place.relative_path).name != str(place.relative_path) or place.transform_descriptors:
            raise ValueError(f"it refers to {place.relative_path}, which is not a file of the archive")


class SafeReader(dcp.FileSystemReader):
    """Reader of sharded checkpoints with `read_metadata`. torch reads the tensors with its restricted unpickler."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(self.path)
        assert metadata.storage_meta
        metadata.storage_meta.load_id = self.load_id
        return metadata

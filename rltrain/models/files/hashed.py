"""Files whose digests are computed during writing, so that a save need not read them back.

Writing and hashing release the GIL, so a save in the background does not block a step. For the same reason safetensors
does not write the weights: it holds the GIL until the file is complete.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

import torch
import xxhash
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import WriteItem
from torch.serialization import set_crc32_options

from rltrain.common.errors import write_error

Digests = dict[str, str]  # path of a file -> XXH3 (128 bits) of its contents, in hexadecimal
_BUFFER = 1 << 20
# Each piece is synced and dropped from the page cache. A whole checkpoint in the cache would take memory from the step,
# and would be written in bursts that slow down concurrent computation.
_PIECE = 32 << 20
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


class HashedFile(io.IOBase):
    """New file that is written sequentially. After `end`, it is on disk and has a digest."""

    def __init__(self, path: Path) -> None:
        self._file, self._digest, self._size = open(path, "wb"), xxhash.xxh3_128(), 0  # noqa: SIM115
        self._few, self._synced = bytearray(), 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        # torch writes a tensor in forty pieces, most of them a few bytes. Writing each separately would hold the GIL
        # for longer than all other work on the tensor.
        if len(self._few) + len(view) <= _BUFFER:
            self._few += view
            return len(view)
        try:
            for start in range(0, len(view), _PIECE):
                self._put(view[start : start + _PIECE])
        except OSError as error:
            # Keep this error, which reports the full disk, because torch replaces it by another one.
            self.error = self.error or error
            raise
        return len(view)

    def tell(self) -> int:
        return self._size + len(self._few)

    def end(self) -> str:
        """Sync the file to disk and close it. Returns the digest."""
        self._put(b"")
        self._sync()
        self._file.close()
        return self._digest.hexdigest()

    def _put(self, piece: Any) -> None:
        """Write ``piece`` after the buffered bytes. One call writes both, because each call releases the GIL."""
        parts, self._few = (self._few, piece), bytearray()
        written = os.writev(self._file.fileno(), parts)
        for part in parts:
            self._digest.update(part)
            self._file.write(memoryview(part)[written:])  # the rest of a partial write
            self._size, written = self._size + len(part), max(written - len(part), 0)
        if self._size - self._synced >= _PIECE:
            self._sync()

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._synced = self._size

    def drop(self) -> None:
        """Close the file, if it is open, and ignore errors of unwritten data."""
        with suppress(OSError):
            self._file.close()


class HashedFolder(FileSystem):
    """Folder of a DCP checkpoint during writing. digests: digests of the files written so far."""

    def __init__(self) -> None:
        self.digests: Digests = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with hashed(Path(path), self.digests) as file:
            yield file

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.digests[str(new_path)] = self.digests.pop(str(path))


class Planner(DefaultSavePlanner):
    """DCP planner that copies one tensor at a time to host memory.

    DCP itself would copy all tensors that are on a device or part of a larger block, and keep the copies until the file
    is written.
    """

    def __init__(self) -> None:
        super().__init__()
        self._copied = torch.empty(0)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Return the next object to write. The previous copy is freed, because DCP writes sequentially
        (`HashingWriter`)."""
        payload = super().transform_object(write_item, object)
        if not isinstance(payload, torch.Tensor) or payload.is_cpu:
            return alone(payload) if isinstance(payload, torch.Tensor) else payload
        self.drop()
        self._copied = payload.cpu()
        return self._copied

    def drop(self) -> None:
        """Free the memory of the last copy. It has been written by now; DCP raises an error if a write fails."""
        self._copied.untyped_storage().resize_(0)


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the same memory, but with a storage that is not larger than the tensor."""
    if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    if not tensor.nbytes:  # numpy cannot represent the strides of an empty tensor
        return torch.empty_like(tensor)
    data = torch.from_numpy(tensor.detach().view(-1).view(torch.uint8).numpy())
    return data.view(tensor.dtype).view(tensor.shape)


class HashingWriter(FileSystemWriter):
    """DCP writer of the shards in ``folder``."""

    def __init__(self, folder: str) -> None:
        # With a single thread and no copy-ahead, DCP requests a tensor from the planner only after the previous one is
        # written. It need not sync files, because `HashedFile` does.
        super().__init__(folder, thread_count=1, sync_files=False, per_thread_copy_ahead=0)
        self.fs: HashedFolder = HashedFolder()
        # torch's CRC32 is disabled in the whole process: this second checksum is unused and takes a quarter of the
        # work.
        set_crc32_options(False)


@contextmanager
def hashed(path: Path, digests: Digests) -> Iterator[IO[bytes]]:
    """Yield a new file whose digest is added to ``digests``. Raises the errors of `write_error`."""
    file: HashedFile | None = None
    try:
        file = HashedFile(path)
        yield cast(IO[bytes], file)
        digests[str(path)] = file.end()
    except (OSError, RuntimeError) as error:
        cause = (file and file.error) or error
        if not isinstance(cause, OSError):
            raise
        raise write_error(f"{path} could not be written: {cause.strerror or cause}", cause) from error
    finally:
        if file:
            file.drop()


def write_weights(
    weights: Mapping[str, torch.Tensor],
    path: Path,
    digests: Digests,
    pieces: Callable[[str], Iterable[torch.Tensor]] | None = None,
) -> None:
    """Write a safetensors file of tensors in host memory. Raises DiskError.

    pieces(name): yields the rows of a weight in parts; ``weights`` may then be on the meta device.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    # Tensors with the widest elements come first, so that each tensor is aligned to its element size.
    order, end = sorted(weights, key=lambda name: (-weights[name].element_size(), name)), 0
    for name in order:
        start, end, tensor = end, end + weights[name].nbytes, weights[name]
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with hashed(path, digests) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            if weights[name].nbytes:
                for piece in pieces(name) if pieces else [weights[name]]:
                    file.write(piece.contiguous().view(-1).view(torch.uint8).numpy().data)

"""Error for a device that is out of memory: the phase, the memory by owner, and keys that reduce it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from rltrain.common.errors import WorkerLost
from rltrain.workers.state.offload_manager import OffloadManager


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if ``error`` reports an out-of-memory device; not every back end has a type for it."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )


def device_is_full(error: Exception, changes: Iterable[tuple[str, str]], offloader: OffloadManager) -> WorkerLost:
    """Return the error that ends the run, for the current phase of ``offloader``. changes: see `memory_keys`."""
    device, phase = offloader.device, offloader.phase
    resting = offloader.resident_bytes()
    allocated = device.allocated_bytes()
    parts = [f"{name} {_gib(size)}" for name, size in resting.items() if size]
    rest = ", ".join([*parts, f"{_gib(allocated - resting.total())} of engine, activations and gathered weights"])
    keys = "\n  ".join(change for _, change in changes) or "more devices"
    where, size = f"rank {dist.get_rank()}, {phase}", _gib(device.total_memory_bytes())
    text = str(error).strip().splitlines()[0]
    return WorkerLost(
        f"{where}: the device ({size}) is out of memory. There were {rest}. ({text})\nMake room with one of\n  "
        f"{keys}\n--dry-run shows the memory of every phase."
    )


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB"

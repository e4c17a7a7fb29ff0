"""Devices: the only module with code that is specific to NPU, CUDA or CPU.

All other modules get a `Device` here and use its methods. The NPU branch follows the signatures of torch_npu's wheels
and has not been run on Ascend hardware; the CUDA branch has not been run either.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from rltrain.common.chips import Chip, find_chip
from rltrain.common.env import chosen_threads, cpu_quota
from rltrain.common.errors import ConfigError

# Timeout of collectives. The driver's deadlines are shorter and have better messages.
COLLECTIVE_TIMEOUT = timedelta(days=7)


@dataclass(frozen=True)
class Device:
    """One kind of device: an entry of `DEVICES`.

    A worker process sees exactly one device (Ray sets the visible devices).
    """

    kind: str
    backend: str
    """Backend of the process group, with gloo for CPU tensors."""
    ray_resource: str
    attention: str
    """Kernel for packed sequences (`models.attention`)."""
    logits_elements: int = 2**26
    sampling_elements: int = 2**26
    """Logits per chunk in training and in sampling. Accelerators need large chunks (2^26 take 256 MiB; a pass holds
    about three such tensors), because launches are expensive, and each chunk reads and writes the gradient of the head.
    On a CPU, a chunk should fit into the caches.
    """
    cache_columns: int = 512
    """Columns per block of the embedded engine's KV cache. A CPU uses small blocks, because reading masked columns is
    slow there."""
    searches: bool = True
    """True if the device has a kernel for searchsorted (torch_npu runs it on the host)."""
    fused_optimizer: bool = False
    """True if the device has a fused AdamW kernel."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, 0)

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    @property
    def count(self) -> int:
        """Number of devices of this kind that torch sees on this machine: 0 without support in torch, 1 for a CPU."""
        if self.is_cpu:
            return 1
        # Without torch_npu, torch has no module npu.
        return int(self._module().device_count()) if self.kind == "cuda" or _npu_available() else 0

    @property
    def compute_dtype(self) -> torch.dtype:
        """dtype for ``dtype=auto``: bf16 on accelerators, fp32 on CPU."""
        return torch.float32 if self.is_cpu else torch.bfloat16

    def _module(self) -> Any:
        return torch.get_device_module(self.kind)

    def activate(self) -> None:
        """Make the device current for this thread."""
        if not self.is_cpu:
            self._module().set_device(0)

    def synchronize(self) -> None:
        """Wait for queued kernels, so that a time measured afterwards is correct."""
        if not self.is_cpu:
            self._module().synchronize()

    def new_stream(self) -> Any:
        """Return a stream that runs next to the kernels' stream (accelerators only)."""
        return self._module().Stream()

    def current_stream(self) -> Any:
        """Return the current stream of this thread (accelerators only)."""
        return self._module().current_stream()

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which work goes to ``stream`` (accelerators only)."""
        manager: AbstractContextManager[Any] = self._module().stream(stream)
        return manager

    def empty_cache(self) -> None:
        """Release cached blocks, so that another allocator can use them."""
        if not self.is_cpu:
            self._module().empty_cache()

    def grow_segments(self) -> None:
        """Enable expandable segments from now on. It is called for NPUs after vLLM has started, because vllm-ascend
        rejects expandable segments earlier. On other devices the environment enables them (`rltrain.common.env`). Not
        run on hardware.
        """
        change = getattr(self._module().memory, "_set_allocator_settings", None) if self.kind == "npu" else None
        if change:
            change("expandable_segments:True")

    def free_memory_bytes(self) -> int:
        """Return the free memory of the device, or the available memory of the operating system."""
        if self.is_cpu:
            return _machine_memory()["MemAvailable"]
        # Release torch's cached blocks first, because the device counts them as used.
        self.empty_cache()
        return int(self._module().mem_get_info()[0])

    def allocated_bytes(self) -> int:
        """Return the bytes of this process's tensors; 0 on a CPU, where they are not counted."""
        return 0 if self.is_cpu else int(self._module().memory_allocated())

    def total_memory_bytes(self) -> int:
        """Return the total memory of the device, or of the machine."""
        return _machine_memory()["MemTotal"] if self.is_cpu else int(self._module().mem_get_info()[1])

    @cached_property
    def logits_at_once(self) -> int:
        """`logits_elements` for the memory size of this device."""
        return self.logits_elements if self.is_cpu else self.sized_for(self.total_memory_bytes()).logits_elements

    def sized_for(self, memory: int | None) -> Device:
        """Scale ``logits_elements`` to this memory size: on accelerators by 2 from 30 GB and by 4 from 75 GB."""
        size = 0 if self.is_cpu or memory is None else memory
        return replace(self, logits_elements=self.logits_elements * (1 + (size >= 30e9) + 2 * (size >= 75e9)))

    def host_memory_gb(self) -> dict[str, float]:
        """Return ``perf/cpu_memory_*`` in GiB: the peak of this process, and the current use of the machine."""
        # On Linux, ru_maxrss is in KiB.
        memory = {"perf/cpu_memory_peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
        machine = _machine_memory()
        return memory | {"perf/cpu_memory_used_gb": (machine["MemTotal"] - machine["MemAvailable"]) / 2**30}

    def take_peaks(self) -> tuple[int, int]:
        """Return the peak bytes of this process's tensors and of its allocator since the last call. Not on a CPU."""
        module = self._module()
        peaks = int(module.max_memory_allocated()), int(module.max_memory_reserved())
        module.reset_peak_memory_stats()
        return peaks

    def bytes_of_others(self) -> int:
        """Return the device memory used by others, such as an engine's process or the driver. Not on a CPU."""
        free, total = self._module().mem_get_info()
        return int(total - free - self._module().memory_reserved())

    def profiler(self, name: Path) -> Any:
        """Return a profiler that has not started, with start, stop, and torch's export_chrome_trace and events.

        torch_npu's profiler instead writes a folder ``name`` when it stops, with trace and tables.
        """
        if self.kind != "npu":
            activities = [torch.profiler.ProfilerActivity.CPU]
            activities += [] if self.is_cpu else [torch.profiler.ProfilerActivity.CUDA]
            return torch.profiler.profile(activities=activities, profile_memory=self.is_cpu)
        import torch_npu

        profiler = torch_npu.profiler
        activities = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU]
        handler = profiler.tensorboard_trace_handler(str(name))
        return profiler.profile(activities=activities, on_trace_ready=handler)

    def record_memory_history(self, on: bool) -> None:
        """Start or stop recording of allocations; nothing on a CPU."""
        if not self.is_cpu:
            self._module().memory._record_memory_history("all" if on else None)

    def dump_memory(self, file: str) -> bool:
        """Write the recording, for pytorch.org/memory_viz. Returns False on a CPU, which has none."""
        if not self.is_cpu:
            self._module().memory._dump_snapshot(file)
        return not self.is_cpu

    @property
    def name(self) -> str:
        """Device name in torch: "NVIDIA H200", "Ascend910B3", "CPU"."""
        return "CPU" if self.is_cpu else str(self._module().get_device_name(0))

    def chip(self) -> Chip | None:
        """Return the peak numbers of this device, or None if unknown (always on CPU)."""
        return find_chip(self.name)


DEVICES = {
    "cpu": Device("cpu", "gloo", "CPU", "products", logits_elements=2**24, sampling_elements=2**21, cache_columns=64),
    "cuda": Device("cuda", "cpu:gloo,cuda:nccl", "GPU", "flash", fused_optimizer=True),
    "npu": Device("npu", "cpu:gloo,npu:hccl", "NPU", "npu", searches=False),
}


def device_of(tensor: torch.Tensor) -> Device:
    """Return the device that holds a tensor."""
    return DEVICES[tensor.device.type]


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``tensor`` on ``device``, without a copy if it is already there.

    A copy to an accelerator is queued after its kernels, and the host does not wait for it. A copy from pageable memory
    would wait, so the tensor goes through pinned memory, which torch keeps until the copy is done.
    """
    if device.type == "cpu" or not tensor.is_cpu:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _machine_memory() -> dict[str, int]:
    """Return bytes under Linux's names, for the whole machine, ignoring the memory limit of a container."""
    with open("/proc/meminfo", encoding="utf-8") as file:
        fields = dict(line.split(":") for line in file)
    return {name: int(fields[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable")}


@cache
def detect() -> str:
    """Return the kind of accelerator in this process: npu, cuda or cpu."""
    if _npu_available():
        return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def _npu_available() -> bool:
    # Importing torch_npu without CANN fails in several ways: ImportError, OSError or RuntimeError.
    try:
        import torch_npu  # noqa: F401
    except (ImportError, OSError, RuntimeError):
        return False
    return bool(torch.get_device_module("npu").is_available())


def load_backend(backend: str) -> None:
    """Import the package of the process group's backend. Torch does so unless TORCH_DEVICE_BACKEND_AUTOLOAD=0."""
    if "hccl" in backend:
        import torch_npu  # noqa: F401


def torch_npu() -> Any:
    """Import and return torch_npu, for its fused operators."""
    import torch_npu

    return torch_npu


def get_device(name: str) -> Device:
    """Return the device for ``trainer.device``: auto, cpu, cuda or npu."""
    kind = detect() if name == "auto" else name
    if kind not in DEVICES:
        raise ConfigError(f"trainer.device={name} is not a supported device. Use auto, npu, cuda or cpu.")
    return DEVICES[kind]


def resolve_dtype(name: str, device: Device) -> torch.dtype:
    """Return the dtype for a config value: auto, float32/fp32, bfloat16/bf16 or float16/fp16."""
    short = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    names = {name: name for name in short.values()} | short
    if name == "auto":
        return device.compute_dtype
    if name not in names:
        raise ConfigError(f"'{name}' is not a dtype. Use auto, {', '.join(names)}.")
    return getattr(torch, names[name])


def threads_per_worker(workers_on_this_node: int) -> int:
    """Return the CPU threads of a worker: OMP_NUM_THREADS if set, else its share of this process's cores.

    Oversubscribed OpenMP threads spin and are ten times slower.
    """
    return chosen_threads() or max(1, int(min(len(os.sched_getaffinity(0)), cpu_quota()) / workers_on_this_node))


def host_memory(tensors: Sequence[torch.Tensor], locked: bool = True) -> list[torch.Tensor]:
    """Allocate host tensors of these shapes; ``locked``: pinned, for copies from and to a device."""
    sizes = [-(-tensor.nbytes // 64) * 64 for tensor in tensors]
    left, block, host_tensors = sum(sizes), torch.empty(0, dtype=torch.uint8), []
    for tensor, size in zip(tensors, sizes, strict=True):
        if size > len(block):
            # Tensors share blocks of 2^k bytes. Otherwise torch would round up the size of each tensor to a power of
            # two.
            exponent = max(left.bit_length() - 1, (size - 1).bit_length())
            block = torch.empty(1 << exponent, dtype=torch.uint8, pin_memory=locked)
        host_tensors.append(block[: tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        block, left = block[size:], left - size
    return host_tensors

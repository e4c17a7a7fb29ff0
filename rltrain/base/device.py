"""The one file that knows NPU, CUDA and CPU.

Everything else asks this module for a `Device` and uses its methods. The NPU branch is written against the signatures
of torch_npu's real wheels and has not been run on Ascend hardware; the CUDA branch has not been run either.
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

from rltrain.base.chips import Chip, find_chip
from rltrain.base.env import chosen_threads, cpu_quota
from rltrain.base.errors import ConfigError

# How long a rank waits for others. The driver has deadlines of its own, which come first and say more.
COLLECTIVE_TIMEOUT = timedelta(days=7)


@dataclass(frozen=True)
class Device:
    """One kind of device: a row of `DEVICES`.

    A worker process sees exactly one of it (Ray sets the visible devices).
    """

    kind: str
    backend: str
    """Of the process group, with gloo beside it for CPU tensors."""
    ray_resource: str
    attention: str
    """The kernel for packed sequences (`models.attention`)."""
    logits_elements: int = 2**26
    sampling_elements: int = 2**26
    """Both: logits that training and sampling work on at a time. Accelerators want many (2^26 are 256 MiB; a pass holds
    about three such tensors): a launch costs, and the gradient of the head is read and written once per chunk. A CPU
    wants what its caches hold."""
    cache_columns: int = 512
    """Columns per block of the embedded engine's key-value cache; few on a CPU, where reading masked columns costs."""
    searches: bool = True
    """It finds places in sorted rows by a kernel of its own (on an NPU torch_npu leaves that to its host processor)."""
    fused_optimizer: bool = False
    """AdamW has a kernel of its own."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, 0)

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    @property
    def count(self) -> int:
        """How many devices of this kind torch sees on this machine: 0 where it was built without them, 1 for a CPU."""
        if self.is_cpu:
            return 1
        # Without torch_npu, torch has no module named npu that could be asked.
        return int(self._module().device_count()) if self.kind == "cuda" or _npu_available() else 0

    @property
    def compute_dtype(self) -> torch.dtype:
        """What ``dtype=auto`` means here: bf16 on accelerators, fp32 on CPU."""
        return torch.float32 if self.is_cpu else torch.bfloat16

    def _module(self) -> Any:
        return torch.get_device_module(self.kind)

    def activate(self) -> None:
        """Make the device current for this thread."""
        if not self.is_cpu:
            self._module().set_device(0)

    def synchronize(self) -> None:
        """Wait for queued kernels, so that a clock read afterwards is true."""
        if not self.is_cpu:
            self._module().synchronize()

    def new_stream(self) -> Any:
        """A queue of work beside that of the kernels (accelerators alone)."""
        return self._module().Stream()

    def current_stream(self) -> Any:
        """The queue that work of this thread goes to (accelerators alone)."""
        return self._module().current_stream()

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Work goes to ``stream`` (accelerators alone)."""
        manager: AbstractContextManager[Any] = self._module().stream(stream)
        return manager

    def empty_cache(self) -> None:
        """Hand cached blocks back, so that another allocator can have them."""
        if not self.is_cpu:
            self._module().empty_cache()

    def grow_segments(self) -> None:
        """Let cached memory grow in place from now on (expandable segments). For an NPU on which vLLM is up: before,
        vllm-ascend refuses it, and elsewhere the environment has said so (`rltrain.base.env`). Not run on hardware.
        """
        change = getattr(self._module().memory, "_set_allocator_settings", None) if self.kind == "npu" else None
        if change:
            change("expandable_segments:True")

    def free_memory_bytes(self) -> int:
        """Memory that is free now: of the device, or what the operating system says programs can still have."""
        if self.is_cpu:
            return _machine_memory()["MemAvailable"]
        # The device counts blocks that torch only caches as used.
        self.empty_cache()
        return int(self._module().mem_get_info()[0])

    def allocated_bytes(self) -> int:
        """What tensors of this process have now; 0 on a CPU, where nobody counts."""
        return 0 if self.is_cpu else int(self._module().memory_allocated())

    def total_memory_bytes(self) -> int:
        """Memory of the device, or of the machine."""
        return _machine_memory()["MemTotal"] if self.is_cpu else int(self._module().mem_get_info()[1])

    @cached_property
    def logits_at_once(self) -> int:
        """`logits_elements` of a device of this size."""
        return self.logits_elements if self.is_cpu else self.sized_for(self.total_memory_bytes()).logits_elements

    def sized_for(self, memory: int | None) -> Device:
        """With ``logits_elements`` for so many bytes: on accelerators two and four times as many from 30 and 75 GB."""
        size = 0 if self.is_cpu or memory is None else memory
        return replace(self, logits_elements=self.logits_elements * (1 + (size >= 30e9) + 2 * (size >= 75e9)))

    def host_memory_gb(self) -> dict[str, float]:
        """``perf/cpu_memory_*`` in GiB: the peak of this process since it started, and what the machine uses now."""
        # Linux gives ru_maxrss in KiB.
        memory = {"perf/cpu_memory_peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
        machine = _machine_memory()
        return memory | {"perf/cpu_memory_used_gb": (machine["MemTotal"] - machine["MemAvailable"]) / 2**30}

    def take_peaks(self) -> tuple[int, int]:
        """Bytes that tensors of this process took, and that its allocator held, at most since the last call. Not on a
        CPU.
        """
        module = self._module()
        peaks = int(module.max_memory_allocated()), int(module.max_memory_reserved())
        module.reset_peak_memory_stats()
        return peaks

    def bytes_of_others(self) -> int:
        """What others have of the device: an engine's process, the driver. Not on a CPU."""
        free, total = self._module().mem_get_info()
        return int(total - free - self._module().memory_reserved())

    def profiler(self, name: Path) -> Any:
        """A profiler that has not begun: start, stop, and torch's then export_chrome_trace and events. torch_npu's
        writes a folder ``name`` when it stops, with trace and tables of its own."""
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
        """Begin or end to note who allocates what; nothing on a CPU."""
        if not self.is_cpu:
            self._module().memory._record_memory_history("all" if on else None)

    def dump_memory(self, file: str) -> bool:
        """Write what was noted, for pytorch.org/memory_viz; False on a CPU, which has nothing to note."""
        if not self.is_cpu:
            self._module().memory._dump_snapshot(file)
        return not self.is_cpu

    @property
    def name(self) -> str:
        """What torch calls this device: "NVIDIA H200", "Ascend910B3", "CPU"."""
        return "CPU" if self.is_cpu else str(self._module().get_device_name(0))

    def chip(self) -> Chip | None:
        """What this device reaches at most, or None when unknown (always on CPU)."""
        return find_chip(self.name)


DEVICES = {
    "cpu": Device("cpu", "gloo", "CPU", "products", logits_elements=2**24, sampling_elements=2**21, cache_columns=64),
    "cuda": Device("cuda", "cpu:gloo,cuda:nccl", "GPU", "flash", fused_optimizer=True),
    "npu": Device("npu", "cpu:gloo,npu:hccl", "NPU", "npu", searches=False),
}


def device_of(tensor: torch.Tensor) -> Device:
    """The device that holds a tensor."""
    return DEVICES[tensor.device.type]


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` on ``device``, at once where it is there already.

    To an accelerator the host goes on while the copy waits its turn behind the queued kernels. A copy from ordinary
    memory would make it wait, so the tensor goes through page-locked memory, which torch keeps until the copy is done.
    """
    if device.type == "cpu" or not tensor.is_cpu:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _machine_memory() -> dict[str, int]:
    """Bytes under Linux's names. They are the machine's: the memory limit of a container is not looked at."""
    with open("/proc/meminfo", encoding="utf-8") as file:
        fields = dict(line.split(":") for line in file)
    return {name: int(fields[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable")}


@cache
def detect() -> str:
    """The kind of accelerator in this process: npu, cuda or cpu."""
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
    """Import what brings the process group's backend. Torch does so unless TORCH_DEVICE_BACKEND_AUTOLOAD=0."""
    if "hccl" in backend:
        import torch_npu  # noqa: F401


def torch_npu() -> Any:
    """The package, for its fused operators."""
    import torch_npu

    return torch_npu


def get_device(name: str) -> Device:
    """``trainer.device``: auto, cpu, cuda or npu."""
    kind = detect() if name == "auto" else name
    if kind not in DEVICES:
        raise ConfigError(f"trainer.device={name} is not a device rltrain knows. Use auto, npu, cuda or cpu.")
    return DEVICES[kind]


def resolve_dtype(name: str, device: Device) -> torch.dtype:
    """A dtype key: auto, float32/fp32, bfloat16/bf16 or float16/fp16."""
    short = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    names = {name: name for name in short.values()} | short
    if name == "auto":
        return device.compute_dtype
    if name not in names:
        raise ConfigError(f"'{name}' is not a dtype. Use auto, {', '.join(names)}.")
    return getattr(torch, names[name])


def threads_per_worker(workers_on_this_node: int) -> int:
    """CPU threads of one worker: OMP_NUM_THREADS if the user has set it, else its share of the cores of this process.

    Oversubscribed OpenMP threads spin and cost a factor of ten.
    """
    return chosen_threads() or max(1, int(min(len(os.sched_getaffinity(0)), cpu_quota()) / workers_on_this_node))


def host_memory(tensors: Sequence[torch.Tensor], locked: bool = True) -> list[torch.Tensor]:
    """Host tensors of these shapes; ``locked``: page-locked, as copies from and to a device want it."""
    sizes = [-(-tensor.nbytes // 64) * 64 for tensor in tensors]
    left, block, host_tensors = sum(sizes), torch.empty(0, dtype=torch.uint8), []
    for tensor, size in zip(tensors, sizes, strict=True):
        if size > len(block):
            # Blocks of 2^k bytes, to which torch would round up each tensor.
            exponent = max(left.bit_length() - 1, (size - 1).bit_length())
            block = torch.empty(1 << exponent, dtype=torch.uint8, pin_memory=locked)
        host_tensors.append(block[: tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        block, left = block[size:], left - size
    return host_tensors

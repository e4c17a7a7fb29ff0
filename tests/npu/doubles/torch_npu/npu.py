"""``torch.npu`` of the stand-in: torch_npu's names over the counting device of ``tests/npu/device.cpp``."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_spec = importlib.util.spec_from_file_location("_standin_build", Path(__file__).parents[2] / "build.py")
assert _spec is not None
assert _spec.loader is not None
_build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_build)
standin = _build.load()

Stream, Event, OutOfMemoryError = torch.Stream, torch.Event, torch.OutOfMemoryError
_NAME = "Ascend910B3"
# c10::DeviceType::PrivateUse1
_DEVICE_TYPE = 20


def _index(device: Any = None) -> int:
    if device is None:
        return standin.current_device()
    index = device if isinstance(device, int) else torch.device(device).index
    index = standin.current_device() if index is None else index
    if not 0 <= index < device_count():
        raise RuntimeError(f"invalid device ordinal: NPU {index} of {device_count()}")
    return index


def is_available() -> bool:
    return device_count() > 0


def device_count() -> int:
    return standin.count()


def current_device() -> int:
    return standin.current_device()


def set_device(device: Any) -> None:
    standin.exchange_device(_index(device))


def synchronize(device: Any = None) -> None:
    standin.host_waits("synchronize device")


def empty_cache() -> None:
    standin.empty_cache(current_device())


def memory_allocated(device: Any = None) -> int:
    return standin.allocated(_index(device))


def max_memory_allocated(device: Any = None) -> int:
    return standin.peak(_index(device))


def memory_reserved(device: Any = None) -> int:
    return standin.reserved(_index(device))


def max_memory_reserved(device: Any = None) -> int:
    return standin.reserved_peak(_index(device))


def reset_peak_memory_stats(device: Any = None) -> None:
    standin.reset_peak(_index(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    index = _index(device)
    return standin.cap(index) - standin.reserved(index), standin.cap(index)


def get_device_name(device: Any = None) -> str:
    return _NAME


def manual_seed(seed: int) -> None:
    standin.default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        standin.default_generator(index).manual_seed(seed)


def get_rng_state(device: Any = "npu") -> torch.Tensor:
    return standin.default_generator(_index(device)).get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "npu") -> None:
    standin.default_generator(_index(device)).set_state(new_state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_initialized() -> bool:
    return True


def init() -> None:
    pass


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return False


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    before = current_stream()
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


StreamContext = stream


class device:
    """Context manager that selects the device of this thread."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = standin.exchange_device(self._index)

    def __exit__(self, *exception: Any) -> None:
        standin.exchange_device(self._before)


def _install() -> None:
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    there = int(os.environ["RLTRAIN_STANDIN_NPUS"])
    standin.set_count(there if visible is None else len([word for word in visible.split(",") if word.strip()]))
    for index in range(device_count()):
        if cap := os.environ.get("RLTRAIN_STANDIN_BYTES"):
            standin.set_cap(index, int(cap))
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend("hccl", _hccl, devices=["npu"])


def _hccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return standin.hccl(dist.ProcessGroupGloo(store, rank, size, timeout))


_install()

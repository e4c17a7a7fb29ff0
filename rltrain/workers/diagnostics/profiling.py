"""Profile of a phase by torch's profiler (torch_npu's on NPUs): trace, table of kernels and gaps, memory snapshot.

Traces open in Perfetto (ui.perfetto.dev) and chrome://tracing. Other phases run without the profiler's overhead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltrain.common.device import Device
from rltrain.common.storage import disk_errors
from rltrain.workers.interface.roles import Profiled

# Number of rows in a table, longest kernels first.
_SHOWN = 25
# CPU events that compute or communicate; all other events are labels around them.
_OPERATORS = ("aten::", "c10d::", "gloo:")


class Profiler(Profiled):
    """Profiler of this process, for one phase at a time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._running: Any = None
        self._name = Path()

    def begin_profile(self, name: str) -> None:
        """See `Profiled`."""
        self._name = Path(name)
        with disk_errors(self._name.parent):
            self._name.parent.mkdir(parents=True, exist_ok=True)
        self._device.synchronize()
        self._device.record_memory_history(True)
        self._running = self._device.profiler(self._name)
        self._running.start()

    def end_profile(self) -> list[str]:
        """See `Profiled`."""
        if self._running is None:
            return []
        self._device.synchronize()
        running, self._running = self._running, None
        running.stop()
        name = str(self._name)
        with disk_errors(self._name.parent):
            written = [f"{name}.memory.pickle"] if self._device.dump_memory(f"{name}.memory.pickle") else []
            self._device.record_memory_history(False)
            if not hasattr(running, "events"):  # torch_npu writes trace and tables when it stops
                return [name, *written]
            running.export_chrome_trace(f"{name}.json.gz")
            rows = kernels_of(running.events(), on_device=not self._device.is_cpu)
            Path(f"{name}.md").write_text(table(rows), encoding="utf-8")
        return [f"{name}.json.gz", f"{name}.md", *written]


@dataclass(frozen=True)
class Kernel:
    """Execution of a kernel. Times are in microseconds."""

    name: str
    begin: float
    end: float
    own: float
    """Time without nested kernels."""


def kernels_of(events: Iterable[Any], *, on_device: bool) -> list[Kernel]:
    """Return the kernels of a profile by start time: device kernels, or on a CPU its operators. events:
    `torch.profiler.profile.events`."""
    from torch.autograd import DeviceType

    found = []
    for event in events:
        span = event.time_range
        if on_device and event.device_type != DeviceType.CPU:
            found.append(Kernel(event.name, span.start, span.end, span.end - span.start))
        elif not on_device and event.name.startswith(_OPERATORS):
            found.append(Kernel(event.name, span.start, span.end, event.self_cpu_time_total))
    return sorted(found, key=lambda kernel: kernel.begin)


def busy(kernels: Sequence[Kernel]) -> float:
    """Return the microseconds in which at least one of ``kernels`` ran. kernels: sorted by start time."""
    total, until = 0.0, float("-inf")
    for kernel in kernels:
        total += max(0.0, kernel.end - max(kernel.begin, until))
        until = max(until, kernel.end)
    return total


def table(kernels: Sequence[Kernel]) -> str:
    """Return Markdown: busy share from the first kernel to the last, top kernels by time, and the longest gaps."""
    if not kernels:
        return "No kernel ran.\n"
    whole = max(kernel.end for kernel in kernels) - kernels[0].begin
    lines = [f"{whole / 1e6:.4f} s from the first kernel to the last, of which {busy(kernels) / max(whole, 1e-9):.1%} "
             f"was busy; {len(kernels):,} kernels.", "", "| kernel | calls | seconds | share |",
             "|---|---|---|---|"]  # fmt: skip
    by_name: dict[str, list[float]] = {}
    for kernel in kernels:
        by_name.setdefault(kernel.name, []).append(kernel.own)
    ranked = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    for name, times in ranked[:_SHOWN]:
        shown = name.replace("|", "\\|")
        lines.append(f"| {shown} | {len(times):,} | {sum(times) / 1e6:.4f} | {sum(times) / max(whole, 1e-9):.1%} |")
    lines += ["", "| gap after | seconds | before |", "|---|---|---|"]
    for seconds, before, after in _gaps(kernels)[:_SHOWN]:
        lines.append(f"| {before} | {seconds / 1e6:.4f} | {after} |")
    return "\n".join(lines) + "\n"


def _gaps(kernels: Sequence[Kernel]) -> list[tuple[float, str, str]]:
    """Return (microseconds, kernel before, kernel after) of the gaps, longest first."""
    gaps, last = [], kernels[0]
    for kernel in kernels[1:]:
        if kernel.begin > last.end:
            gaps.append((kernel.begin - last.end, last.name, kernel.name))
        last = kernel if kernel.end > last.end else last
    return sorted(gaps, reverse=True)

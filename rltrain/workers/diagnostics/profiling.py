"""Profile of a phase by torch's profiler (torch_npu's on NPUs): trace, table of kernels and gaps, memory snapshot.

Traces open in Perfetto (ui.perfetto.dev) and chrome://tracing. Other phases run without the profiler's overhead.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

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


def kernels_of(events: Iterable[Any], *, on_device: bool) -> pd.DataFrame:
    """Return the kernels of a profile by start time: device kernels, or on a CPU its operators. events:
    `torch.profiler.profile.events`. Times are in microseconds; own: without nested kernels.
    """
    from torch.autograd import DeviceType

    found = [
        (event.name, event.time_range.start, event.time_range.end,
         event.time_range.elapsed_us() if on_device else event.self_cpu_time_total)
        for event in events
        if (event.device_type != DeviceType.CPU if on_device else event.name.startswith(_OPERATORS))
    ]  # fmt: skip
    return pd.DataFrame(found, columns=["name", "begin", "end", "own"]).sort_values("begin", kind="stable")


def table(kernels: pd.DataFrame) -> str:
    """Return Markdown: busy share from the first kernel to the last, top kernels by time, and the longest gaps."""
    if kernels.empty:
        return "No kernel ran.\n"
    latest = kernels["end"].cummax()
    whole = max(latest.iloc[-1] - kernels["begin"].iloc[0], 1e-9)
    # In a gap no kernel runs: all earlier ones have ended.
    gaps = pd.DataFrame({
        "before": kernels["name"].where(kernels["end"] == latest).ffill().shift(),
        "seconds": (kernels["begin"] - latest.shift()).clip(lower=0) / 1e6, "after": kernels["name"],
    })  # fmt: skip
    busy = 1 - gaps["seconds"].sum() * 1e6 / whole
    lines = [f"{whole / 1e6:.4f} s from the first kernel to the last, of which {busy:.1%} was busy; {len(kernels):,} "
             "kernels.", "", "| kernel | calls | seconds | share |", "|---|---|---|---|"]  # fmt: skip
    times = kernels.groupby("name")["own"].agg(["size", "sum"]).nlargest(_SHOWN, "sum")
    for name, calls, own in times.itertuples():
        shown = name.replace("|", "\\|")
        lines.append(f"| {shown} | {calls:,} | {own / 1e6:.4f} | {own / whole:.1%} |")
    lines += ["", "| gap after | seconds | before |", "|---|---|---|"]
    longest = gaps[gaps["seconds"] > 0].nlargest(_SHOWN, "seconds")
    lines += [f"| {before} | {seconds:.4f} | {after} |" for before, seconds, after in longest.itertuples(index=False)]
    return "\n".join(lines) + "\n"

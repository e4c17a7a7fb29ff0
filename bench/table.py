"""How a table of results is written: command, date, machine, what was measured, numbers."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def processor() -> str:
    """Name of the processor, and how many cores this process may use."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown processor")
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def write(file: str, command: str, what: str, titles: Sequence[str], rows: Sequence[str], notes: str = "") -> None:
    """Print the table and write it into bench/results (an absolute ``file``: there).

    The load says how quiet the machine was.
    """
    load = os.getloadavg()[1]
    lines = [
        f"`{command}`, {date.today()}, {processor()}, load average {load:.1f}, torch {version('torch')}",
        "",
        what,
        "",
        f"| {' | '.join(titles)} |",
        "|" + "---|" * len(titles),
        *rows,
        *(["", notes] if notes else []),
    ]
    text = "\n".join(lines) + "\n"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / file).write_text(text)
    sys.stdout.write(text)

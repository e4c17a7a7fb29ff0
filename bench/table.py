"""Arguments of a benchmark, and its table: command, date, machine, subject, numbers."""

from __future__ import annotations

import argparse
import atexit
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"


def parse(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None = None,
    *,
    out: str | Path | None = None,
    work: str | None = None,
    **smoke_sizes: Any,
) -> Any:
    """Parse the arguments of a benchmark and add `--smoke`, which replaces the options in ``smoke_sizes``.

    out: default of `--out`, the file of the table in bench/results. work: default of `--work`, the folder of models and
    runs. With `--smoke` both are in a temporary folder. The result also has ``command``, the command line.
    """
    parser.add_argument("--smoke", action="store_true", help="run at tiny sizes and write nothing: shows that it runs")
    if out:
        parser.add_argument("--out", type=Path, default=Path(out), help="file of the table, in bench/results")
    if work:
        parser.add_argument("--work", type=Path, default=Path(work), help="folder of models and runs")
    words = sys.argv[1:] if argv is None else list(argv)
    options = parser.parse_args(words)
    threads = f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']} " if "OMP_NUM_THREADS" in os.environ else ""
    options.command = f"{threads}{shlex.join(['python', '-m', f'bench.{Path(sys.argv[0]).stem}', *words])}"
    places = {"out": RESULTS / options.out} if out else {}
    places |= {"work": options.work.resolve()} if work else {}
    if options.smoke:
        folder = Path(tempfile.mkdtemp(prefix="bench_smoke_"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        places = {"out": folder / places["out"].name if out else None, "work": folder}
    vars(options).update((smoke_sizes if options.smoke else {}) | places)
    return options


def processor() -> str:
    """Return the name of the processor and the number of cores that this process may use."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown processor")
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def table(titles: Sequence[str], rows: Sequence[str]) -> str:
    """Return the rows, which are lines of Markdown, below their titles."""
    return "\n".join([f"| {' | '.join(titles)} |", "|" + "---|" * len(titles), *rows])


def write(options: Any, *parts: str) -> None:
    """Print a page and write it to ``options.out``: command and machine, then the parts with empty lines between them.

    The load average shows how busy the machine was.
    """
    load = os.getloadavg()[1]
    made = f"`{options.command}`, {date.today()}, {processor()}, load average {load:.1f}, torch {version('torch')}"
    text = "\n\n".join([made, *filter(None, parts)]) + "\n"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text)
    sys.stdout.write(text)


def finished_row(rows: list[str], row: str) -> None:
    """Add a row to the table and print it at once to stderr, because the next one may take minutes."""
    rows.append(row)
    sys.stderr.write(row + "\n")

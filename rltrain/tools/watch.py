"""``python -m rltrain.watch RUN``: watch a run in another process or machine, from its folder on shared storage.

A long run is often a job without a terminal. The watcher reads the run's files every few seconds, so that it can start
and stop at any time and cannot disturb the run. It cannot control the run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from rltrain.common.clock import SYSTEM, Clock
from rltrain.common.errors import ConfigError, command, sanitize
from rltrain.common.logs import console
from rltrain.common.storage import json_lines, lines_of, read_json, run_folder
from rltrain.run.report.console import seconds_left, shown, validation_lines
from rltrain.run.report.page import warnings_of
from rltrain.run.report.table import METRICS

_EVERY_S = 2.0
_BAR_WIDTH = 40


def view(run: Path) -> Group:
    """Return the terminal view of the run."""
    lines, plan = json_lines(run / METRICS), read_json(run / "plan.json") or {}
    steps = [line for line in lines if "timing_s/step" in line]
    made, total = int(steps[-1]["step"]) if steps else 0, int(plan.get("total_steps") or 0)
    parts: list[Any] = [Text(f"{run.resolve().name}: step {made}{f' of {total}' if total else ''}", style="bold")]
    if total:
        parts.append(ProgressBar(total=total, completed=made, width=_BAR_WIDTH))
    parts.append(Text(_progress(run, made, total, steps)))
    parts += [Text("  ".join(shown(steps[-1])))] if steps else []
    for line in lines[::-1]:
        if numbers := validation_lines(line):
            parts += [Text(f"validation {line['step']}  {name}  {'  '.join(of)}") for name, of in numbers.items()]
            break
    parts += [Text(f"{when}  {what}", style="yellow") for when, what, _ in warnings_of(run)[-3:]]
    return Group(*parts)


def _progress(run: Path, made: int, total: int, steps: list[dict[str, Any]]) -> str:
    if total and made >= total:
        return "all steps are done"
    if not total or not steps:
        return last_line(run)
    return f"{timedelta(seconds=round(seconds_left(steps, total - made)))} left"


def last_line(run: Path) -> str:
    """Return the newest line of train.log; before the first step it describes the current wait."""
    log = run / "train.log"
    return sanitize(next((line for line in lines_of(log)[::-1] if line.strip()), f"{log} is empty"))


def follow(run: Path, write: Callable[[str], Any], ended: Callable[[], bool], clock: Clock = SYSTEM) -> None:
    """Write the lines of train.log as they arrive, beginning with the last twenty, until ``ended``."""
    num_written = max(0, len(lines_of(run / "train.log")) - 20)
    if not (run / "train.log").exists():  # the job is still waiting, or this is another folder
        write(f"{last_line(run)}\n")
    while True:
        over = ended()
        lines = lines_of(run / "train.log", keepends=True)
        if lines and not over and not lines[-1].endswith("\n"):
            del lines[-1]  # an incomplete line: it is being written, or the disk is full
        for line in lines[num_written:]:
            write(f"{sanitize(line.rstrip())}\n")
        num_written = len(lines)
        if over:
            return
        clock.sleep(_EVERY_S)


def is_over(run: Path) -> bool:
    """Return True if all steps of the plan are done."""
    total = int((read_json(run / "plan.json") or {}).get("total_steps") or 0)
    made = (int(line["step"]) for line in json_lines(run / METRICS) if "timing_s/step" in line)
    return 0 < total <= max(made, default=0)


@command
def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="rltrain watch",
        description="Watch a run by its folder, from any machine that sees it: on a terminal its step, the "
        "newest numbers and warnings, the time left; elsewhere the lines of its train.log as they come. Ends with the "
        "run's last step.",
    )
    parser.add_argument("run", type=Path, help="run folder (trainer.default_local_dir)")
    for removed in ("--serve", "--host"):
        parser.add_argument(removed, nargs="?", const="", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.serve is not None or arguments.host is not None:
        raise ConfigError(
            f"--serve and --host were removed. `rltrain report {arguments.run} --html` writes the page of the run, "
            "also during the run."
        )
    run = run_folder(arguments.run)
    with suppress(KeyboardInterrupt):
        _watch(run, is_terminal=console.is_terminal)
    return 0


def _watch(run: Path, *, is_terminal: bool) -> None:
    if not is_terminal:
        follow(run, _write, partial(is_over, run))
        return
    with Live(view(run), console=console, refresh_per_second=2) as live:
        while not is_over(run):
            time.sleep(_EVERY_S)
            live.update(view(run))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

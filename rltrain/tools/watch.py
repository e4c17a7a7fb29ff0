"""``python -m rltrain.watch RUN``: watch a run in another process or machine, from its folder on shared storage.

A long run is often a job without a terminal. The watcher reads the run's files every few seconds, so that it can start
and stop at any time and cannot disturb the run. It cannot control the run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rltrain.common.clock import SYSTEM, Clock
from rltrain.common.errors import command, sanitize
from rltrain.common.storage import json_lines, lines_of, read_json, run_folder
from rltrain.run.report.table import METRICS

_EVERY_S = 2.0


def follow(run: Path, write: Callable[[str], Any], ended: Callable[[], bool], clock: Clock = SYSTEM) -> None:
    """Write the lines of train.log as they arrive, beginning with the last twenty, until ``ended``."""
    num_written = max(0, len(lines_of(run / "train.log")) - 20)
    if not (run / "train.log").exists():  # the job is still waiting, or this is another folder
        write(f"{run / 'train.log'} does not exist yet\n")
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
        description="Watch a run by its folder, from any machine that sees it: the lines of its train.log, "
        "with every step, warnings and the time left. Ends with the run's last step.",
    )
    parser.add_argument("run", type=Path, help="run folder (trainer.default_local_dir)")
    arguments = parser.parse_args(argv)
    run = run_folder(arguments.run)
    with suppress(KeyboardInterrupt):
        follow(run, _write, partial(is_over, run))
    return 0


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

"""``python -m rltrain.report RUN``: the phase table of a run, or its page of charts and responses."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rltrain.common.errors import command
from rltrain.run.report.table import show_report


@command
def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="rltrain report",
        description="Show a run by its metrics.jsonl: the seconds of each phase of a step, throughput, the training "
        "reward at the start and at the end, every validation before and after, and the exported model. On a terminal "
        "also each phase's share of the step and the slowest step; elsewhere in a fixed layout for scripts.",
    )
    parser.add_argument("run", type=Path, help="run folder (trainer.default_local_dir), or its metrics.jsonl")
    says = "write a page of charts and responses that opens offline (default: report.html in RUN)"
    parser.add_argument("--html", nargs="?", const="", metavar="FILE", help=says)
    arguments = parser.parse_args(argv)
    if arguments.html is None:
        show_report(arguments.run)
    else:
        from rltrain.run.report.page import write_page  # imports Bokeh

        sys.stdout.write(f"written: {write_page(arguments.run, Path(arguments.html) if arguments.html else None)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

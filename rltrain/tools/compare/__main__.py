"""``python -m rltrain.compare RUN RUN ...``: runs beside each other.

Curves over each other as a page, their differences over the steps in common, settings and environments that differ,
seconds of phases, and the distance of weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rltrain.base.errors import DataError, command
from rltrain.base.storage import replacing
from rltrain.tools.compare.differences import METRICS, check_steps, chosen_metrics
from rltrain.tools.compare.page import write
from rltrain.tools.compare.runs import grouped, read_runs
from rltrain.tools.compare.tables import Comparison


def compare(folders: Sequence[Path], out: Path, patterns: Sequence[str] = ()) -> str:
    """The tables; compare.json and compare.html are written into ``out``. patterns: see `chosen_metrics`.

    Raises DataError for a folder that is no run, for a metric that no run has and for runs without a step in common;
    DiskError where ``out`` cannot be written.
    """
    runs = read_runs(folders)
    groups = grouped(runs)
    check_steps(groups)
    metrics = chosen_metrics(runs, patterns)
    comparison = Comparison.of(groups, metrics)
    written = out / "compare.json", out / "compare.html"
    with replacing(written[0]) as temporary:
        text = json.dumps(comparison.as_json(), indent=1, default=str, allow_nan=False)
        temporary.write_text(text, encoding="utf-8")
    write(comparison, metrics, written[1])
    return f"{comparison.text()}\n\nwritten: {', '.join(map(str, written))}\n"


@command
def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m rltrain.compare",
        description="Compare runs with the first of them: curves, mean absolute and mean relative differences over the "
        "steps in common, settings and environments that differ, seconds of phases, and how far the weights of "
        "checkpoints are apart. A mean relative difference of the reward of at most 4 % passes the rule by which NPUs "
        "are held against GPUs. Runs that differ in nothing but seeds are one line with mean and spread.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder (trainer.default_local_dir)")
    parser.add_argument("--metrics", nargs="+", default=[], metavar="NAME",
                        help=f"metrics, with * for any text (default: {' '.join(METRICS)})")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("compare"), metavar="FOLDER",
                        help="where compare.json and compare.html are written (default: compare)")  # fmt: skip
    arguments = parser.parse_args(argv)
    if len(arguments.runs) < 2:
        raise DataError(f"{arguments.runs[0]} is one run. Give two or more; rltrain report shows one.")
    sys.stdout.write(compare(arguments.runs, arguments.out, arguments.metrics))
    return 0


if __name__ == "__main__":
    sys.exit(main())

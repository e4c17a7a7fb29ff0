"""``python -m rltrain.report RUN``: the phase table of a run, from its metrics.jsonl."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.table import Table

from rltrain.errors import DataError, RltrainError
from rltrain.logs import console, count

PHASES = (
    "generate_sequences", "reshard", "gen", "gen_max", "reward", "old_log_prob", "ref", "values", "adv", "update_critic",
    "update_actor", "step",
)  # fmt: skip
ROWS = [
    *((name, f"timing_s/{name}", "seconds") for name in PHASES),
    ("response_length", "response_length/mean", "tokens"),
    ("save_checkpoint", "timing_s/save_checkpoint", "seconds"),
    ("testing", "timing_s/testing", "seconds"),
    ("throughput", "perf/throughput", "tokens/s/device, prompt and response, whole step"),
    ("gen throughput", "perf/gen_throughput", "tokens/s/device, response, generate_sequences"),
    ("old_log_prob throughput", "perf/old_log_prob_throughput", "tokens/s/device, prompt and response"),
    ("mfu actor", "perf/mfu/actor", "of the device's bf16 peak, without recompute"),
]


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All lines of a run's metrics.jsonl, in order."""
    file = run / "metrics.jsonl" if run.is_dir() else run
    if not file.is_file():
        raise DataError(f"{file} does not exist. Give the run folder (trainer.default_local_dir).")
    return [json.loads(line) for line in file.read_text().splitlines() if line.strip()]


@dataclass(frozen=True)
class _Row:
    """A line of the table. step: where the largest value was."""

    label: str
    mean: float
    most: float
    step: int
    share: float | None
    unit: str


def _steps(lines: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All steps, and those that count: the first, which warms up, is left out of several."""
    steps = [line for line in lines if "timing_s/step" in line]
    return steps, steps[1:] if len(steps) > 2 else steps


def _rows(lines: list[dict[str, Any]]) -> Iterator[_Row]:
    """Means over the steps that have the metric."""
    _, counted = _steps(lines)
    whole = pd.DataFrame(counted).get("timing_s/step", pd.Series(dtype=float)).mean()
    for label, key, unit in ROWS:
        # Saving and testing happen in few steps, maybe only in the first.
        outside = key in ("timing_s/save_checkpoint", "timing_s/testing")
        frame = pd.DataFrame(lines if outside else counted)
        if key in frame and frame[key].notna().any():
            at = frame[key].idxmax()
            share = frame[key].mean() / whole if unit == "seconds" and not outside else None
            yield _Row(
                label, frame[key].mean(), frame[key][at], int(frame.get("step", frame.index + 1)[at]), share, unit
            )


def _title(lines: list[dict[str, Any]]) -> str:
    steps, counted = _steps(lines)
    if len(steps) > len(counted):
        return f"Mean of {len(counted)} of {count(len(steps), 'step')} (without the first, which warms up)"
    return f"Mean of {count(len(steps), 'step')}" if steps else "No training step"


def phase_table(lines: list[dict[str, Any]]) -> str:
    """The table users know, in a layout that scripts may parse."""
    rows = [(row.label, f"{row.mean:.6f}", row.unit) for row in _rows(lines)]
    if not rows:
        return _title(lines)
    titles = ("Metric", "Value", "Unit")
    widths = [max(len(row[column]) for row in [titles, *rows]) for column in range(3)]
    rule = " ".join("=" * width for width in widths)
    head, *body = [
        " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [titles, *rows]
    ]
    return "\n".join([_title(lines), rule, head, rule, *body, rule])


def screen_table(lines: list[dict[str, Any]]) -> Table:
    """The same for a terminal: as wide as that is, with the share of the step and the slowest step."""
    table = Table(title=_title(lines), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("Metric", "Mean", "Of step", "Largest", "In step", "Unit"):
        table.add_column(name, justify="left" if name in ("Metric", "Unit") else "right", no_wrap=name != "Unit")
    for row in _rows(lines):
        share = "" if row.share is None else f"{row.share:.0%}"
        table.add_row(row.label, _digits(row.mean), share, _digits(row.most), str(row.step), row.unit.partition(",")[0])
    return table


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def learning_summary(lines: list[dict[str, Any]]) -> str:
    """Training reward at the start and at the end (means over the first and last tenth), and validation before and after."""
    scores = [line["critic/score/mean"] for line in lines if "critic/score/mean" in line]
    parts = []
    if scores:
        tenth = max(1, len(scores) // 10)
        first, last = sum(scores[:tenth]) / tenth, sum(scores[-tenth:]) / tenth
        steps = "step" if tenth == 1 else f"{tenth} steps"
        both = f"{first:.3f} (first {steps}) -> {last:.3f} (last {steps})"
        parts.append(f"training reward: {both if len(scores) > 1 else f'{first:.3f} (one step)'}")
    for key in sorted({key for line in lines for key in line if key.startswith("val-core/") and "/mean@" in key}):
        values = [line[key] for line in lines if key in line]
        shown = [values[0], values[-1]] if len(values) > 1 else values
        parts.append(f"{key}: " + " -> ".join(f"{value:.3f}" for value in shown))
    return "\n".join(parts)


def report(run: Path) -> str:
    """Phase table, learning summary, and the newest exported model."""
    lines = read_metrics(run)
    return "\n".join([phase_table(lines), *_rest(run, lines)])


def _rest(run: Path, lines: list[dict[str, Any]]) -> list[str]:
    exports = sorted(run.glob("global_step_*/huggingface"), key=lambda path: int(path.parent.name.rpartition("_")[2]))
    exported = [f"exported model: {exports[-1]}"] if exports else []
    return [text for text in (learning_summary(lines), *exported) if text]


def show_report(run: Path) -> None:
    """Print it: for the eye on a terminal, for scripts elsewhere."""
    if not console.is_terminal:
        sys.stdout.write(report(run) + "\n")
        return
    lines = read_metrics(run)
    console.print(screen_table(lines))
    for text in _rest(run, lines):
        console.print(text, markup=False, soft_wrap=True)


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        sys.stderr.write("usage: python -m rltrain.report RUN_FOLDER\n")
        return 0 if arguments and arguments[0] in ("-h", "--help") else 2
    try:
        show_report(Path(arguments[0]))
    except RltrainError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``python -m rltrain.report RUN``: the phase table of a run, from its metrics.jsonl."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rltrain.errors import DataError, RltrainError

PHASES = (
    "generate_sequences",
    "reshard",
    "gen",
    "gen_max",
    "reward",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "step",
)
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


def phase_table(lines: list[dict[str, Any]]) -> str:
    """The table users know: mean over the steps that have the metric. The first step, which warms up, is left out of several."""
    steps = [line for line in lines if "timing_s/step" in line]
    counted = steps[1:] if len(steps) > 2 else steps
    rows = []
    for label, key, unit in ROWS:
        # Saving and testing happen in few steps, maybe only in the first.
        values = [
            line[key]
            for line in (lines if key in ("timing_s/save_checkpoint", "timing_s/testing") else counted)
            if key in line
        ]
        if values:
            rows.append((label, f"{sum(values) / len(values):.6f}", unit))
    widths = [
        max([len(row[column]) for row in rows] + [len(title)])
        for column, title in enumerate(("Metric", "Value", "Unit"))
    ]
    rule = " ".join("=" * width for width in widths)
    body = [
        " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [("Metric", "Value", "Unit"), *rows]
    ]
    title = f"Mean of {len(counted)} of {len(steps)} steps"
    return "\n".join([title, rule, body[0], rule, *body[1:], rule])


def learning_summary(lines: list[dict[str, Any]]) -> str:
    """Training reward at the start and at the end (means over the first and last tenth), and validation before and after."""
    steps = [line for line in lines if "critic/score/mean" in line]
    parts = []
    if steps:
        tenth = max(1, len(steps) // 10)
        first = sum(line["critic/score/mean"] for line in steps[:tenth]) / tenth
        last = sum(line["critic/score/mean"] for line in steps[-tenth:]) / tenth
        parts.append(f"training reward: {first:.3f} (first {tenth} steps) -> {last:.3f} (last {tenth} steps)")
    for key in sorted({key for line in lines for key in line if key.startswith("val-core/") and "/mean@" in key}):
        values = [line[key] for line in lines if key in line]
        parts.append(f"{key}: {values[0]:.3f} -> {values[-1]:.3f}")
    return "\n".join(parts)


def report(run: Path) -> str:
    """Phase table, learning summary, and the newest exported model."""
    lines = read_metrics(run)
    exports = sorted(run.glob("global_step_*/huggingface"), key=lambda path: int(path.parent.name.rpartition("_")[2]))
    exported = [f"exported model: {exports[-1]}"] if exports else []
    return "\n".join([phase_table(lines), learning_summary(lines), *exported])


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        sys.stderr.write("usage: python -m rltrain.report RUN_FOLDER\n")
        return 0 if arguments and arguments[0] in ("-h", "--help") else 2
    try:
        sys.stdout.write(report(Path(arguments[0])) + "\n")
    except RltrainError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

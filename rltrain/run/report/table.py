"""Report of a run from its metrics.jsonl: the phase table, and rewards and validation before and after."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.table import Table

from rltrain.common.errors import DataError
from rltrain.common.logs import console, count
from rltrain.common.storage import json_lines
from rltrain.config.passes import step_phases

METRICS = "metrics.jsonl"
# Increase of the truncated share that is too large to be chance in a few steps.
_RISE = 0.1
PHASES = ("generate_sequences", "reshard", "judge", *step_phases(), "step")
ROWS = [
    *((name, f"timing_s/{name}", "seconds") for name in PHASES),
    ("response_length", "response_length/mean", "tokens"),
    # Only the waiting time is shown, because a save is written during the next steps.
    ("save_checkpoint", "timing_s/save_checkpoint", "seconds that steps wait for a save"),
    ("testing", "timing_s/testing", "seconds"),
    ("throughput", "perf/throughput", "tokens/s/device, prompt and response, whole step"),
    ("total throughput", "perf/total_throughput", "tokens/s, likewise, of all devices"),
    ("gen throughput", "perf/gen_throughput", "tokens/s/device, response, generate_sequences"),
    ("old_log_prob throughput", "perf/old_log_prob_throughput", "tokens/s/device, prompt and response"),
    ("mfu actor", "perf/mfu/actor", "of the device's bf16 peak, without recompute"),
    ("mbu rollout", "perf/mbu/rollout", "of the device's memory bandwidth, at least"),
]


def read_metrics(run: Path | str) -> list[dict[str, Any]]:
    """Return all lines of a run's metrics.jsonl, in order.

    Raises DataError if there is none, StorageError if it cannot be read.
    """
    run = Path(run)
    file = run / METRICS if run.is_dir() else run
    if not file.is_file():
        raise DataError(f"{file} does not exist. Give the run folder (trainer.default_local_dir).")
    return json_lines(file)


def summary(lines: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str, float, float, int, float | None]]]:
    """Return a title, and one row per metric.

    A row has label, unit, mean over the steps that have the metric, largest value, its step, and share of a step.
    """
    steps = [line for line in lines if "timing_s/step" in line]
    # The first step compiles, allocates and fills caches. With two steps, both are counted.
    counted = steps[1:] if len(steps) > 2 else steps
    title = f"Mean of {count(len(steps), 'step')}" if steps else "No training step"
    if len(steps) > len(counted):
        title = f"Mean of {len(counted)} of {count(len(steps), 'step')} (without the first, which warms up)"
    whole = pd.DataFrame(counted).get("timing_s/step", pd.Series(dtype=float)).mean()
    rows = []
    for label, key, unit in ROWS:
        # Saving and testing occur in few steps, perhaps only in the first.
        outside = key in ("timing_s/save_checkpoint", "timing_s/testing")
        frame = pd.DataFrame(lines if outside else counted)
        if key in frame and frame[key].notna().any():
            at, mean = frame[key].idxmax(), frame[key].mean()
            # Saving and testing are not part of the step, so they have no share of it.
            share = mean / whole if unit == "seconds" and not outside else None
            if label == "old_log_prob" and "perf/old_log_prob_share" in frame:
                unit += f" ({frame['perf/old_log_prob_share'].mean():.0%} of the samples)"
            rows.append((label, unit, mean, frame[key][at], int(frame.get("step", frame.index + 1)[at]), share))
    return title, rows


def phase_table(lines: list[dict[str, Any]]) -> str:
    """Return the phase table in a fixed layout that scripts may parse."""
    title, phases = summary(lines)
    rows = [("Metric", "Value", "Unit"), *((label, f"{mean:.6f}", unit) for label, unit, mean, *_ in phases)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = " ".join("=" * width for width in widths)
    head, *body = [" ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([title, rule, head, rule, *body, rule]) if body else title


def screen_table(lines: list[dict[str, Any]]) -> Table:
    """Return the phase table for a terminal, with the share of the step and the slowest step."""
    title, rows = summary(lines)
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("Metric", "Mean", "Of step", "Largest", "In step", "Unit"):
        table.add_column(name, justify="left" if name in ("Metric", "Unit") else "right", no_wrap=name != "Unit")
    for label, unit, mean, most, step, share in rows:
        of_step = "" if share is None else f"{share:.0%}"
        table.add_row(label, _digits(mean), of_step, _digits(most), str(step), unit.partition(",")[0])
    return table


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def learning_summary(lines: list[dict[str, Any]]) -> str:
    """Return training reward at the start and at the end, and validation before and after.

    Training reward is the mean over the first and over the last tenth of the steps.
    """
    scores = [line["critic/score/mean"] for line in lines if "critic/score/mean" in line]
    parts = []
    if scores:
        first, last, steps = _ends(scores)
        both = f"{first:.3f} (first {steps}) -> {last:.3f} (last {steps})"
        parts.append(f"training reward: {both if len(scores) > 1 else f'{first:.3f} (one step)'}")
    for key in sorted({key for line in lines for key in line if key.startswith("val-core/") and "/mean@" in key}):
        values = [line[key] for line in lines if key in line]
        ends = [values[0], values[-1]] if len(values) > 1 else values
        parts.append(f"{key}: " + " -> ".join(f"{value:.3f}" for value in ends))
    return "\n".join(parts)


def _ends(values: list[float]) -> tuple[float, float, str]:
    """Return the means of the first and last tenth of the steps, and the number of these steps as text."""
    # Single steps are too noisy to show a trend.
    tenth = max(1, len(values) // 10)
    steps = "step" if tenth == 1 else f"{tenth} steps"
    return sum(values[:tenth]) / tenth, sum(values[-tenth:]) / tenth, steps


def mostly_truncated(run: Path, lines: list[dict[str, Any]]) -> str:
    """Return a warning if most responses at the end were truncated, or truncation rose with the reward, else ""."""
    keys = ["response_length/clip_ratio", "critic/score/mean"]
    values = pd.DataFrame(lines).reindex(columns=keys).dropna()
    if values.empty:
        return ""
    (before, truncated, steps), (first, last, _) = (_ends(values[key].tolist()) for key in keys)
    both_rose = truncated - before >= _RISE and last > first
    if truncated <= 0.5 and not both_rose:
        return ""
    why = (
        f"it was {before:.0%} at the start and rose together with the reward, so the reward may pay for responses that "
        "do not end" if both_rose else "raise data.max_response_length, or reward responses that end"
    )  # fmt: skip
    return f"{truncated:.0%} of the responses of the last {steps} were truncated: {why}; {_look(run)}"


def _look(run: Path) -> str:
    """Return the command that shows responses."""
    run = run if run.is_dir() else run.parent
    hint = "" if any(run.glob("samples/train_*")) else " (this run saved none; trainer.samples_freq=1 saves them)"
    return f"show them with python -m rltrain.view {shlex.quote(str(run))} --worst{hint}"


def nothing_earned(run: Path, lines: list[dict[str, Any]]) -> str:
    """Return a warning if no response scored above 0, or all scored the same; else ""."""
    scores = pd.DataFrame(lines).reindex(columns=["critic/score/min", "critic/score/max"])
    least, most = scores["critic/score/min"].min(), scores["critic/score/max"].max()
    # A negative maximum alone causes no warning, because a reward model may return only negative scores.
    if pd.isna(most) or most not in (least, 0):
        return ""
    return f"{f'every response earned {most:g}' if most == least else 'no response earned more than 0'}; {_look(run)}"


def report(run: Path) -> str:
    """Return phase table, learning summary, and the newest exported model."""
    lines = read_metrics(run)
    return "\n".join([phase_table(lines), *_rest(run, lines)])


def _rest(run: Path, lines: list[dict[str, Any]]) -> list[str]:
    # Sort by number, because "100" sorts before "20" as text.
    exports = sorted(run.glob("global_step_*/huggingface"), key=lambda path: int(path.parent.name.rpartition("_")[2]))
    exported = [f"exported model: {exports[-1]}"] if exports else []
    remarks = learning_summary(lines), nothing_earned(run, lines), mostly_truncated(run, lines)
    return [text for text in (*remarks, *exported) if text]


def show_report(run: Path) -> None:
    """Print the report, formatted for a terminal or for scripts."""
    # Scripts parse this layout, so it must not depend on the terminal width or on rich.
    if not console.is_terminal:
        sys.stdout.write(report(run) + "\n")
        return
    lines = read_metrics(run)
    console.print(screen_table(lines))
    for text in _rest(run, lines):
        console.print(text, markup=False, soft_wrap=True)

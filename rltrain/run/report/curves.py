"""Charts of report.html, from the metrics of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rltrain.run.report.charts import Line, Section, line_chart, stacked_bars
from rltrain.run.report.table import PHASES

# 95 % of the means over prompts lie within this many standard errors.
_SIGMAS = 1.96
_CORE = re.compile(r"val-core/(.+)/([^/]+)/((?:mean|maj)@\d+(?:/mean)?)")
_MOST_BARS = 400
# Phases that are part of another phase have no bar: `gen` includes generation and weight sync, `reward` the judge.
_BARS = [name for name in (*PHASES, "other", "testing", "save_checkpoint")
         if name not in ("generate_sequences", "reshard", "judge", "step")]  # fmt: skip
# Charts of lines: section, title, unit, metric and its label.
_CHARTS = pd.read_csv(Path(__file__).with_name("charts.tsv"), sep="\t", keep_default_na=False)


def sections(frame: pd.DataFrame) -> list[Section]:
    """Return the sections with charts, in the order of the page. frame: one row per step, one column per metric."""
    # Errors that never occurred are not shown.
    occurred = frame[[name for name in frame if name == "step" or (frame[name].fillna(0) != 0).any()]]
    return [
        _learning(frame),
        Section("Lengths of answers", charts=_charts(frame, "lengths")),
        Section("The update", charts=_charts(frame, "update")),
        _time(frame),
        Section("Memory", charts=_charts(frame, "memory")),
        Section("Errors and timeouts", charts=_charts(occurred, "errors")),
    ]


def _learning(frame: pd.DataFrame) -> Section:
    """Return the section on the reward of training and validation."""
    section = Section("Learning", "Bands are 95 % intervals of a mean over prompts.")
    score = _lines(frame, {"critic/score/mean": "score"}, {"critic/score/mean": "critic/score/sem"})
    section.charts += [line_chart("Training reward", score)] if score else []
    names = {name: name.replace("/", " ", 1) for name in frame.columns if re.match(r"(train|val)/loss", name)}
    section.charts += [line_chart("Loss per token", _lines(frame, names))] if names else []
    core: dict[str, dict[str, str]] = {}
    for name in frame.columns:
        if match := _CORE.fullmatch(name):
            source, variable, kind = match.groups()
            core.setdefault(f"Validation: {variable}", {})[name] = f"{source} {kind.partition('/')[0]}"
    for title, names in core.items():
        # A majority vote has no standard error.
        errors = {name: re.sub(r"val-core/(.*)/mean@", r"val-aux/\1/sem@", name) for name in names if "/mean@" in name}
        section.charts.append(line_chart(title, _lines(frame, names, errors)))
    sources = {name: name.split("/", 1)[1].removesuffix("/score/mean") for name in frame.columns
               if name.startswith("train/") and name.endswith("/score/mean")}  # fmt: skip
    section.charts += [line_chart("Training reward by source", _lines(frame, sources))] if sources else []
    return section


def _time(frame: pd.DataFrame) -> Section:
    """Return the section on the time of steps."""
    section = Section("Time")
    steps = frame[frame["timing_s/step"].notna()] if "timing_s/step" in frame else frame[:0]
    if len(steps) > _MOST_BARS:
        section.note = f"Bars are means of {-(-len(steps) // _MOST_BARS)} steps."
        steps = steps.groupby(np.arange(len(steps)) * _MOST_BARS // len(steps)).mean(numeric_only=True)
    if len(steps):
        parts = {name: steps[f"timing_s/{name}"].fillna(0) for name in _BARS if f"timing_s/{name}" in steps}
        first, last = steps["step"].iloc[[0, -1]]
        width = 0.9 * (float(last - first) / (len(steps) - 1) if len(steps) > 1 else 1.0)
        section.charts.append(stacked_bars("Phases of each step", steps["step"], parts, "seconds", width))
    section.charts += _charts(frame, "speed")
    return section


def _charts(frame: pd.DataFrame, section: str) -> list[Any]:
    charts = _CHARTS[_CHARTS["section"] == section].groupby(["title", "unit"], sort=False)
    found = [(title, unit, _lines(frame, rows.set_index("metric").label)) for (title, unit), rows in charts]
    return [line_chart(title, lines, unit) for title, unit, lines in found if lines]


def _lines(frame: pd.DataFrame, names: Mapping[str, str], errors: Mapping[str, str] = {}) -> list[Line]:
    """Return a line for each metric that the run has. errors: metric -> metric of its standard error."""
    lines = []
    for name, label in names.items():
        if name not in frame or frame[name].notna().sum() == 0:
            continue
        rows = frame[frame[name].notna()]
        band: tuple[Any, Any] = (None, None)
        if errors.get(name) in frame:
            wide = _SIGMAS * rows[errors[name]].fillna(0)
            band = (rows[name] - wide, rows[name] + wide)
        lines.append(Line(label, rows["step"], rows[name], *band))
    return lines

"""The page of an evaluation: a table of means, their curves over the steps of a run, and pass@k."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rltrain.common.storage import write_text
from rltrain.run.report.charts import Line, Section, Table, line_chart, page
from rltrain.tools.evaluate.report import main_figure

# A row is (model, step, name of the source, statistic).
Row = tuple[str, int | None, str, Mapping[str, float]]


def write_page(file: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Write the page. Raises DiskError or StorageError."""
    name = main_figure(results[0])
    rows = [row for result in results for row in _rows(result, name)]
    table = Table(["model", "source", name, "95 %"], [
        [model, source, f"{figure['value']:.4g}", f"[{figure['low']:.4g}, {figure['high']:.4g}]"]
        for model, _, source, figure in rows
    ])  # fmt: skip
    charts = [*_over_steps(rows, name), *_passes(results)]
    models = ", ".join(result["model"]["name"] for result in results)
    section = Section("Scores", charts=charts, tables=[table])
    write_text(file, page(models, "Intervals are 95 % of bootstrap draws over prompts.", [], [section]))


def _rows(result: Mapping[str, Any], name: str) -> list[Row]:
    """Return the statistic of every source that has it, and of their average if there are several."""
    parts = {source: part["figures"] for source, part in result["sources"].items()}
    parts |= {"average": result["average"]} if len(parts) > 1 else {}
    model, step = result["model"]["name"], result["model"]["step"]
    return [
        (model, step, source, figures[name])
        for source, figures in parts.items()
        if name in figures and figures[name]["value"] is not None
    ]


def _over_steps(rows: Sequence[Row], name: str) -> list[Any]:
    """Return a chart with a line per source if the models are checkpoints of several steps."""
    steps = {step for _, step, _, _ in rows}
    if None in steps or len(steps) < 2:
        return []
    ordered = sorted(rows, key=lambda row: row[1] or 0)
    lines = []
    for source in dict.fromkeys(source for _, _, source, _ in rows):
        points = [(step, *(figure[part] for part in ("value", "low", "high")))
                  for _, step, of, figure in ordered if of == source]  # fmt: skip
        lines.append(Line(source, *zip(*points, strict=True)))
    return [line_chart(name, lines)]


def _passes(results: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the chart of pass@k of the average over sources, one line per model."""
    lines = []
    for result in results:
        passes = {
            int(name.removeprefix("pass@")): figure for name, figure in result["average"].items()
            if name.startswith("pass@") and figure["value"] is not None
        }  # fmt: skip
        if passes:
            columns = ([figure[part] for figure in passes.values()] for part in ("value", "low", "high"))
            lines.append(Line(result["model"]["name"], list(passes), *columns))
    return [line_chart("pass@k", lines, x_label="k", x_axis_type="log")] if lines else []

"""The page of an evaluation: means by model or over steps, and pass@k if a prompt has several responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rltrain.run.report.charts import Line, Section, interval_chart, line_chart, save_page
from rltrain.tools.evaluate.report import main_figure


def write_page(file: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Write the page. Raises DiskError or StorageError."""
    charts = [*_means(results, main_figure(results[0])), *_passes(results)]
    models = ", ".join(result["model"]["name"] for result in results)
    save_page(file, models, "Intervals are 95 % of bootstrap draws over prompts.", [Section("Scores", charts=charts)])


def _means(results: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """Return a chart over steps if all models are checkpoints of different steps, else a chart by model per source."""
    steps = [result["model"]["step"] for result in results]
    sources = list(dict.fromkeys(source for result in results for source in result["sources"]))
    sources += ["average"] if len(sources) > 1 else []
    if len(results) > 1 and None not in steps and len(set(steps)) == len(steps):
        ordered = sorted(results, key=lambda result: result["model"]["step"])
        return [line_chart(name, [_line(source, "step", ordered, source, name) for source in sources])]
    models = list(dict.fromkeys(result["model"]["name"] for result in results))
    return [
        interval_chart(source, [_line(name, "name", results, source, name)], name, x_range=models) for source in sources
    ]


def _line(label: str, axis: str, results: Sequence[Mapping[str, Any]], source: str, name: str) -> Line:
    """Return the statistic of one source over step or name of the models that have it."""
    points = []
    for result in results:
        figures = result["average"] if source == "average" else result["sources"].get(source, {}).get("figures", {})
        if (figure := figures.get(name)) and figure["value"] is not None:
            points.append((result["model"][axis], figure["value"], figure["low"], figure["high"]))
    return Line(label, *(list(column) for column in zip(*points, strict=True))) if points else Line(label, [], [])


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

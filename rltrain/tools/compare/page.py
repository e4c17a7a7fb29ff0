"""The curves of several runs over each other, and what differs, as a page that opens offline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rltrain.base.charts import Line, Section, Table, line_chart, page
from rltrain.base.storage import replacing
from rltrain.tools.compare.runs import Group
from rltrain.tools.compare.tables import Comparison


def write(comparison: Comparison, metrics: Sequence[str], file: Path) -> None:
    """Write ``file``: a chart for every metric, a line for every group, and around that of several runs their spread.
    Raises DiskError or StorageError."""
    groups = comparison.groups
    charts = [line_chart(metric, lines) for metric in metrics if (lines := [*filter(None, (_line(group, metric)
              for group in groups))])]  # fmt: skip
    note = "Bands are the standard deviation over runs that differ in their seeds alone."
    sections = [Section("Curves", note if any(len(group.runs) > 1 for group in groups) else "", charts)]
    for title, rows in comparison.tables():
        head, *body = ([str(cell) for cell in row] for row in rows)
        sections.append(Section(title[0].upper() + title[1:], tables=[Table(head, body)] if body else []))
    names = " and ".join(group.name for group in groups)
    with replacing(file) as temporary:
        temporary.write_text(page(names, "Runs beside each other; the first is what others are held against.", [],
                                  sections), encoding="utf-8")  # fmt: skip


def _line(group: Group, metric: str) -> Line | None:
    if metric not in group.mean:
        return None
    values = group.mean[metric].dropna()
    if len(group.runs) == 1:
        return Line(group.name, values.index, values)
    spread = group.spread[metric].reindex(values.index)
    return Line(group.name, values.index, values, values - spread, values + spread)

"""Charts for an HTML page that opens offline: a thin layer over Bokeh, and the page template.

Bokeh's script is embedded, so that nothing is fetched. Charts have a transparent background and grey text, which is
readable on white and dark pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

# Okabe and Ito's colour-blind safe palette, without black and yellow, which would be invisible on one of the two pages.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8a7fd6", "#7f8c8d", "#a6761d")
_THEME = Path(__file__).with_name("theme.yaml")
_TEMPLATE = Path(__file__).with_name("page.html")
_HEIGHT, _LEGEND_ROW = 230, 16
# Noisy lines need visible points, which in a long line would merge into a band.
_MOST_MARKED = 40


@dataclass(frozen=True)
class Line:
    """Curve of a chart. low, high: bounds of an interval around it."""

    label: str
    x: Any
    y: Any
    low: Any = None
    high: Any = None


@dataclass(frozen=True)
class Table:
    """Rows of text with a header."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass
class Section:
    """Part of a page: a title, a note, charts side by side, and tables and HTML below them."""

    title: str
    note: str = ""
    charts: list[Any] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    answers: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """True if there is nothing to show."""
        return not (self.charts or any(table.rows for table in self.tables) or self.answers)


def line_chart(title: str, lines: Sequence[Line], unit: str = "", x_label: str = "step", **settings: Any) -> Any:
    """Return a line chart over steps (or ``x_label``), with values on hover. settings: arguments of
    `bokeh.plotting.figure`."""
    chart, drawn = _new_chart(title, unit, len(lines), **settings), []
    chart.xaxis.axis_label = None if x_label == "step" else x_label
    for line, colour in zip(lines, cycle(COLOURS), strict=False):
        x, y = _small(line.x), _small(line.y)
        if line.low is not None:
            chart.varea(x=x, y1=_small(line.low), y2=_small(line.high), color=colour, alpha=0.18)
        named = {"legend_label": line.label} if len(lines) > 1 else {}
        drawn.append(chart.line(x=x, y=y, color=colour, line_width=1.6, name=line.label, **named))
        if len(x) <= _MOST_MARKED:
            chart.scatter(x=x, y=y, color=colour, size=4, **named)
    if lines and not any(np.any(line.y) for line in lines):
        chart.y_range.start = 0  # otherwise a share that is always 0 would get an axis from -1
    return _finished(chart, drawn, [(x_label, "@x"), ("$name", "@y{0.[0000]a}")])


def stacked_bars(title: str, x: Any, parts: Mapping[str, Any], unit: str = "", width: float = 0.9) -> Any:
    """Return bars of stacked parts, one for every value of ``x``."""
    chart = _new_chart(title, unit, len(parts))
    columns = {"x": _small(x), **{name: _small(values) for name, values in parts.items()}}
    colours = [COLOURS[place % len(COLOURS)] for place in range(len(parts))]
    drawn = chart.vbar_stack([*parts], x="x", width=width, source=columns, color=colours, legend_label=[*parts])
    chart.y_range.start = 0
    return _finished(chart, drawn[-1:], [("step", "@x"), *((name, f"@{{{name}}}{{0.[000]}}") for name in parts)])


def page(title: str, subtitle: str, facts: Sequence[tuple[str, str]], sections: Sequence[Section]) -> str:
    """Return the page as HTML. facts: names and values in its header."""
    from bokeh.embed import components
    from bokeh.resources import Resources
    from bokeh.themes import Theme
    from jinja2 import Environment

    shown = [section for section in sections if not section.empty]
    charts = [chart for section in shown for chart in section.charts]
    script, places = components(charts, wrap_script=False, theme=Theme(filename=str(_THEME))) if charts else ("", ())
    drawn = iter(places)
    parts = [(section, [next(drawn) for _ in section.charts]) for section in shown]
    library = Resources(mode="inline", components=["bokeh"]).render_js() if charts else ""
    template = Environment(autoescape=True).from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(title=title, subtitle=subtitle, facts=facts, parts=parts, script=script, library=library)


def _new_chart(title: str, unit: str, num_lines: int, **settings: Any) -> Any:
    from bokeh.plotting import figure

    # Legend labels are stacked, because several do not fit into a row on a phone.
    height = _HEIGHT + _LEGEND_ROW * (num_lines if num_lines > 1 else 0)
    return figure(title=title, height=height, sizing_mode="stretch_width", tools="box_zoom,reset,save",
                  y_axis_label=unit or None, **settings)  # fmt: skip


def _finished(chart: Any, drawn: list[Any], tips: list[tuple[str, str]]) -> Any:
    """Return the chart with values on hover and its legend below."""
    from bokeh.models import HoverTool

    chart.add_tools(HoverTool(renderers=drawn, tooltips=tips, mode="vline", visible=False))
    chart.xgrid.visible = False
    if chart.legend:
        chart.add_layout(chart.legend[0], "below")
    return chart


def _small(values: Any) -> Any:
    """Convert to float32, which halves the size without a visible difference."""
    return np.asarray(values, dtype=np.float32)

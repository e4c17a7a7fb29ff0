"""Charts for an HTML page that opens offline: a thin layer over Bokeh, and the page template.

Bokeh's script is embedded, so that nothing is fetched. Charts have a transparent background and grey text, which is
readable on white and dark pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rltrain.common.storage import replacing

# Okabe and Ito's colour-blind safe palette, without black and yellow, which would be invisible on one of the two pages.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8a7fd6", "#7f8c8d")
_INK = "#8b929a"
_TEMPLATE = Path(__file__).with_name("page.html")
# Noisy lines need visible points, but in a long line they would merge into a band.
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
        return not (self.charts or self.tables or self.answers)


def colours(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Pair each name with a colour. The eight colours repeat."""
    return ((name, COLOURS[place % len(COLOURS)]) for place, name in enumerate(names))


def new_chart(title: str, unit: str = "", *, height: int = 230, **settings: Any) -> Any:
    """Return an empty Bokeh figure with the page's width. settings: of `bokeh.plotting.figure`."""
    from bokeh.models.annotations import Title
    from bokeh.plotting import figure

    # No drag tool is active, because on a phone it would prevent scrolling.
    chart = figure(height=height, sizing_mode="stretch_width", tools="box_zoom,reset,save",
                   toolbar_location="right", background_fill_alpha=0, border_fill_alpha=0, outline_line_alpha=0,
                   **settings)  # fmt: skip
    chart.toolbar.active_drag, chart.toolbar.autohide, chart.toolbar.logo = None, True, None
    chart.title = Title(text=title, text_color=_INK, text_font_size="13px", text_font_style="normal")
    chart.yaxis.axis_label = unit or None
    for axis in chart.axis:
        axis.axis_line_color = axis.major_tick_line_color = axis.minor_tick_line_color = None
        axis.major_label_text_color = axis.axis_label_text_color = _INK
        axis.major_label_text_font_size = axis.axis_label_text_font_size = "11px"
        axis.axis_label_text_font_style = "normal"
    chart.grid.grid_line_color, chart.grid.grid_line_alpha = _INK, 0.2
    chart.xgrid.grid_line_color = None
    return chart


def line_chart(title: str, lines: Sequence[Line], unit: str = "", x_label: str = "step", **settings: Any) -> Any:
    """Return a line chart over steps (or ``x_label``), with values on hover."""
    from bokeh.models import HoverTool

    chart = new_chart(title, unit, **settings)
    if x_label != "step":
        chart.xaxis.axis_label = x_label
    for line, (_, colour) in zip(lines, colours([line.label for line in lines]), strict=True):
        x, y = _small(line.x), _small(line.y)
        if line.low is not None:
            chart.varea(x=x, y1=_small(line.low), y2=_small(line.high), color=colour, alpha=0.18)
        named = {"legend_label": line.label} if len(lines) > 1 else {}
        drawn = [chart.line(x=x, y=y, color=colour, line_width=1.6, **named)]
        if len(x) <= _MOST_MARKED:
            drawn.append(chart.scatter(x=x, y=y, color=colour, size=4, **named))
        tips = [(x_label, "@x"), (line.label, "@y{0.[0000]a}")]
        chart.add_tools(HoverTool(renderers=drawn[:1], tooltips=tips, mode="vline", visible=False))
    _tidy_legend(chart)
    return chart


def interval_chart(title: str, lines: Sequence[Line], unit: str = "", **settings: Any) -> Any:
    """Return points with their intervals. x: numbers, or names that are the ``x_range``."""
    from bokeh.models import HoverTool

    chart = new_chart(title, unit, **settings)
    for line, (_, colour) in zip(lines, colours([line.label for line in lines]), strict=True):
        named = {"legend_label": line.label} if len(lines) > 1 else {}
        if line.low is not None:
            chart.segment(x0=line.x, y0=line.low, x1=line.x, y1=line.high, color=colour, line_width=1.6, **named)
        drawn = chart.scatter(x=line.x, y=line.y, color=colour, size=8, **named)
        chart.add_tools(
            HoverTool(renderers=[drawn], tooltips=[("", "@x"), (line.label, "@y{0.[0000]a}")], visible=False)
        )
    _tidy_legend(chart)
    return chart


def stacked_bars(
    title: str, x: Any, parts: Mapping[str, Any], unit: str = "", width: float = 0.9, **settings: Any
) -> Any:
    """Return bars of stacked parts, one for every value of ``x``."""
    from bokeh.models import HoverTool

    names, chart = list(parts), new_chart(title, unit, height=260, **settings)
    columns = {"x": x if isinstance(x, list) else _small(x), **{name: _small(values) for name, values in parts.items()}}
    drawn = chart.vbar_stack(
        names, x="x", width=width, source=columns, color=[colour for _, colour in colours(names)],
        legend_label=names, line_width=0,
    )  # fmt: skip
    tips = [("", "@x"), *((name, f"@{{{name}}}{{0.[000]}}") for name in names)]
    chart.add_tools(HoverTool(renderers=drawn[-1:], tooltips=tips, mode="vline", visible=False))
    chart.y_range.start = 0
    _tidy_legend(chart)
    return chart


def spans_chart(title: str, rows: Mapping[str, Sequence[tuple[str, float, float]]]) -> Any:
    """Return a timeline with one row per name, which has spans (what, begin, end) in seconds."""
    from bokeh.models import HoverTool

    names = list(rows)
    chart = new_chart(title, height=150 + min(26 * len(names), 900), y_range=names[::-1])
    chart.xaxis.axis_label = "seconds from the start of the step"
    kinds = list(dict.fromkeys(what for spans in rows.values() for what, *_ in spans))
    for what, colour in colours(kinds):
        found = [(name, begin, end) for name, spans in rows.items() for one, begin, end in spans if one == what]
        where, begins, ends = zip(*found, strict=True)
        columns = {"y": where, "left": _small(begins), "right": _small(ends), "what": [what] * len(found),
                   "seconds": _small(np.subtract(ends, begins))}  # fmt: skip
        alpha = 0.35 if what.startswith("idle") else 0.9
        drawn = chart.hbar(y="y", left="left", right="right", height=0.72, source=columns, color=colour,
                           alpha=alpha, line_width=0, legend_label=what)  # fmt: skip
        tips = [("", "@y"), ("@what", "@seconds{0.[000]} s")]
        chart.add_tools(HoverTool(renderers=[drawn], tooltips=tips, visible=False))
    _tidy_legend(chart)
    return chart


def heat_chart(
    title: str, counts: Any, steps: tuple[float, float], levels: tuple[float, float], **settings: Any
) -> Any:
    """Return a heat map of counts [levels, steps]. steps, levels: the ranges of the two axes."""
    from bokeh.models import LinearColorMapper
    from bokeh.palettes import Blues256

    chart = new_chart(title, height=260, x_range=steps, y_range=levels, **settings)
    # The palette starts with the darkest colour. Zero is transparent.
    mapper = LinearColorMapper(palette=Blues256[200:40:-1], low=0.5, high=255, low_color="rgba(0,0,0,0)")
    largest = np.asarray(counts).max(initial=1)
    shown = np.ceil(np.sqrt(np.asarray(counts) / largest) * 255).astype(np.uint8)
    chart.image(image=[shown], x=steps[0], y=levels[0], dw=steps[1] - steps[0], dh=levels[1] - levels[0],
                color_mapper=mapper)  # fmt: skip
    return chart


def page(title: str, subtitle: str, facts: Sequence[tuple[str, str]], sections: Sequence[Section]) -> str:
    """Return the page as HTML. facts: names and values in its header."""
    from bokeh.embed import components
    from bokeh.resources import Resources
    from jinja2 import Environment

    shown = [section for section in sections if not section.empty]
    charts = {f"{place}_{number}": chart for place, section in enumerate(shown)
              for number, chart in enumerate(section.charts)}  # fmt: skip
    script, places = components(charts, wrap_script=False) if charts else ("", {})
    parts = [
        (section, [places[f"{place}_{number}"] for number in range(len(section.charts))])
        for place, section in enumerate(shown)
    ]
    library = Resources(mode="inline", components=["bokeh"]).render_js() if charts else ""
    template = Environment(autoescape=True).from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(title=title, subtitle=subtitle, facts=facts, parts=parts, script=script, library=library)


def save_page(file: Path, title: str, subtitle: str, sections: Sequence[Section]) -> None:
    """Write a page atomically. Raises DiskError or StorageError."""
    text = page(title, subtitle, [], sections)
    with replacing(file) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _small(values: Any) -> Any:
    """Convert to float32, which halves the size without a visible difference."""
    return np.asarray(values, dtype=np.float32)


def _tidy_legend(chart: Any) -> None:
    if not chart.legend:
        return
    legend = chart.legend[0]
    legend.label_text_color, legend.label_text_font_size = _INK, "11px"
    legend.background_fill_alpha = legend.border_line_alpha = 0
    legend.click_policy, legend.orientation, legend.spacing, legend.padding = "hide", "horizontal", 8, 2
    legend.glyph_width = legend.glyph_height = 12
    legend.ncols = 4
    chart.add_layout(legend, "below")

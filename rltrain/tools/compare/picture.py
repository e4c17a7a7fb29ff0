"""The curves of several runs over each other, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rltrain.base.picture import new_figure, save
from rltrain.tools.compare.runs import Group

_COLUMNS = 2


def draw(groups: Sequence[Group], metrics: Sequence[str], file: Path) -> bool:
    """Write ``file``, a PNG: a panel for every metric, a line for every group, and around that of several runs their
    spread. False, with a sentence in the log, where matplotlib is not installed."""
    num_rows = -(-len(metrics) // _COLUMNS)
    figure = new_figure(6 * _COLUMNS, 3 * num_rows)
    if figure is None:
        return False
    axes = figure.subplots(num_rows, _COLUMNS, squeeze=False)
    for place, metric in zip(axes.flat, metrics, strict=False):
        for group in groups:
            _line(place, group, metric)
        place.set_title(metric, fontsize=9)
        place.grid(alpha=0.3)
    for place in axes.flat[len(metrics) :]:
        place.axis("off")
    # The first panel may lack a run.
    named = [pair for place in axes.flat for pair in zip(*place.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in named}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=3, fontsize=8)
    figure.supxlabel("step")
    save(figure, file)
    return True


def _line(place: Any, group: Group, metric: str) -> None:
    if metric not in group.mean:
        return
    values = group.mean[metric].dropna()
    # A line through one point is not seen.
    marker = "o" if len(values) < 20 else None
    (line,) = place.plot(values.index, values, label=group.name, marker=marker, markersize=3, linewidth=1.2)
    if len(group.runs) > 1:
        spread = group.spread[metric].reindex(values.index)
        bounds = (values - spread, values + spread)
        place.fill_between(values.index, *bounds, color=line.get_color(), alpha=0.2, linewidth=0)

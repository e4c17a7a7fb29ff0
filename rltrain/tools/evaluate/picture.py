"""A picture of evaluations: means by model or over steps, and pass@k where a prompt has several answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rltrain.base.picture import new_figure, save
from rltrain.tools.evaluate.report import main_figure

# How wide the points of one model lie apart; models are 1 apart.
_ASIDE = 0.4


def draw(file: Path, results: Sequence[Mapping[str, Any]]) -> bool:
    """Write the picture; False, with a sentence in the log, where matplotlib is not installed."""
    name = main_figure(results[0])
    several = any(part.startswith("pass@") for result in results for part in result["average"])
    figure = new_figure(11 if several else 6, 4)
    if figure is None:
        return False
    axes = figure.subplots(1, 2 if several else 1, squeeze=False)[0]
    _means(axes[0], results, name)
    if several:
        _passes(axes[1], results)
    save(figure, file)
    return True


def _means(axis: Any, results: Sequence[Mapping[str, Any]], name: str) -> None:
    """Over steps where all are checkpoints of different steps, else by model. Bars are 95 % intervals."""
    steps = [result["model"]["step"] for result in results]
    curve = len(results) > 1 and None not in steps and len(set(steps)) == len(steps)
    order = sorted(range(len(results)), key=lambda place: steps[place]) if curve else range(len(results))
    places = [steps[place] for place in order] if curve else list(range(len(results)))
    sources = list(dict.fromkeys(source for result in results for source in result["sources"]))
    names = [*sources, *(["average"] if len(sources) > 1 else [])]
    for number, source in enumerate(names):
        # Side by side, as points of one model would hide each other.
        aside = 0.0 if curve else (number - (len(names) - 1) / 2) * _ASIDE / len(names)
        found = [_figure(results[place], source, name) for place in order]
        points = [(x + aside, *_bar(figure)) for x, figure in zip(places, found, strict=True) if figure]
        if points:
            x, value, below, above = zip(*points, strict=True)
            line = "-" if curve else ""
            axis.errorbar(x, value, yerr=[below, above], marker="o", capsize=3, linestyle=line, label=source)
    if curve:
        axis.set_xlabel("step")
    else:
        axis.set_xticks(places, [result["model"]["name"] for result in results], rotation=20, ha="right")
        axis.set_xlim(-0.5, len(results) - 0.5)
    axis.set_ylabel(name)
    axis.grid(alpha=0.3)
    axis.legend()


def _passes(axis: Any, results: Sequence[Mapping[str, Any]]) -> None:
    """pass@k of the average over sources, a line a model."""
    all_ks = set[int]()
    for result in results:
        names = [
            name
            for name in result["average"]
            if name.startswith("pass@") and result["average"][name]["value"] is not None
        ]
        ks = [int(name.removeprefix("pass@")) for name in names]
        all_ks |= set(ks)
        figures = [result["average"][name] for name in names]
        (line,) = axis.plot(ks, [figure["value"] for figure in figures], marker="o", label=result["model"]["name"])
        low, high = ([figure[end] for figure in figures] for end in ("low", "high"))
        axis.fill_between(ks, low, high, color=line.get_color(), alpha=0.15)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks := sorted(all_ks), [str(k) for k in ticks])
    axis.set_xlabel("k")
    axis.set_ylabel("pass@k")
    axis.grid(alpha=0.3)
    axis.legend()


def _figure(result: Mapping[str, Any], source: str, name: str) -> Mapping[str, float] | None:
    figures = result["average"] if source == "average" else result["sources"].get(source, {"figures": {}})["figures"]
    figure = figures.get(name)
    return figure if figure and figure["value"] is not None else None


def _bar(figure: Mapping[str, float]) -> tuple[float, float, float]:
    """Value, and how far the interval goes below and above it."""
    value = figure["value"]
    return value, max(0.0, value - figure["low"]), max(0.0, figure["high"] - value)

"""The results of a search: tables, the words to type, and a page."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rltrain.base.charts import Line, Section, interval_chart, line_chart, save_page
from rltrain.base.logs import PlainConsole
from rltrain.tools.evaluate.report import console_of, show, write_table
from rltrain.tools.resolution.settings import Settings

_HEAD = ("dev", "accuracy", "image tokens", "s/prompt", "prompts", "")


def show_settings(settings: Settings) -> None:
    """Print what would be tried."""
    rows = [(setting.label, f"{setting.tokens:.1f}") for setting in settings.tried]
    write_table(console_of(), (("setting", "image tokens per prompt"), rows))
    _say([f"note: {note}" for note in settings.notes])


def show_search(result: Mapping[str, Any]) -> None:
    """Print the development split, the test split and the words to type."""
    console: PlainConsole = console_of()
    chosen = result["chosen"]["name"]
    rows = [
        (
            part["name"],
            _interval(part),
            f"{part['image_tokens']:.1f}",
            "" if part["seconds_per_prompt"] is None else f"{part['seconds_per_prompt']:.3g}",
            str(part["prompts"]),
            ", ".join(_marks(part, chosen)),
        )
        for part in result["settings"]
    ]
    write_table(console, (_HEAD, rows))
    _say([*(f"note: {note}" for note in result["notes"]), f"rule: {result['rule']}", "", "test:"])
    show(list(result["tests"].values()))
    _say([_verdict(result), f"words: {result['chosen']['words']}"])


def _marks(part: Mapping[str, Any], chosen: str) -> list[str]:
    marks = {"default": part["default"], "stopped": part["stopped"], "chosen": part["name"] == chosen}
    return [mark for mark, holds in marks.items() if holds]


def _verdict(result: Mapping[str, Any]) -> str:
    difference = result["difference"]
    if difference is None:
        return "No setting was better than the default."
    told = f"chosen minus default on test, same prompts: {_interval(difference)}"
    if difference["low"] is not None and difference["low"] > 0:
        return f"{told}: better."
    return f"{told}: {'worse' if (difference['high'] or 0) < 0 else 'no difference is shown'}."


def _interval(figure: Mapping[str, Any]) -> str:
    if figure["value"] is None:
        return ""
    return "{:.3f} [{:.3f}, {:.3f}]".format(*(figure[part] for part in ("value", "low", "high")))


def _say(lines: list[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def write_page(file: Path, result: Mapping[str, Any]) -> None:
    """Write the page: accuracy and seconds over image tokens. Raises DiskError or StorageError."""
    parts = sorted(result["settings"], key=lambda part: part["image_tokens"])
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for part in parts:
        if part["value"] is not None:
            groups.setdefault(", ".join(_marks(part, result["chosen"]["name"])) or "all of dev", []).append(part)
    accuracy = [Line(label, *(_column(group, name) for name in ("image_tokens", "value", "low", "high")))
                for label, group in groups.items()]  # fmt: skip
    timed = [part for part in parts if part["seconds_per_prompt"] is not None]
    seconds = Line("seconds per prompt", _column(timed, "image_tokens"), _column(timed, "seconds_per_prompt"))
    tokens = "image tokens per prompt"
    charts = [interval_chart("accuracy on dev, 95 %", accuracy, x_axis_type="log", x_axis_label=tokens),
              line_chart("seconds per prompt", [seconds], x_label=tokens, x_axis_type="log")]  # fmt: skip
    save_page(file, f"Resolution: {result['chosen']['name']}", _verdict(result), [Section("Settings", charts=charts)])


def _column(parts: list[Mapping[str, Any]], name: str) -> list[float]:
    return [part[name] for part in parts]

"""What a search has found: tables, the words to type, and a picture."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from rltrain.base.picture import new_figure, save
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
    console: Console = console_of()
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


def draw(file: Path, result: Mapping[str, Any]) -> bool:
    """Write the picture: accuracy and seconds over image tokens; False, with a sentence, without matplotlib."""
    figure = new_figure(10, 4)
    if figure is None:
        return False
    accuracy, cost = figure.subplots(1, 2)
    parts = sorted(result["settings"], key=lambda part: part["image_tokens"])
    for label, group, colour in (
        ("all of dev", [part for part in parts if not part["stopped"]], "C0"),
        ("stopped early", [part for part in parts if part["stopped"]], "0.6"),
    ):
        _points(accuracy, [part for part in group if part["value"] is not None], label, colour)
    for part in parts:
        for mark, holds in (("s", part["default"]), ("*", part["name"] == result["chosen"]["name"])):
            if holds and part["value"] is not None:
                label = "default" if mark == "s" else "chosen"
                accuracy.plot(
                    part["image_tokens"], part["value"], mark, markersize=14, fillstyle="none", color="C3", label=label
                )
    timed = [part for part in parts if part["seconds_per_prompt"] is not None]
    cost.plot([part["image_tokens"] for part in timed], [part["seconds_per_prompt"] for part in timed], "o-")
    accuracy.set_ylabel("accuracy on dev, 95 %")
    cost.set_ylabel("seconds per prompt")
    for axis in (accuracy, cost):
        axis.set_xscale("log")
        axis.set_xlabel("image tokens per prompt")
        axis.grid(alpha=0.3)
    accuracy.legend()
    save(figure, file)
    return True


def _points(axis: Any, parts: list[Mapping[str, Any]], label: str, colour: str) -> None:
    if parts:
        values = [part["value"] for part in parts]
        ends = [
            [part["value"] - part["low"] for part in parts],
            [part["high"] - part["value"] for part in parts],
        ]
        tokens = [part["image_tokens"] for part in parts]
        axis.errorbar(tokens, values, yerr=ends, fmt="o", capsize=3, label=label, color=colour)

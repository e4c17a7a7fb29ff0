"""The search: every setting on the development split, then the chosen one and the default on the test split."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from rltrain.common import logs
from rltrain.common.stop import Stop
from rltrain.common.storage import write_json
from rltrain.tools.evaluate import statistics
from rltrain.tools.evaluate.evaluation import evaluate_model
from rltrain.tools.evaluate.paired import prompt_means
from rltrain.tools.evaluate.report import console_of, show, write_table
from rltrain.tools.evaluate.statistics import Floats
from rltrain.tools.resolution.request import SearchRequest
from rltrain.tools.resolution.settings import MIN_PROMPTS, Setting, Settings

log = logging.getLogger(__name__)
RESULT = "resolution.json"
RULE = (
    "a quarter of dev is answered first; a setting whose paired 95 % interval against the best so far is below 0 there "
    "is stopped"
)
_HEAD = ("dev", "accuracy", "image tokens", "prompts", "")


def search(request: SearchRequest, settings: Settings, stop: Stop) -> dict[str, Any]:
    """Search, and also write the result to `RESULT`. Raises RltrainError, and Interrupted after a signal."""
    first = settings.num_prompts // 4 if settings.num_prompts >= 4 * MIN_PROMPTS else 0
    looks, values = dict[Setting, Floats](), dict[Setting, Floats]()
    best = default = settings.tried[0]
    for setting in settings.tried:
        if first:
            looks[setting] = _values(request, "first", setting, stop, f"data.val_max_samples={first}")
            high = _figure(looks[setting] - looks[best])["high"]
            if setting != best and high is not None and high < 0:
                log.info("%s: stopped, as it is worse than %s", setting.label, best.label)
                continue
        values[setting] = _values(request, "dev", setting, stop)
        # Of two equal settings the cheaper one is better.
        best = max(best, setting, key=lambda each: (np.nan_to_num(np.nanmean(values[each]), nan=-np.inf), -each.tokens))
    compared = {"default": default} | ({"chosen": best} if best != default else {})
    tests = {name: _evaluate(request, "test", setting, stop) for name, setting in compared.items()}
    difference = None
    if best != default:
        difference = _figure(_values(request, "test", best, stop) - _values(request, "test", default, stop))
    result = {
        "model": request.model.named, "dev": request.base.data, "test": request.test, "rule": RULE if first else "",
        "settings": [_described(each, values.get(each), looks.get(each)) for each in settings.tried],
        "chosen": {"name": best.bounds.name, "words": " ".join(best.bounds.words)},
        "tests": tests, "difference": difference, "notes": settings.notes,
    }  # fmt: skip
    write_json(request.root / RESULT, result)
    return result


def _evaluate(request: SearchRequest, folder: str, setting: Setting, stop: Stop, *words: str) -> dict[str, Any]:
    with logs.session():
        model = replace(request.model, name=setting.label)
        return evaluate_model(request.on(folder, setting.bounds, *words), model, stop)


def _values(request: SearchRequest, folder: str, setting: Setting, stop: Stop, *words: str) -> Floats:
    """Return the mean over the responses to each prompt [p], NaN if none has a score."""
    result = _evaluate(request, folder, setting, stop, *words)
    answers = pd.read_parquet(request.on(folder, setting.bounds).folder(request.model) / result["answers"])
    return np.concatenate([means.to_numpy() for means in prompt_means(answers).values()])


def _figure(values: Floats) -> dict[str, float | None]:
    """Return mean and 95 % interval over prompts, as JSON values."""
    draws = statistics.draws_of(values[:, None], "resolution")
    figure = statistics.figures({"mean": values}, {"mean": draws[:, 0]})["mean"]
    parts = {"value": figure.value, "low": figure.low, "high": figure.high}
    return {part: None if np.isnan(number) else number for part, number in parts.items()}


def _described(setting: Setting, values: Floats | None, look: Floats | None) -> dict[str, Any]:
    seen = np.zeros(0) if look is None else look
    seen = seen if values is None else values
    return {
        "name": setting.bounds.name, "min_pixels": setting.bounds.least, "max_pixels": setting.bounds.most,
        "default": setting.is_default, "image_tokens": setting.tokens, "prompts": len(seen), "stopped": values is None,
        **_figure(seen),
    }  # fmt: skip


def show_settings(settings: Settings) -> None:
    """Print the settings to try."""
    rows = [(setting.label, f"{setting.tokens:.1f}") for setting in settings.tried]
    write_table(console_of(), (("setting", "image tokens per prompt"), rows))
    sys.stdout.write("".join(f"note: {note}\n" for note in settings.notes))


def show_search(result: Mapping[str, Any]) -> None:
    """Print the results on the development and test split, and the words to type."""
    rows = []
    for part in result["settings"]:
        marks = {
            "default": part["default"],
            "stopped": part["stopped"],
            "chosen": part["name"] == result["chosen"]["name"],
        }
        shown = ", ".join(mark for mark, holds in marks.items() if holds)
        rows.append((part["name"], _interval(part), f"{part['image_tokens']:.1f}", str(part["prompts"]), shown))
    write_table(console_of(), (_HEAD, rows))
    lines = [*(f"note: {note}" for note in result["notes"]), *filter(None, [result["rule"]]), "", "test:"]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
    show(list(result["tests"].values()))
    sys.stdout.write(f"{_verdict(result['difference'])}\nwords: {result['chosen']['words']}\n")


def _verdict(difference: Mapping[str, Any] | None) -> str:
    if difference is None:
        return "No setting was better than the default."
    low, high = difference["low"] or 0, difference["high"] or 0
    verdict = "better" if low > 0 else "worse" if high < 0 else "no difference is shown"
    return f"chosen minus default on test, same prompts: {_interval(difference)}: {verdict}."


def _interval(figure: Mapping[str, Any]) -> str:
    if figure["value"] is None:
        return ""
    return "{:.3f} [{:.3f}, {:.3f}]".format(*(figure[part] for part in ("value", "low", "high")))

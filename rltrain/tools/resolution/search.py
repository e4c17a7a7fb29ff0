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
from rltrain.tools.evaluate.evaluation import evaluate_model, to_json
from rltrain.tools.evaluate.paired import differences, prompt_means
from rltrain.tools.evaluate.report import console_of, show, write_table
from rltrain.tools.evaluate.statistics import Floats
from rltrain.tools.resolution.request import SearchRequest
from rltrain.tools.resolution.settings import MIN_PROMPTS, Setting, Settings

log = logging.getLogger(__name__)
RESULT = "resolution.json"
RULE = "after a quarter of dev, a setting is stopped whose paired 95 % interval against the best so far is below 0"


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
                log.info("%s: stopped, as it is worse than %s", setting.bounds.name, best.bounds.name)
                continue
        values[setting] = _values(request, "dev", setting, stop)
        # Of two equal settings the cheaper one is better.
        best = max(best, setting, key=lambda each: (np.nan_to_num(np.nanmean(values[each]), nan=-np.inf), -each.tokens))
    compared = {"default": default} | ({"chosen": best} if best != default else {})
    tests = {name: _evaluate(request, "test", setting, stop) for name, setting in compared.items()}
    tables = [_answers(request, "test", compared[name], result) for name, result in tests.items()]
    result = {
        "model": request.model.named, "dev": request.base.data, "test": request.test, "rule": RULE if first else "",
        "settings": [_described(each, values.get(each), looks.get(each), best) for each in settings.tried],
        "chosen": {"name": best.bounds.name, "words": " ".join(best.bounds.words)},
        "tests": tests, "differences": differences(list(tests.values()), tables), "notes": settings.notes,
    }  # fmt: skip
    write_json(request.root / RESULT, result)
    return result


def _evaluate(request: SearchRequest, folder: str, setting: Setting, stop: Stop, *words: str) -> dict[str, Any]:
    with logs.session():
        model = replace(request.model, name=setting.bounds.name)
        return evaluate_model(request.on(folder, setting.bounds, *words), model, stop)


def _values(request: SearchRequest, folder: str, setting: Setting, stop: Stop, *words: str) -> Floats:
    """Return the mean over the responses to each prompt [p], NaN if none has a score."""
    answers = _answers(request, folder, setting, _evaluate(request, folder, setting, stop, *words))
    return np.concatenate([means.to_numpy() for means in prompt_means(answers).values()])


def _answers(request: SearchRequest, folder: str, setting: Setting, result: Mapping[str, Any]) -> pd.DataFrame:
    return pd.read_parquet(request.on(folder, setting.bounds).folder(request.model) / result["answers"])


def _figure(values: Floats) -> dict[str, float | None]:
    """Return mean and 95 % interval over prompts, as JSON values."""
    draws = statistics.draws_of(values[:, None], "resolution")
    return to_json(statistics.figures({"mean": values}, {"mean": draws[:, 0]}))["mean"]


def _described(setting: Setting, values: Floats | None, look: Floats | None, best: Setting) -> dict[str, Any]:
    seen = values if values is not None else look if look is not None else np.zeros(0)
    marks = {"default": setting.is_default, "stopped": values is None, "chosen": setting == best}
    return {
        "name": setting.bounds.name, "min_pixels": setting.bounds.least, "max_pixels": setting.bounds.most,
        "image_tokens": setting.tokens, "prompts": len(seen), **marks, **_figure(seen),
    }  # fmt: skip


def show_settings(settings: Settings) -> None:
    """Print the settings to try."""
    rows = [(setting.bounds.name, f"{setting.tokens:.1f}") for setting in settings.tried]
    write_table(console_of(), (("setting", "image tokens per prompt"), rows))
    sys.stdout.write("".join(f"note: {note}\n" for note in settings.notes))


def show_search(result: Mapping[str, Any]) -> None:
    """Print the results on the development and test split, and the words to type."""
    rows = []
    for part in result["settings"]:
        marks = ", ".join(mark for mark in ("default", "stopped", "chosen") if part[mark])
        interval = "" if part["value"] is None else "{value:.3f} [{low:.3f}, {high:.3f}]".format(**part)
        rows.append((part["name"], interval, f"{part['image_tokens']:.1f}", str(part["prompts"]), marks))
    write_table(console_of(), (("dev", "accuracy", "image tokens", "prompts", ""), rows))
    lines = [*(f"note: {note}" for note in result["notes"]), *filter(None, [result["rule"]]), "", "test:"]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
    show(list(result["tests"].values()), result["differences"])
    sys.stdout.write(f"words: {result['chosen']['words']}\n")

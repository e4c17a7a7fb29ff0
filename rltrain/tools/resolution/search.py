"""The search: every setting on the development split, then the chosen one and the default on the test split."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from rltrain.api import check_settings
from rltrain.common import logs
from rltrain.common.errors import ConfigError, DataError
from rltrain.common.logs import count
from rltrain.common.stop import Stop
from rltrain.common.storage import write_json
from rltrain.data.chat import chat_encoder
from rltrain.data.prompts import PromptStore
from rltrain.run.splits import load_data
from rltrain.tools.evaluate import statistics
from rltrain.tools.evaluate.evaluation import differences, evaluate_model, prompt_means, to_json
from rltrain.tools.evaluate.report import console_of, show, write_table
from rltrain.tools.evaluate.request import Request
from rltrain.tools.evaluate.statistics import Floats
from rltrain.tools.resolution.request import Bounds, SearchRequest

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


# With fewer prompts, intervals are too wide to compare settings.
MIN_PROMPTS = 20
SPLITS = ("dev", "test")


@dataclass(frozen=True)
class Setting:
    """Bounds to try."""

    bounds: Bounds
    tokens: float
    """Image tokens, mean per prompt of the development split."""
    is_default: bool = False


@dataclass(frozen=True)
class Settings:
    """The default, then all others from cheap to expensive."""

    tried: list[Setting]
    notes: list[str]
    num_prompts: int
    """Prompts of the development split."""


def find_settings(request: SearchRequest) -> Settings:
    """Return the settings to try. Raises ConfigError and DataError for a model, data or bounds that allow no search.

    The prompts of both splits are tokenised with all bounds before anything is generated. So bounds that make a prompt
    too long, or that have the same effect as others, are found within seconds.
    """
    loaded = request.on("dev").settings(request.model)
    check_settings(loaded)
    encoder, data = chat_encoder(loaded.config), loaded.config.data
    if not (encoder.has_tower and encoder.uses_pixel_bounds):
        why = "its processor scales every image to tiles of one size" if encoder.has_tower else "it sees no images"
        raise ConfigError(f"model={request.model.named}: {why}, so there is no resolution to search.")
    default = Bounds(data.min_pixels, data.max_pixels)
    stores = {split: _prompts(request.on(split)) for split in SPLITS}
    for split, store in stores.items():
        if not store.has_images or len(store) < MIN_PROMPTS:
            raise DataError(
                f"{split}={','.join(request.on(split).data)}: {count(len(store), 'prompt')}"
                f"{' with' if store.has_images else ', none with'} images. Give at least {MIN_PROMPTS}."
            )
    tokens = stores["dev"].image_tokens
    notes, tried = list[str](), [Setting(default, float(tokens.mean()), is_default=True)]
    known = {tokens.tobytes(): default}
    is_named = bool(request.least or request.most)
    for bounds in _named(request, default) if is_named else _around(stores["dev"]):
        try:
            tokens, _ = (_prompts(request.on(split, bounds)).image_tokens for split in SPLITS)
        except DataError as error:
            if is_named:
                raise ConfigError(f"{' '.join(bounds.words)}: {error}") from error
            notes.append(f"{bounds.name} is left out: {error}")
            continue
        if (same := known.setdefault(tokens.tobytes(), bounds)) != bounds:
            notes.append(f"{bounds.name} is left out: every image gets the size that it has with {same.name}")
        elif bounds != default:
            tried.append(Setting(bounds, float(tokens.mean())))
    if len(tried) < 2:
        raise ConfigError("\n".join(["there is nothing to search: only the default bounds are left.", *notes]))
    return Settings(sorted(tried, key=lambda each: (not each.is_default, each.tokens)), notes, len(stores["dev"]))


def _prompts(request: Request) -> PromptStore:
    return load_data(request.settings(request.models[0]).config).prompts["val"]


def _named(request: SearchRequest, default: Bounds) -> Iterator[Bounds]:
    """Yield every combination of the bounds that the command names."""
    for least in request.least or [default.least]:
        for most in request.most or [default.most]:
            if least is None or most is None or least <= most:
                yield Bounds(least, most)


def _around(store: PromptStore) -> Iterator[Bounds]:
    """Yield bounds with fewer and more pixels than the images have by default."""
    assert store.encoder
    has = store.num_images > 0
    pixels = float(np.median(store.image_tokens[has] / store.num_images[has])) * store.encoder.pixels_per_token
    yield from (Bounds(None, round(pixels * share)) for share in (1 / 4, 1 / 2))
    yield from (Bounds(round(pixels * factor), None) for factor in (2, 4))

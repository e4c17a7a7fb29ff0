"""The search: setting after setting on the development split, then the chosen one and the default on the test split.

Problem: most settings lose clearly, and a search may be killed in the middle. Choice: answers are kept as an evaluation
keeps them, some prompts at a time, and all that is said follows from them; a setting that lacks answers goes on with
those, and one that was stopped is found to be stopped again. Left out: several settings at a time, as an engine has all
the devices; an engine that goes from one setting to the next, as its images are part of its prompts (Ray goes on).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from rltrain.api import look_over
from rltrain.base import logs
from rltrain.base.stop import Stop
from rltrain.base.storage import read_json, write_json
from rltrain.controller.lifeline import working
from rltrain.run.build import build
from rltrain.run.fit import Trainer
from rltrain.tools.evaluate import statistics
from rltrain.tools.evaluate.evaluation import evaluate_model, values_of
from rltrain.tools.evaluate.kept import Kept
from rltrain.tools.evaluate.request import identity
from rltrain.tools.evaluate.statistics import SEED, Floats
from rltrain.tools.resolution.race import RULE, cannot_win, random_order
from rltrain.tools.resolution.request import SearchRequest
from rltrain.tools.resolution.settings import Setting, Settings

log = logging.getLogger(__name__)
RESULT, PAGE = "resolution.json", "resolution.html"
_SECONDS = "seconds.json"


@dataclass(frozen=True)
class Answered:
    """What a setting has got on the development split."""

    setting: Setting
    values: Floats
    """In the random order, as far as it came [t]; NaN where no answer to a prompt has a score."""
    seconds: float | None
    """Per prompt; None where nothing was timed."""
    stopped: bool

    @property
    def mean(self) -> float:
        """Over prompts that have a score."""
        present = self.values[~np.isnan(self.values)]
        return float(present.mean()) if len(present) else float("-inf")

    def described(self) -> dict[str, Any]:
        """As JSON has it."""
        bounds = self.setting.bounds
        return {
            "name": self.setting.name,
            "min_pixels": bounds.least,
            "max_pixels": bounds.most,
            "default": self.setting.is_default,
            "image_tokens": self.setting.tokens,
            "seconds_per_prompt": self.seconds,
            "prompts": len(self.values),
            "stopped": self.stopped,
            **_figure(self.values, "dev"),
        }


def search(request: SearchRequest, settings: Settings, stop: Stop) -> dict[str, Any]:
    """Make the search; what was found is in `RESULT` too. Raises RltrainError, and Interrupted after a signal."""
    best, found = None, list[Answered]()
    for setting in settings.tried:
        with logs.session():
            answered = _Race(request, setting, settings, best).run(stop)
        found.append(answered)
        if not answered.stopped and (best is None or _is_better(answered, best)):
            best = answered
    assert best
    default = found[0]
    tests = {
        ("default" if answered is default else "chosen"): _tested(request, answered.setting, stop)
        for answered in ([default] if best is default else [default, best])
    }
    result = {
        "model": request.model.named,
        "dev": request.base.data,
        "test": request.test,
        "rule": RULE,
        "settings": [answered.described() for answered in found],
        "chosen": {"name": best.setting.name, "words": " ".join(best.setting.bounds.words)},
        "tests": tests,
        "difference": _difference(request, default.setting, best.setting, tests) if best is not default else None,
        "notes": [*settings.notes, *_notes(found)],
    }
    write_json(request.root / RESULT, result)
    return result


def _is_better(one: Answered, other: Answered) -> bool:
    """Of equals the cheaper one is."""
    return (one.mean, -one.setting.tokens) > (other.mean, -other.setting.tokens)


class _Race:
    """One setting on the development split, against the best of those that have finished."""

    def __init__(self, request: SearchRequest, setting: Setting, settings: Settings, best: Answered | None) -> None:
        self._setting, self._settings, self._best = setting, settings, best
        self._order = random_order(settings.num_prompts)
        self._request = request.on("dev", setting.bounds)
        self._model = request.model
        self._loaded = self._request.settings(self._model)
        folder = self._request.folder(self._model)
        self._kept = Kept(folder, identity(self._model, self._loaded) | {"order": SEED})
        self._seconds_file = folder / _SECONDS

    def run(self, stop: Stop) -> Answered:
        """Answer until all is answered or the setting cannot win."""
        self._kept.check()
        values, name = self._values(), self._setting.label
        if len(values) == len(self._order) or self._is_lost(values):
            log.info("%s: was searched before, in %s", name, self._kept.folder)
        else:
            with build(self._loaded, stop, notes=look_over(self._loaded)) as trainer, working(), stop.telling():
                self._kept.begin()
                missing = self._kept.missing(len(self._order), trainer.validation.prompts_at_once)
                # The first answer waits for the engine to begin, so it says nothing of the time that others take.
                for number, places in enumerate(filter(len, [missing[0][:1], missing[0][1:], *missing[1:]])):
                    self._answer(trainer, places, timed=number > 0)
                    values = self._values()
                    log.info("%s: %d of %d prompts are answered", name, len(values), len(self._order))
                    stop.says(
                        f"{len(values)} of {len(self._order)} prompts of {name} are answered: the same command goes on "
                        "after them"
                    )
                    if self._is_lost(values):
                        log.info("%s: stopped, as it cannot win against %s", name, self._best_name)
                        break
        return Answered(self._setting, values, self._seconds(), stopped=len(values) < len(self._order))

    @property
    def _best_name(self) -> str:
        return self._best.setting.label if self._best else ""

    def _answer(self, trainer: Trainer, places: NDArray[np.int32], *, timed: bool) -> None:
        started = time.monotonic()
        part = self._kept.part(places)
        trainer.answer(np.sort(self._order[places]), part)
        if timed:
            seconds = read_json(self._seconds_file) or {}
            seconds[part.name] = (time.monotonic() - started) / len(places)
            write_json(self._seconds_file, seconds)

    def _seconds(self) -> float | None:
        """The median over parts."""
        seconds = list((read_json(self._seconds_file) or {}).values())
        return float(np.median(seconds)) if seconds else None

    def _values(self) -> Floats:
        """By prompt, in the random order, as far as no answer is lacking."""
        table = self._kept.answers()
        if table is None:
            return np.zeros(0)
        by_row = values_by_prompt(table.to_pandas())
        ordered = by_row.reindex(self._order)
        lacking = np.flatnonzero(~np.isin(self._order, by_row.index))
        return ordered.to_numpy()[: lacking[0] if len(lacking) else None]

    def _is_lost(self, values: Floats) -> bool:
        if not self._best or not len(values):
            return False
        both = np.concatenate([values, self._best.values])
        if np.nanmin(both, initial=0) < 0 or np.nanmax(both, initial=1) > 1:
            return False  # no bound is known for rewards of another range
        # Where one of them has no score, neither is ahead.
        differences = np.nan_to_num(values - self._best.values[: len(values)])
        return cannot_win(differences, len(self._order), len(self._settings.tried))


def values_by_prompt(answers: pd.DataFrame) -> pd.Series[float]:
    """Mean over the answers to each prompt, by its row; NaN where none has a score."""
    num_answers = int(answers["sample"].max()) + 1
    parts = []
    for _, rows in answers.groupby("data_source", sort=False):
        ordered = rows.sort_values(["row", "sample"])
        values, _ = values_of(ordered, num_answers)
        parts.append(pd.Series(statistics.mean_of(values), index=ordered["row"].to_numpy()[::num_answers]))
    return pd.concat(parts)


def _tested(request: SearchRequest, setting: Setting, stop: Stop) -> dict[str, Any]:
    with logs.session():
        found = evaluate_model(request.on("test", setting.bounds), replace(request.model, name=setting.label), stop)
    return found


def _difference(
    request: SearchRequest, default: Setting, chosen: Setting, tests: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Chosen minus default on the test split, prompt by prompt   (paired bootstrap)."""
    values = {}
    for name, setting in (("default", default), ("chosen", chosen)):
        folder = request.on("test", setting.bounds).folder(request.model)
        values[name] = values_by_prompt(pd.read_parquet(folder / tests[name]["answers"]))
    return _figure((values["chosen"] - values["default"]).to_numpy(), "difference")


def _figure(values: Floats, name: str) -> dict[str, float | None]:
    """Mean with its interval, as JSON has it."""
    draws = statistics.draws_of(values[:, None], name)
    figure = statistics.figures({name: values}, {name: draws[:, 0]})[name]
    parts = {"value": figure.value, "low": figure.low, "high": figure.high}
    return {part: None if np.isnan(number) else number for part, number in parts.items()}


def _notes(found: list[Answered]) -> list[str]:
    values = np.concatenate([answered.values for answered in found])
    notes = []
    if np.nanmin(values, initial=0) < 0 or np.nanmax(values, initial=1) > 1:
        notes.append("no setting was stopped early: rewards are not between 0 and 1, so no bound is known for them")
    if unscored := int(np.isnan(values).sum()):
        notes.append(f"{unscored} prompts of dev have no answer that could be scored, and count for nothing")
    return notes

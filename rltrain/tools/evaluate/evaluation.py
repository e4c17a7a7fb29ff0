"""Evaluation of one model: responses and scores by the trainer's validation, in parts, then statistics."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from rltrain.api import check_settings
from rltrain.common import __version__
from rltrain.common.logs import count
from rltrain.common.stop import Stop
from rltrain.common.versions import installed_version
from rltrain.config.loaded import LoadedConfig
from rltrain.run.build import build
from rltrain.run.fit import Trainer
from rltrain.runtime.ray_watchdog import require_heartbeat
from rltrain.tools.evaluate import statistics
from rltrain.tools.evaluate.models import Model
from rltrain.tools.evaluate.request import Request, identity
from rltrain.tools.evaluate.results import ResultFolder
from rltrain.tools.evaluate.statistics import Figure, Floats
from rltrain.trainer.validation import sizes

log = logging.getLogger(__name__)
_PACKAGES = ("torch", "transformers", "vllm", "sglang")
_VOTES = "pred"


def evaluate_model(request: Request, model: Model, stop: Stop) -> dict[str, Any]:
    """Return the result of an evaluation. Resume one that was interrupted; load a finished one.

    Raises RltrainError, and Interrupted after a signal.
    """
    loaded = request.settings(model)
    results = result_folder_of(request, model, loaded)
    settings = results.identity
    if result := results.result():
        log.info("%s: was evaluated before, in %s", model.name, results.folder)
        return result
    stop.says(f"{model.name} has no responses yet: the same command starts with it")
    with build(loaded, stop, notes=check_settings(loaded)) as trainer, require_heartbeat(), stop.telling():
        results.begin()
        _answer(trainer, results, model, stop)
        file = results.join(trainer.num_steps)
        answers = pd.read_parquet(file).sort_values(["row", "sample"], ignore_index=True)
        whole_sets = trainer.validation.summaries(accuracies(answers))
    result = {
        "model": {"name": model.name, "path": model.named, "digest": settings["model"], "step": model.step},
        "data": {"files": request.data, "digest": settings["data"]},
        **summary(answers),
        "whole_sets": whole_sets,
        "answers": str(file.relative_to(results.folder)),
        "settings": {key: value for key, value in settings.items() if key not in ("model", "data")},
        "versions": {"rltrain": __version__} | {name: installed_version(name) for name in _PACKAGES},
    }
    results.finish(result)
    return result


def result_folder_of(request: Request, model: Model, loaded: LoadedConfig) -> ResultFolder:
    """Return the folder of an evaluation with these settings. Raises ConfigError if it holds another evaluation."""
    results = ResultFolder(request.folder(model), identity(model, loaded))
    results.check()
    return results


def _answer(trainer: Trainer, results: ResultFolder, model: Model, stop: Stop) -> None:
    """Generate and score the missing responses."""
    total = trainer.validation.num_prompts
    parts = results.missing(total, trainer.validation.prompts_at_once)
    left = sum(map(len, parts))
    if left < total:
        log.info("%s: %d of %s already have responses", model.name, total - left, count(total, "prompt"))
    started, made = time.monotonic(), 0
    for rows in parts:
        trainer.answer(rows, results.part(rows))
        made += len(rows)
        left -= len(rows)
        left_s = (time.monotonic() - started) / made * left
        log.info("%s: %d of %s done, %s left", model.name, total - left, count(total, "prompt"), _span(left_s))
        stop.says(f"{total - left} of {total} prompts of {model.name} are done: the same command continues after them")


def _span(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def summary(answers: pd.DataFrame) -> dict[str, Any]:
    """Return statistics per data source and on average, and notes on missing ones. answers: table of a validation."""
    num_answers = int(answers["sample"].max()) + 1
    sources, drawn, notes = dict[str, Any](), [], list[str]()
    for source, rows in answers.groupby("data_source", sort=False):
        columns, described = _columns(str(source), rows.sort_values(["row", "sample"]), num_answers, notes)
        draws = statistics.draws_of(np.stack(list(columns.values()), axis=1), str(source))
        drawn.append(dict(zip(columns, draws.T, strict=True)))
        sources[str(source)] = described | {"figures": statistics.figures(columns, drawn[-1])}
    average = statistics.average([each["figures"] for each in sources.values()], drawn)
    return {
        "answers_per_prompt": num_answers,
        "sources": {name: each | {"figures": to_json(each["figures"])} for name, each in sources.items()},
        "average": to_json(average),
        "notes": notes,
    }


def _columns(
    source: str, rows: pd.DataFrame, num_answers: int, notes: list[str]
) -> tuple[dict[str, Floats], dict[str, Any]]:
    """Return every statistic per prompt and its measure. notes: gets the reasons for missing statistics."""
    by_prompt = {name: rows[name].to_numpy().reshape(-1, num_answers) for name in rows}
    failed = _failed(by_prompt)
    values, measure = values_of(rows, num_answers)
    is_binary = bool(np.isin(values[~np.isnan(values)], (0.0, 1.0)).all())
    columns = {f"avg@{num_answers}": statistics.mean_of(values)}
    if num_answers > 1:
        ks = sizes(num_answers)
        if is_binary:
            columns |= {f"pass@{k}": statistics.pass_of(values, k) for k in ks}
        else:
            notes.append(f"{source}: no pass@k, as {measure} is not only 0 or 1")
        # All votes are empty if no answer was found or the scorer of this source returns no votes.
        votes = rows[_VOTES].fillna("").astype(str).to_numpy() if _VOTES in rows else np.array([""])
        if (votes != "").any():
            majority = statistics.majority_of(values, votes.reshape(-1, num_answers), ks[1:])
            columns |= {f"maj@{k}": shares for k, shares in majority.items()}
        else:
            notes.append(f"{source}: no maj@k, as its scorer returns no {_VOTES}, or found an answer in no text")
    columns["length"] = by_prompt["response_length"].mean(1)
    columns["truncated"] = (by_prompt["finish_reason"] == "length").mean(1)
    columns["failed"] = failed.mean(1)
    if failed.any():
        as_zero = np.nan_to_num(values).mean()
        notes.append(
            f"{source}: {int(failed.sum())} of {failed.size} responses could not be scored and are excluded; with 0 "
            f"for each the mean would be {as_zero:.4g}"
        )
    return columns, {"prompts": len(values), "measure": measure, "binary": is_binary}


def values_of(rows: pd.DataFrame, num_answers: int) -> tuple[Floats, str]:
    """Return the value of every response [p, n], NaN if it could not be scored, and the name of its column.

    rows: the responses of one source, sorted by prompt.
    """
    by_prompt = {name: rows[name].to_numpy().reshape(-1, num_answers) for name in rows}
    # The measure is the same as in a validation: the scorer's accuracy, else the reward.
    has_acc = "acc" in rows and pd.api.types.is_numeric_dtype(rows["acc"]) and rows["acc"].notna().any()
    measure = "acc" if has_acc else "reward"
    return np.where(_failed(by_prompt), np.nan, by_prompt[measure].astype(np.float64)), measure


def accuracies(answers: pd.DataFrame) -> dict[str, np.ndarray]:
    """Return ``acc`` of all responses if a scorer returned it; NaN for responses that are excluded."""
    return {"acc": np.where(_failed(answers), np.nan, answers["acc"])} if "acc" in answers else {}


def _failed(by_prompt: Mapping[str, Any]) -> np.ndarray:
    """Return a mask [p, n] of responses whose scorer or trajectory failed."""
    failed = by_prompt["reward_failed"].astype(np.float64) > 0
    return failed | (by_prompt["agent_failed"] != "") if "agent_failed" in by_prompt else failed


def to_json(figures: Mapping[str, Figure]) -> dict[str, dict[str, float | None]]:
    """Convert statistics to JSON: NaN becomes null."""
    return {
        name: {part: None if np.isnan(value) else value for part, value in asdict(figure).items()}
        for name, figure in figures.items()
    }


# Row numbers of two models may differ, because a filter of long prompts depends on the tokenizer.
_PROMPT = ("question", "ground_truth")


def prompt_means(answers: pd.DataFrame) -> dict[str, pd.Series]:
    """Return the mean score over the responses to each prompt, by data source; NaN for a prompt without a score.

    answers: table of a validation. The index of a series identifies the prompts.
    """
    means, num_answers = {}, int(answers["sample"].max()) + 1
    for source, rows in answers.groupby("data_source", sort=False):
        ordered = rows.sort_values(["row", "sample"])
        prompts = ordered.iloc[::num_answers].reindex(columns=_PROMPT).astype(str)
        index = pd.MultiIndex.from_frame(prompts.assign(repetition=prompts.groupby([*_PROMPT]).cumcount()))
        means[str(source)] = pd.Series(statistics.mean_of(values_of(ordered, num_answers)[0]), index)
    return means


def differences(results: Sequence[Mapping[str, Any]], tables: Iterable[pd.DataFrame]) -> list[dict[str, Any]]:
    """Return the mean difference of each model from the first, by data source, with a 95 % bootstrap interval.

    It is paired by prompt, so that the variation between prompts is not part of the interval. The average over
    sources is given if there are several. tables: the responses of each result. Prompts that one of the two models
    did not get, or without scored responses, are excluded.
    """
    (first, *others), found = [prompt_means(table) for table in tables], list[dict[str, Any]]()
    for result, means in zip(results[1:], others, strict=True):
        gaps = {source: (means[source] - first[source]).dropna().to_numpy() for source in first if source in means}
        parts, figures, draws, shared = dict[str, Any](), [], [], {"prompts": 0, "binary": True}
        for source, values in ((source, values) for source, values in gaps.items() if len(values)):
            draws.append({"mean": statistics.draws_of(values[:, None], source)[:, 0]})
            figures.append(statistics.figures({"mean": values}, draws[-1]))
            is_binary = all(each["sources"][source]["binary"] for each in (results[0], result))
            parts[source] = to_json(figures[-1])["mean"] | {"prompts": len(values), "binary": is_binary}
            shared = {"prompts": shared["prompts"] + len(values), "binary": shared["binary"] and is_binary}
        found.append({"model": result["model"]["name"], "minus": results[0]["model"]["name"], "sources": parts})
        if len(figures) > 1:
            found[-1]["average"] = to_json(statistics.average(figures, draws))["mean"] | shared
    return found

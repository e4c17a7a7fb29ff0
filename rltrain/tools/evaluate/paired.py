"""Differences between models, paired by prompt, so that the variation between prompts is not part of the interval."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from rltrain.tools.evaluate import statistics
from rltrain.tools.evaluate.evaluation import to_json, values_of

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

    The average over sources is given if there are several. tables: the responses of each result. Prompts that one of
    the two models did not get, or without scored responses, are excluded.
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

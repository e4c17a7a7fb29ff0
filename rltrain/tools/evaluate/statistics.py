"""Statistics of responses to prompts, as pure functions over arrays.

The unit is the prompt: every statistic is computed per prompt [p], its value is the mean, and its interval is for
prompts of the same kind. Values are [p, n], NaN for a response without a score. Such responses are excluded, and a
prompt without scored responses is NaN.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rltrain.trainer.validation import pass_at

Floats = NDArray[np.float64]

SEED, DRAWS = 42, 2000
_LEVELS = (0.025, 0.975)
# Number of random subsets for the majority vote of fewer than all responses.
_VOTES = 500
# Rows of weights in memory at once.
_BLOCK = 250


@dataclass(frozen=True)
class Figure:
    """A statistic and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


def mean_of(values: Floats) -> Floats:
    """Return the mean [p] over the scored responses."""
    counts = (~np.isnan(values)).sum(1)
    return np.where(counts > 0, np.nansum(values, 1) / np.maximum(counts, 1), np.nan)


def pass_of(values: Floats, k: int) -> Floats:
    """Return the probability [p] that one of k responses is right: `pass_at`. values: 0 or 1."""
    return np.where(np.isnan(values).all(1), np.nan, pass_at(values, k))


def majority_of(values: Floats, votes: NDArray[Any], ks: Sequence[int], seed: int = SEED) -> dict[int, Floats]:
    """Return for every k the expected value [p] of the most frequent of k texts   (Wang et al. 2023, self-consistency).

    votes: texts [p, n]. Ties are averaged. If k is n, all responses are counted; otherwise the mean over 500 seeded
    subsets of k is taken.
    """
    random = np.random.default_rng(seed)
    shares = {k: np.full(len(values), np.nan) for k in ks}
    for prompt in range(len(values)):
        scored = ~np.isnan(values[prompt])
        if not scored.any():
            continue
        _, codes = np.unique(votes[prompt][scored].astype(str), return_inverse=True)
        frequencies = np.bincount(codes)
        of_text = np.bincount(codes, values[prompt][scored]) / frequencies
        drawn = random.permuted(np.tile(codes, (_VOTES, 1)), axis=1) if len(frequencies) > 1 else codes[None]
        for k in ks:
            subsets = drawn[:, :k] if k < len(codes) else codes[None]
            shares[k][prompt] = _of_majority(subsets, of_text)
    return shares


def _of_majority(subsets: NDArray[Any], of_text: Floats) -> float:
    """Return the mean over subsets [d, k] of text codes. of_text: the value of each text."""
    num_texts = len(of_text)
    # Each subset has a separate range of codes, so that a single bincount counts all votes.
    numbered = subsets + num_texts * np.arange(len(subsets))[:, None]
    counts = np.bincount(numbered.ravel(), minlength=num_texts * len(subsets)).reshape(-1, num_texts)
    winners = counts == counts.max(1, keepdims=True)
    return float(((winners * of_text).sum(1) / winners.sum(1)).mean())


def draws_of(columns: Floats, name: str, num_draws: int = DRAWS) -> Floats:
    """Return the bootstrap means [draws, m] of columns [p, m]: prompts drawn with replacement   (Efron 1979).

    name: name of the data source, which seeds the draws, so that statistics do not depend on other sources, and sources
    are drawn independently.
    """
    random = np.random.default_rng([SEED, zlib.crc32(name.encode())])
    num_prompts = len(columns)
    has_number = ~np.isnan(columns)
    numbers, present = np.where(has_number, columns, 0.0), has_number.astype(np.float64)
    means = []
    for first in range(0, num_draws, _BLOCK):
        size = min(_BLOCK, num_draws - first)
        weights = random.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=size).astype(np.float64)
        counts = weights @ present
        means.append(np.where(counts > 0, (weights @ numbers) / np.maximum(counts, 1), np.nan))
    return np.concatenate(means)


def figures(columns: Mapping[str, Floats], draws: Mapping[str, Floats]) -> dict[str, Figure]:
    """Return the mean of each column [p], with the percentile interval   (Efron and Tibshirani 1993, chapter 13)."""
    return {name: Figure(_mean(values), *_interval(draws[name])) for name, values in columns.items()}


def average(sources: Sequence[Mapping[str, Figure]], draws: Sequence[Mapping[str, Floats]]) -> dict[str, Figure]:
    """Return the mean over sources, equally weighted, of their common statistics. Their draws are independent."""
    shared = [name for name in sources[0] if all(name in figures_here for figures_here in sources)]
    return {
        name: Figure(
            float(np.mean([figures_here[name].value for figures_here in sources])),
            *_interval(np.mean([draws_here[name] for draws_here in draws], axis=0)),
        )
        for name in shared
    }


def _mean(values: Floats) -> float:
    present = values[~np.isnan(values)]
    return float(present.mean()) if len(present) else float("nan")


def _interval(draws: Floats) -> tuple[float, float]:
    present = draws[~np.isnan(draws)]
    low, high = np.quantile(present, _LEVELS) if len(present) else (np.nan, np.nan)
    return float(low), float(high)

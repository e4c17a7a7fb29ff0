"""Lengths of prompts and responses: from a named distribution, or from the saved samples of a run."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from rltrain.common.errors import ConfigError, DataError, short
from rltrain.config.schema.arguments import read_arguments, required
from rltrain.config.schema.fields import key

Ints = NDArray[np.int64]
# Standard deviation of the logarithm of a length, and the share of its variance that the responses to a prompt have in
# common. Both are assumed, and typical of mathematics.
SPREAD, ALIKE = 0.7, 0.5
_WAY_OUT = "Give mean:10426,max:27648 (and spread:, alike:, prompt:, image: if they are known), or the folder of a run."


@dataclass(frozen=True)
class Lengths:
    """Distribution of the lengths of prompts and responses in tokens."""

    description: str
    """Description for the user."""
    draw: Callable[[int, int], tuple[Ints, Ints]]
    """(number of prompts, responses per prompt) -> tokens of the prompts [p] and of the responses [p, n]."""
    image: int = 0
    """Tokens of a prompt that belong to its image."""

    def cut(self, most_prompt: int, most_answer: int) -> Lengths:
        """Return the lengths truncated as in a run."""

        def draw(prompts: int, answers: int) -> tuple[Ints, Ints]:
            given, written = self.draw(prompts, answers)
            return np.minimum(given, most_prompt), np.clip(written, 1, most_answer)

        return replace(self, draw=draw)


def read_lengths(text: str) -> Lengths:
    """Return the lengths described by ``text``. Raises ConfigError, and DataError for a run without samples."""
    if re.fullmatch(r"[a-z]+:[^,/]*(,[a-z]+:[^,/]*)*", text):
        return _named(text)
    if not (path := Path(text).expanduser()).is_dir():
        raise ConfigError(f"--lengths {short(text)} is neither a distribution nor a folder. {_WAY_OUT}")
    return _kept(path)


def lognormal(mean: float, most: float, spread: float = SPREAD, alike: float = ALIKE, prompt: int = 128) -> Lengths:
    """Return lognormal response lengths truncated at ``most``, whose mean after truncation is ``mean``.

    Each quantile occurs once.
    """
    middle = _middle(mean, most, spread)

    def draw(prompts: int, answers: int) -> tuple[Ints, Ints]:
        # The same quantiles for every seed and layout, so that only the compared settings differ.
        noise = np.random.default_rng(0)
        shared = noise.permutation(_normal(prompts))[:, None]
        own = noise.permutation(_normal(prompts * answers)).reshape(prompts, answers)
        order = np.sqrt(alike) * shared + np.sqrt(1 - alike) * own
        ranks = np.empty(order.size)
        ranks[np.argsort(order.ravel(), kind="stable")] = np.sort(_normal(order.size))
        written = np.minimum(np.exp(middle + spread * ranks), most).round().astype(np.int64)
        return np.full(prompts, prompt), np.maximum(written, 1).reshape(prompts, answers)

    description = (
        f"responses of {mean:,.0f} tokens on average, at most {most:,.0f} (assumed: the logarithm is normal with a "
    )
    description += (
        f"standard deviation of {spread:g}, and responses to a prompt share {alike:.0%} of its variance); prompts of "
    )
    return Lengths(f"{description}{prompt:,} tokens", draw)


def _normal(number: int) -> NDArray[np.float64]:
    normal = NormalDist()
    return np.array([normal.inv_cdf((place + 0.5) / number) for place in range(number)])


def _middle(mean: float, most: float, spread: float) -> float:
    """Return the mean log length for which lengths truncated at ``most`` have this ``mean``."""
    quantiles = spread * _normal(1000)
    low, high = np.log(mean) - 40 * spread - 1, np.log(most) + 40 * spread + 1
    for _ in range(100):
        middle = (low + high) / 2
        too_short = np.minimum(np.exp(middle + quantiles), most).mean() < mean
        low, high = (middle, high) if too_short else (low, middle)
    return float(low)


@dataclass(frozen=True)
class _Named:
    mean: float = required("the mean number of tokens of a response", least=1)
    max: float = required("the largest number of tokens of a response", least=1)
    spread: float = key(SPREAD, over=0, most=3)
    alike: float = key(ALIKE, least=0, most=1)
    prompt: int = key(128, least=1)
    image: int = key(0, least=0)


def _named(text: str) -> Lengths:
    parts = text.replace(":", "=").split(",")
    named = read_arguments(_Named, parts, where="--lengths", hint=_WAY_OUT)
    if named.mean >= named.max:
        raise ConfigError(f"--lengths {short(text)}: mean: must be below max:.")
    if named.image > named.prompt:
        raise ConfigError(f"--lengths {short(text)}: image: is part of prompt:, so it must not be larger.")
    lengths = lognormal(named.mean, named.max, named.spread, named.alike, named.prompt)
    image = f", {named.image:,} of them of an image" if named.image else ""
    return replace(lengths, description=lengths.description + image, image=named.image)


def _kept(run: Path) -> Lengths:
    """Return the response lengths of the samples that a run has saved, grouped by prompt."""
    import pandas as pd

    files = sorted((run / "samples").glob("train_*.parquet"))
    columns = ["step", "row", "prompt_length", "response_length"]
    # The first step is included, because warm-up of engines and files does not affect lengths.
    samples = [pd.read_parquet(file, columns=columns) for file in files]
    if not samples:
        raise DataError(f"--lengths {run}: this run has saved no responses (samples/train_*.parquet). {_WAY_OUT}")
    groups = [group for _, group in pd.concat(samples).groupby(["step", "row"], sort=True)]
    given = np.array([int(group["prompt_length"].iloc[0]) for group in groups])
    written = [group["response_length"].to_numpy(dtype=np.int64) for group in groups]
    mean = float(np.concatenate(written).mean())

    def draw(prompts: int, answers: int) -> tuple[Ints, Ints]:
        chosen = np.resize(np.random.default_rng(0).permutation(len(groups)), prompts)
        return given[chosen], np.stack([np.resize(written[place], answers) for place in chosen])

    description = f"the saved responses of {run}, {mean:,.1f} tokens on average, {len(files)} steps"
    return Lengths(description, draw)

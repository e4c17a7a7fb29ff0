"""How long prompts and answers are: a distribution that is named, a file, or what a run has kept."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from rltrain.base.errors import ConfigError, DataError, short
from rltrain.base.storage import lines_of

Ints = NDArray[np.int64]
# Of the logarithm of a length: its standard deviation, and the share of its variance that answers to a prompt have in
# common. Both are typical of mathematics, and assumed.
SPREAD, ALIKE = 0.7, 0.5
_NAMES = ("mean", "max", "spread", "alike", "prompt")
_FORM = "mean:10426,max:27648 (with spread:, alike:, prompt: where they are known)"
_WAY_OUT = f"Give {_FORM}, a file with a number of tokens in each line, or the folder of a run."


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and answers, for any number of them."""

    told: str
    """What a reader is told of them."""
    draw: Callable[[int, int], tuple[Ints, Ints]]
    """(prompts, answers to each) -> tokens of the prompts [p] and of the answers [p, n]."""

    def cut(self, most_prompt: int, most_answer: int) -> Lengths:
        """These, where a run cuts them."""

        def draw(prompts: int, answers: int) -> tuple[Ints, Ints]:
            given, written = self.draw(prompts, answers)
            return np.minimum(given, most_prompt), np.clip(written, 1, most_answer)

        return replace(self, draw=draw)


def read_lengths(text: str) -> Lengths:
    """The lengths that a word names. Raises ConfigError for one of no form, DataError for a file of no numbers."""
    if re.fullmatch(r"[a-z]+:[^,/]*(,[a-z]+:[^,/]*)*", text):
        return _named(text)
    path = Path(text).expanduser()
    if path.is_dir():
        return _kept(path)
    if not path.is_file():
        raise ConfigError(f"--lengths {short(text)} is no distribution, file or folder. {_WAY_OUT}")
    return _listed(path)


def lognormal(mean: float, most: float, spread: float = SPREAD, alike: float = ALIKE, prompt: int = 128) -> Lengths:
    """Answers whose logarithm is normal, cut at ``most``, with this mean after the cut; each quantile once."""
    middle = _middle(mean, most, spread)

    def draw(prompts: int, answers: int) -> tuple[Ints, Ints]:
        # The same quantiles for every seed and layout, so that two settings differ by themselves alone.
        noise = np.random.default_rng(0)
        shared = noise.permutation(_normal(prompts))[:, None]
        own = noise.permutation(_normal(prompts * answers)).reshape(prompts, answers)
        order = np.sqrt(alike) * shared + np.sqrt(1 - alike) * own
        ranks = np.empty(order.size)
        ranks[np.argsort(order.ravel(), kind="stable")] = np.sort(_normal(order.size))
        written = np.minimum(np.exp(middle + spread * ranks), most).round().astype(np.int64)
        return np.full(prompts, prompt), np.maximum(written, 1).reshape(prompts, answers)

    told = f"answers of {mean:,.0f} tokens on average, at most {most:,.0f} (assumed: the logarithm is normal with a "
    told += f"standard deviation of {spread:g}, and answers to a prompt share {alike:.0%} of its variance); prompts of "
    return Lengths(f"{told}{prompt:,} tokens", draw)


def _normal(number: int) -> NDArray[np.float64]:
    normal = NormalDist()
    return np.array([normal.inv_cdf((place + 0.5) / number) for place in range(number)])


def _middle(mean: float, most: float, spread: float) -> float:
    """The mean of the logarithm with which lengths that are cut at ``most`` have this ``mean``."""
    quantiles = spread * _normal(1000)
    low, high = np.log(mean) - 40 * spread - 1, np.log(most) + 40 * spread + 1
    for _ in range(100):
        middle = (low + high) / 2
        too_short = np.minimum(np.exp(middle + quantiles), most).mean() < mean
        low, high = (middle, high) if too_short else (low, middle)
    return float(low)


def _named(text: str) -> Lengths:
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.partition(":")
        try:
            value = float(number)
        except ValueError:
            raise ConfigError(f"--lengths {short(text)}: {name}:{short(number)} is no number. {_WAY_OUT}") from None
        if name not in _NAMES:
            raise ConfigError(f"--lengths {short(text)}: there is no {name}:. Known are {', '.join(_NAMES)}.")
        values[name] = value
    lacking = [name for name in ("mean", "max") if name not in values]
    if lacking:
        raise ConfigError(f"--lengths {short(text)} lacks {lacking[0]}:. {_WAY_OUT}")
    mean, most, prompt = values["mean"], values["max"], values.get("prompt", 128)
    spread, alike = values.get("spread", SPREAD), values.get("alike", ALIKE)
    if not (1 <= mean < most < np.inf and 0 < spread <= 3 and 0 <= alike <= 1 and 1 <= prompt < np.inf):
        raise ConfigError(
            f"--lengths {short(text)}: mean: is at least 1 and below max:, spread: above 0 and at most 3, alike: from "
            "0 to 1, prompt: at least 1."
        )
    return lognormal(mean, most, spread, alike, round(prompt))


def _listed(file: Path) -> Lengths:
    """A file with a number in each line."""
    lengths = []
    for number, line in enumerate(lines_of(file), 1):
        if not (text := line.strip()):
            continue
        if not text.isdecimal() or not int(text):
            raise DataError(f"--lengths {file}, line {number}: {short(text, 40)!r} is no number of tokens. {_WAY_OUT}")
        lengths.append(int(text))
    if not lengths:
        raise DataError(f"--lengths {file} has no number. {_WAY_OUT}")
    pool = np.array(lengths)

    def draw(prompts: int, answers: int) -> tuple[Ints, Ints]:
        # Every length as often as any other; neighbours in the file need not be answers to one prompt.
        order = np.random.default_rng(0).permutation(len(pool))
        return np.full(prompts, 128), np.resize(pool[order], (prompts, answers))

    told = f"the {len(pool):,} lengths of {file}, {pool.mean():,.1f} tokens on average, in any order"
    return Lengths(f"{told}; prompts of 128 tokens", draw)


def _kept(run: Path) -> Lengths:
    """The answers that a run has kept, prompt by prompt."""
    import pandas as pd

    files = sorted((run / "samples").glob("train_*.parquet"))
    columns = ["step", "row", "prompt_length", "response_length"]
    # Of the first step no more than of any other: what engines and files are warmed up for is no length.
    samples = [pd.read_parquet(file, columns=columns) for file in files]
    if not samples:
        raise DataError(f"--lengths {run}: this run has kept no answers (samples/train_*.parquet). {_WAY_OUT}")
    groups = [group for _, group in pd.concat(samples).groupby(["step", "row"], sort=True)]
    given = np.array([int(group["prompt_length"].iloc[0]) for group in groups])
    written = [group["response_length"].to_numpy(dtype=np.int64) for group in groups]
    mean = float(np.concatenate(written).mean())

    def draw(prompts: int, answers: int) -> tuple[Ints, Ints]:
        chosen = np.resize(np.random.default_rng(0).permutation(len(groups)), prompts)
        return given[chosen], np.stack([np.resize(written[place], answers) for place in chosen])

    told = f"the answers that {run} has kept, {mean:,.1f} tokens on average, {len(files)} steps"
    return Lengths(told, draw)

"""Validation metrics under verl's names: per data source, mean, best, worst and majority over answers to a prompt.

Problem: verl bootstraps every figure by 1000 draws in Python, which takes the driver minutes on large sets and adds
noise. Choice: best and worst are computed as the expectation of that bootstrap. Left out: a closed form of the
majority, whose ties and counts have none that is cheap, so its votes are still drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Column = NDArray[Any]

# verl's names and numbers: the scorer's column that votes, and the draws and seed of its bootstrap.
_VOTES = "pred"
_DRAWS, _SEED = 1000, 42


def validation_metrics(sources: Sequence[str], columns: dict[str, Column], num_samples: int) -> dict[str, float]:
    """sources: data source per prompt [p]. columns[name]: number (NaN: none) or text per answer, [p * num_samples].

    The core variable of a source is ``acc`` where its scorer gives it, else ``reward``; its mean@N, best@N/mean and
    maj@N/mean go under val-core/, everything else under val-aux/. ``pred``: the text that answers vote with.
    """
    metrics: dict[str, float] = {}
    for source in dict.fromkeys(sources):
        mine = np.array([each == source for each in sources])
        here = {name: values.reshape(len(sources), num_samples)[mine] for name, values in columns.items()}
        votes = _vote_shares(here[_VOTES]) if _VOTES in here else {}
        numbers = {name: values for name, values in here.items() if values.dtype != object}
        # A column that only some rows' scorers return is averaged over those rows.
        having = {name: ~np.isnan(values).all(1) for name, values in numbers.items()}
        core = "acc" if having.get("acc", np.zeros(1)).any() else "reward"
        for name, some in having.items():
            if not some.any():
                continue
            shares = {k: each[some] for k, each in votes.items()}
            for kind, value in _statistics(numbers[name][some], shares):
                shown = kind in {f"mean@{num_samples}", f"best@{num_samples}/mean", f"maj@{num_samples}/mean"}
                metrics[f"{'val-core' if name == core and shown else 'val-aux'}/{source}/{name}/{kind}"] = value
    return metrics


def _statistics(values: Floats, votes: dict[int, Floats]) -> Iterator[tuple[str, float]]:
    """Statistics of N answers to a prompt [p, N], mean over prompts. votes[k] [p, N]: `_vote_shares`.

    best@k, worst@k, maj@k: mean and standard deviation over k answers drawn with replacement out of the N, as verl
    bootstraps them; those of best and worst are what a bootstrap tends to. pass@k: of k drawn without replacement.
    """
    n = values.shape[1]
    yield f"mean@{n}", float(np.nanmean(values, 1).mean())
    if n == 1:
        return
    yield f"std@{n}", float(np.nanstd(values, 1).mean())
    binary = np.isin(values[~np.isnan(values)], (0.0, 1.0)).all()
    for k in _sizes(n):
        pairs = {"best": _expected_best(values, k), "worst": _expected_best(-values, k)}
        # The worst of v is minus the best of -v; the second moment has no sign.
        pairs["worst"] = (-pairs["worst"][0], pairs["worst"][1])
        if k in votes:
            shares = np.where(np.isnan(values), 0.0, votes[k])
            # An answer without a number cannot speak for the majority, so the others share its part.
            shares, known = shares / np.maximum(shares.sum(1, keepdims=True), 1e-12), np.nan_to_num(values)
            pairs["maj"] = ((shares * known).sum(1), (shares * known**2).sum(1))
        for kind, (first, second) in pairs.items():
            yield f"{kind}@{k}/mean", float(first.mean())
            yield f"{kind}@{k}/std", float(np.sqrt(np.maximum(second - first**2, 0.0)).mean())
    if binary:
        for k in (1, *_sizes(n)):
            yield f"pass@{k}", float(_pass_at(values, k).mean())


def _sizes(n: int) -> list[int]:
    """2, 4, 8 ... below n, and n."""
    return [*(2**power for power in range(1, n.bit_length()) if 2**power < n), n]


def _expected_best(values: Floats, k: int) -> tuple[Floats, Floats]:
    """First and second moment [p] of the largest of k values drawn with replacement: P(max <= v_(i)) = (i / N)^k."""
    ascending = np.sort(values, 1)  # NaN last
    counts = (~np.isnan(values)).sum(1, keepdims=True)
    below = np.minimum(np.arange(values.shape[1] + 1) / counts, 1.0) ** k
    weights, known = np.diff(below, axis=1), np.nan_to_num(ascending)
    return (weights * known).sum(1), (weights * known**2).sum(1)


def _vote_shares(votes: Column) -> dict[int, Floats]:
    """For every k, each answer's chance [p, N] to speak for the majority of k drawn ones (ties: equally likely)."""
    n = votes.shape[1]
    # Seeded anew per source: no figure depends on which other sources there are.
    random = np.random.default_rng(_SEED)
    shares = {k: np.zeros(votes.shape) for k in _sizes(n)}
    for prompt, texts in enumerate(votes.astype(str)):
        _, codes = np.unique(texts, return_inverse=True)
        sizes = np.bincount(codes)
        rows = len(sizes) * np.arange(_DRAWS)[:, None]
        for k, found in shares.items():
            drawn = codes[random.integers(n, size=(_DRAWS, k))]
            # Each draw has a range of codes of its own, so that a single bincount counts the votes of all draws.
            counts = np.bincount((rows + drawn).ravel(), minlength=_DRAWS * len(sizes)).reshape(_DRAWS, -1)
            winners = counts == counts.max(1, keepdims=True)
            # Answers that give the winning text are equally likely to be the one that is looked at, hence the division
            # by their number.
            found[prompt] = ((winners / winners.sum(1, keepdims=True)).mean(0) / sizes)[codes]
    return shares


def _pass_at(values: Floats, k: int) -> Floats:
    """Unbiased chance [p] that one of k answers is right: 1 - C(N - c, k) / C(N, k)   (Chen et al. 2021, eq. 1)."""
    counts = (~np.isnan(values)).sum(1)
    wrong = counts - np.nansum(values, 1)
    all_wrong = np.ones(len(values))
    for drawn in range(k):
        left = counts - drawn  # of a prompt with fewer than k answers, all are drawn
        all_wrong *= np.where(left > 0, np.maximum(wrong - drawn, 0) / np.maximum(left, 1), 1.0)
    return 1.0 - all_wrong

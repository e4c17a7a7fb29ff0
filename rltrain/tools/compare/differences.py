"""How far curves are from each other over the steps that they have in common."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import pandas as pd

from rltrain.base.errors import DataError
from rltrain.tools.compare.runs import Group, Run

METRICS = (
    "critic/score/mean", "critic/rewards/mean", "response_length/mean", "actor/entropy", "actor/kl_loss",
    "actor/reward_kl_penalty", "actor/ppo_kl", "actor/grad_norm", "val-core/*/mean@*",
)  # fmt: skip
# The rule of verl's pages on Ascend for a reward on NPUs against GPUs: its mean relative difference.
PARITY = {"critic/score/mean": 0.04, "critic/rewards/mean": 0.04}


@dataclass(frozen=True)
class Difference:
    """Of one metric from the first group, over ``num_steps`` steps."""

    metric: str
    absolute: float
    """Mean of |b - a|."""
    relative: float | None
    """Mean of |b - a| / |a| over the steps where a is not 0; None where it always is, and b is not."""
    num_steps: int
    num_zeros: int
    """Steps whose a is 0 and whose b is not: they are in no relative difference."""

    @property
    def passes(self) -> bool | None:
        """Whether the rule for parity holds; None where there is none for this metric."""
        limit = PARITY.get(self.metric)
        if limit is None:
            return None
        # Rounding is no difference.
        return self.relative is not None and round(self.relative, 9) <= limit and not self.num_zeros


def chosen_metrics(runs: Sequence[Run], patterns: Sequence[str] = ()) -> list[str]:
    """The metrics that the patterns mean, in their order; without any `METRICS`. Raises DataError for one that no run
    has."""
    names = sorted({str(name) for run in runs for name in run.metrics})
    chosen = dict[str, None]()
    for pattern in patterns or METRICS:
        meant = [name for name in names if fnmatchcase(name, pattern)]
        if patterns and not meant:
            near = ", ".join(difflib.get_close_matches(pattern, names, n=3))
            hint = f"Near: {near}." if near else "metrics.jsonl of a run has all names."
            raise DataError(f"--metrics {pattern}: no run has this metric. {hint}")
        chosen |= dict.fromkeys(meant)
    return list(chosen)


def check_steps(groups: Sequence[Group]) -> None:
    """Raise DataError where a group has no step in common with the first."""
    for group in groups:
        if not len(group.mean.index.intersection(groups[0].mean.index)):
            alone = [run.name for run in group.runs]
            names = " and ".join(alone if group is groups[0] else [groups[0].name, group.name])
            raise DataError(f"{names} have no step in common, so nothing can be compared. Give runs of the same steps.")


def difference(metric: str, first: Group, other: Group) -> Difference | None:
    """None where they have no step with this metric in common."""
    if metric not in first.mean or metric not in other.mean:
        return None
    values = pd.concat([first.mean[metric], other.mean[metric]], axis=1, join="inner").dropna()
    if values.empty:
        return None
    a, b = values.to_numpy().T
    gaps, zero = np.abs(b - a), a == 0
    # Where both are 0 they are the same.
    relative = np.where(zero, 0.0, gaps / np.where(zero, 1.0, np.abs(a)))[~zero | (gaps == 0)]
    mean = float(relative.mean()) if len(relative) else None
    return Difference(metric, float(gaps.mean()), mean, len(values), int((zero & (gaps > 0)).sum()))

"""Validation metrics: for every data source, mean, best and worst over the N answers to a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def validation_metrics(
    sources: Sequence[str], numbers: dict[str, NDArray[np.float64]], num_samples: int
) -> dict[str, float]:
    """sources: data source of each prompt [p]. numbers[name]: one value an answer, prompt-major [p * num_samples].

    The core variable is ``acc`` where the scorer gives it, else ``reward``; it goes under val-core/, the others under val-aux/.
    best@N is the mean over prompts of the largest of the N answers (verl bootstraps; N answers give the figure itself).
    """
    core = "acc" if "acc" in numbers else "reward"
    metrics: dict[str, float] = {}
    for source in dict.fromkeys(sources):
        mine = np.array([each == source for each in sources])
        for name, values in numbers.items():
            per_prompt = values.reshape(len(sources), num_samples)[mine]
            per_prompt = per_prompt[~np.isnan(per_prompt).all(1)]  # a column that only some rows' scorers return
            if not len(per_prompt):
                continue
            prefix = f"val-core/{source}/{name}" if name == core else f"val-aux/{source}/{name}"
            metrics[f"{prefix}/mean@{num_samples}"] = float(np.nanmean(per_prompt))
            if num_samples > 1:
                metrics[f"{prefix}/best@{num_samples}"] = float(np.nanmax(per_prompt, 1).mean())
                metrics[f"{prefix}/worst@{num_samples}"] = float(np.nanmin(per_prompt, 1).mean())
                metrics[f"{prefix}/std@{num_samples}"] = float(np.nanstd(per_prompt, 1, ddof=1).mean())
    return metrics

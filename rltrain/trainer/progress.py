"""The driver's part of a checkpoint, and the mean response length of each prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rltrain.runtime.samples import Samples

# File name of `Progress.answers`.
ANSWERS = "answers.safetensors"


@dataclass(frozen=True)
class Progress:
    """State of the driver."""

    batches_drawn: int = 0
    """Rounds of prompts drawn so far."""
    kl_coef: float | None = None
    """KL coefficient of the reward."""
    sampler: dict[str, NDArray[Any]] = field(default_factory=dict)
    """State of the sampler."""
    in_flight: list[list[int]] = field(default_factory=list)
    """Row, draw and age of prompts that were drawn but not trained on yet (`PendingPrompts.state`)."""
    answers: Samples | None = None
    """Partial responses of the prompts in flight, in a separate file."""
    lengths: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    """Mean response length per prompt, by split."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the step, in case the run stops before they are written to metrics.jsonl."""
    entropy_coef: float | None = None
    """Entropy coefficient of a controller."""
    expert_load: dict[str, NDArray[Any]] = field(default_factory=dict)
    """State of the alarms on expert load (`ExpertLoad.state`)."""


class ResponseLengths:
    """Mean response length per prompt. The responses that are expected to be longest are started first."""

    def __init__(self) -> None:
        # The lengths are part of a checkpoint, because they determine the start order. It does not change the tokens of
        # a response, but with `rollout.tail` it determines which prompts end first, and with several replicas which
        # responses share a replica.
        self._seen: dict[str, NDArray[np.float64]] = {}

    def state(self) -> dict[str, NDArray[np.float64]]:
        """Return the mean response length per prompt, by split; NaN if never seen."""
        return dict(self._seen)

    def restore(self, state: Mapping[str, NDArray[np.float64]]) -> None:
        """Restore from ``state``."""
        self._seen = dict(state)

    def order(self, split: str, rows: NDArray[np.int32]) -> NDArray[np.int32] | None:
        """Return prompt indices, longest expected response first (Graham 1969). None if no length is known yet.

        A prompt without a known length gets the mean of the others.
        """
        known = self._grown(split, int(rows.max(initial=-1)) + 1)
        expected = known[rows]
        if np.isnan(expected).all():
            return None
        expected = np.nan_to_num(expected, nan=float(np.nanmean(expected)))
        return np.argsort(-expected, kind="stable").astype(np.int32)

    def observe(self, split: str, rows: NDArray[np.int32], lengths: NDArray[np.int64]) -> None:
        """Record the mean length per prompt. rows, lengths: one per response."""
        unique, owner = np.unique(rows, return_inverse=True)
        # A copy, because a state that was returned earlier must not change.
        self._seen[split] = means = self._grown(split, int(rows.max(initial=-1)) + 1).copy()
        means[unique] = np.bincount(owner, weights=lengths) / np.bincount(owner)

    def _grown(self, split: str, size: int) -> NDArray[np.float64]:
        means = self._seen.get(split, np.zeros(0))
        return np.concatenate([means, np.full(max(0, size - len(means)), np.nan)])

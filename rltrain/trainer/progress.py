"""Progress of a run: the driver's part of a checkpoint, and how long the answers to each prompt were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rltrain.controller.samples import Samples

# The file of `Progress.answers`.
ANSWERS = "answers.safetensors"


@dataclass(frozen=True)
class Progress:
    """The driver's own state."""

    batches_drawn: int = 0
    """Rounds of prompts drawn so far."""
    kl_coef: float | None = None
    """Weight of the KL in the reward."""
    sampler: dict[str, NDArray[Any]] = field(default_factory=dict)
    """The sampler's state."""
    in_flight: list[list[int]] = field(default_factory=list)
    """Row, draw and age of the prompts that were drawn and not yet learnt from (`PromptLine.state`)."""
    answers: Samples | None = None
    """What these have of answers, in a file of its own."""
    lengths: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    """Mean answer per prompt, by split."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the step, for a run that ends between the checkpoint and its line in metrics.jsonl."""
    entropy_coef: float | None = None
    """Weight of the entropy bonus, as a controller has found it."""
    expert_load: dict[str, NDArray[Any]] = field(default_factory=dict)
    """What alarms over the load of experts remember (`ExpertLoad.state`)."""


class ResponseLengths:
    """Remembers how long the answers per prompt were, because the longest should start first."""

    def __init__(self) -> None:
        # Part of a checkpoint: the order in which prompts start decides no token of an answer, but with `rollout.tail`
        # which prompts end first, and with several replicas which answers one computes together.
        self._seen: dict[str, NDArray[np.float64]] = {}

    def state(self) -> dict[str, NDArray[np.float64]]:
        """Mean length of the answers per prompt, by split; NaN for one that was never seen."""
        return dict(self._seen)

    def restore(self, state: Mapping[str, NDArray[np.float64]]) -> None:
        """Go on from ``state``."""
        self._seen = dict(state)

    def order(self, split: str, rows: NDArray[np.int32]) -> NDArray[np.int32] | None:
        """Places of the prompts, those with the longest answers first (Graham 1969). None: nothing is known yet.

        A prompt that was never seen counts as the mean of the others.
        """
        known = self._grown(split, int(rows.max(initial=-1)) + 1)
        expected = known[rows]
        if np.isnan(expected).all():
            return None
        expected = np.nan_to_num(expected, nan=float(np.nanmean(expected)))
        return np.argsort(-expected, kind="stable").astype(np.int32)

    def observe(self, split: str, rows: NDArray[np.int32], lengths: NDArray[np.int64]) -> None:
        """Remember the mean length per prompt. rows, lengths: one per answer."""
        unique, owner = np.unique(rows, return_inverse=True)
        # A copy, because a state that was asked for must stay what it is.
        self._seen[split] = means = self._grown(split, int(rows.max(initial=-1)) + 1).copy()
        means[unique] = np.bincount(owner, weights=lengths) / np.bincount(owner)

    def _grown(self, split: str, size: int) -> NDArray[np.float64]:
        means = self._seen.get(split, np.zeros(0))
        return np.concatenate([means, np.full(max(0, size - len(means)), np.nan)])

"""How long the answers to each prompt were."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray


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
        seen = self._grown(split, int(rows.max(initial=-1)) + 1)
        expected = seen[rows]
        if np.isnan(expected).all():
            return None
        expected = np.nan_to_num(expected, nan=float(np.nanmean(expected)))
        return np.argsort(-expected, kind="stable").astype(np.int32)

    def observe(self, split: str, rows: NDArray[np.int32], lengths: NDArray[np.int64]) -> None:
        """Remember the mean length per prompt. rows, lengths: one per answer."""
        unique, owner = np.unique(rows, return_inverse=True)
        # A copy, because a state that was asked for must stay what it is.
        self._seen[split] = seen = self._grown(split, int(rows.max(initial=-1)) + 1).copy()
        seen[unique] = np.bincount(owner, weights=lengths) / np.bincount(owner)

    def _grown(self, split: str, size: int) -> NDArray[np.float64]:
        seen = self._seen.get(split, np.zeros(0))
        return np.concatenate([seen, np.full(max(0, size - len(seen)), np.nan)])

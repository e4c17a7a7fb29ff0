"""Checks during a step: engine/trainer mismatch, invalid responses, constant rewards, non-finite updates."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rltrain.algorithms.aggregation import Denominators
from rltrain.common.errors import NonFiniteError, RewardError, SyncError
from rltrain.common.logs import count
from rltrain.trainer.metrics.step import Metrics

log = logging.getLogger(__name__)

# A single bad batch is tolerated. A diverged model has a non-finite loss in every following step.
_MOST_SKIPPED_STEPS = 3
# A weak policy may get no reward for a few steps.
_EQUAL_STEPS_TOLD = 10


class Alarms:
    """Checks that warn or raise. gap_limit: largest mean log-prob gap between engine and trainer per sampled token.

    stops_on_gap, collapse_steps: as configured. compares: whether the estimator compares responses.
    """

    def __init__(
        self, gap_limit: float, stops_on_gap: bool = False, collapse_steps: int | None = None, compares: bool = True
    ) -> None:
        # `PPOTrainer` reads this field too: if it is True, the gap is checked before the update instead of in the
        # step's report.
        self.stops_on_gap = stops_on_gap
        self._collapse_steps = collapse_steps
        self._equal_steps = 0
        # Without a baseline the reward is the advantage, so equal rewards still give a gradient.
        self._equal_means = "they have no advantage" if compares else "they do not differ"
        self._told_damaged = False
        self._gap_limit = gap_limit
        self._skipped_in_a_row: Counter[str] = Counter()

    def gap(self, metrics: Metrics) -> Metrics:
        """Warn or raise SyncError if the mean log-prob gap between engine and trainer exceeds the limit."""
        gap = metrics.get("rollout/log_prob_gap/mean", 0.0)
        if gap <= self._gap_limit:
            return {"rollout/log_prob_gap/alarm": 0.0}
        text = (
            f"rollout engine and trainer differ by {gap:.3g} in the log-prob of a sampled token (mean; limit "
            f"{self._gap_limit:.3g}, actor_rollout_ref.rollout.log_prob_gap_limit): stale weights, a stale cache, or "
            "different kernels. algorithm.rollout_correction.rollout_is=token corrects for a small gap."
        )
        if self.stops_on_gap:
            raise SyncError(text)
        log.warning(text)
        return {"rollout/log_prob_gap/alarm": 1.0}

    def damaged(self, metrics: Metrics) -> None:
        """Warn of invalid responses from the engine. A worker raises if there are many."""
        number = metrics.get("rollout/damaged_answers", 0.0)
        if number and not self._told_damaged:
            self._told_damaged = True
            log.warning(
                "%d responses had token ids outside the vocabulary or non-finite log-probs, and count as empty "
                "(rollout/damaged_answers counts them in every step)", number
            )  # fmt: skip

    def collapsed(self, scores: NDArray[np.float64]) -> Metrics:
        """Warn or raise RewardError if the scores [n] of this step and of earlier steps were all equal."""
        self._equal_steps = self._equal_steps + 1 if scores.min() == scores.max() else 0
        text = (
            f"all responses of each of the last {self._equal_steps} steps had the same reward (now {scores[0]:g}), so "
            f"{self._equal_means}: the task is too hard or solved, or the reward function does not distinguish "
            "responses. Read the responses with python -m rltrain.view"
        )
        # A resumed run may already exceed a limit that was lowered.
        if self._collapse_steps is not None and self._equal_steps >= self._collapse_steps:
            raise RewardError(f"{text}. trainer.collapse_steps={self._collapse_steps} stops here; null only warns.")
        if self._equal_steps == _EQUAL_STEPS_TOLD:
            log.warning("%s (trainer.collapse_steps=N stops such a run)", text)
        return {"reward/equal_steps": float(self._equal_steps)}

    def empty(self, role: str, counts: Sequence[Denominators]) -> Metrics:
        """Warn of mini-batches without a loss token, for which `Updater` takes no optimizer step."""
        number = sum(not count.tokens for count in counts)
        if number:
            log.warning(
                "%s: %d of %d mini-batches have no token that counts in the loss, so no optimizer step was made from "
                "them: their responses were truncated (algorithm.mask_truncated; with optimal_token_baseline also the "
                "rest of the group), failed, or were rejected (algorithm.rollout_correction.rollout_rs)",
                role, number, len(counts)
            )  # fmt: skip
        return {f"{role}/steps_empty": float(number)}

    def restore(self, metrics: Metrics) -> None:
        """Restore the counters from the metrics of the newest step."""
        self._equal_steps = int(metrics.get("reward/equal_steps", 0))
        for role in ("actor", "critic"):
            self._skipped_in_a_row[role] = int(metrics.get(f"{role}/skipped_in_a_row", 0))

    def overflowed(self, role: str, metrics: Metrics) -> None:
        """Warn of optimizer steps that were skipped because gradients overflowed float16."""
        if number := int(metrics.get(f"{role}/steps_overflowed", 0)):
            log.warning(
                "%s: gradients overflowed float16, so %s not made; the loss scale is now %g",
                role, f"{count(number, 'optimizer step')} {'was' if number == 1 else 'were'}",
                metrics[f"{role}/loss_scale"],
            )  # fmt: skip

    def skipped(self, role: str, metrics: Metrics) -> Metrics:
        """Raise NonFiniteError if ``role`` skipped an optimizer step in three consecutive steps."""
        # Count per role: otherwise updates of the actor would hide a critic that is never updated.
        self._skipped_in_a_row[role] = self._skipped_in_a_row[role] + 1 if metrics[f"{role}/steps_skipped"] else 0
        if self._skipped_in_a_row[role] >= _MOST_SKIPPED_STEPS:
            raise NonFiniteError(
                f"{role}: {_MOST_SKIPPED_STEPS} steps in a row had a non-finite loss or gradient; stopping despite "
                "trainer.on_nonfinite=skip. Lower its optim.lr and resume from the newest checkpoint."
            )
        return {f"{role}/skipped_in_a_row": float(self._skipped_in_a_row[role])}

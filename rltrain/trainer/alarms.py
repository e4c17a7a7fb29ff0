"""What a step must not get past in silence: an engine that is not the policy, and updates that are never finite."""

from __future__ import annotations

import logging
from collections import Counter

from rltrain.config.schema import RolloutConfig
from rltrain.errors import NonFiniteError, SyncError
from rltrain.trainer.metrics import Metrics

log = logging.getLogger(__name__)

# One bad batch may pass; a model that has diverged gives a loss that is not finite in every step from then on.
_MOST_SKIPPED_STEPS = 3


class Alarms:
    """Warns or raises. gap_limit: largest mean difference of a sampled token's log-prob between engine and trainer."""

    def __init__(self, cfg: RolloutConfig, gap_limit: float) -> None:
        # Read by the step too, which then asks before the update and not only in its report.
        self.stops_on_gap = cfg.on_log_prob_gap == "stop"
        self._gap_limit = gap_limit
        self._skipped_in_a_row: Counter[str] = Counter()

    def gap(self, metrics: Metrics) -> Metrics:
        """Warn or stop when the engine's log-probs differ from the trainer's by more than the limit."""
        gap = metrics.get("rollout/log_prob_gap/mean", 0.0)
        if gap <= self._gap_limit:
            return {"rollout/log_prob_gap/alarm": 0.0}
        text = (
            f"rollout engine and trainer differ by {gap:.3g} in the log-prob of a sampled token (mean; limit "
            f"{self._gap_limit:.3g}, actor_rollout_ref.rollout.log_prob_gap_limit): stale weights, a stale cache, or "
            "kernels that compute otherwise. algorithm.rollout_correction.rollout_is=token corrects for a small gap."
        )
        if self.stops_on_gap:
            raise SyncError(text)
        log.warning(text)
        return {"rollout/log_prob_gap/alarm": 1.0}

    def skipped(self, role: str, metrics: Metrics) -> None:
        """Stop when ``role`` had to skip an optimizer step in three steps in a row."""
        # Per role, because a critic that never learns would hide behind an actor that does.
        self._skipped_in_a_row[role] = self._skipped_in_a_row[role] + 1 if metrics[f"{role}/steps_skipped"] else 0
        if self._skipped_in_a_row[role] >= _MOST_SKIPPED_STEPS:
            raise NonFiniteError(
                f"{role}: {_MOST_SKIPPED_STEPS} steps in a row had a loss or gradient that is not finite; stopping in "
                "spite of trainer.on_nonfinite=skip. Lower its optim.lr and resume from the newest checkpoint."
            )

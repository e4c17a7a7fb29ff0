"""Conversion of a batch's scores into columns."""

import logging
from collections.abc import Sequence

import numpy as np

from rltrain.common.columns import names as c
from rltrain.rewards.processes.score import JUDGE, Score

logger = logging.getLogger(__name__)

Columns = dict[str, np.ndarray]

_TIMEOUT_ALARM = 0.1


def columns_of(scores: Sequence[Score], on_error: float) -> Columns:
    """Return the scores as columns; see `Scoring.collect`."""
    columns = {
        c.SCORE: np.array([on_error if score.value is None else score.value for score in scores], np.float64),
        c.REWARD_FAILED: np.array([score.status != "ok" for score in scores], np.float64),
        c.REWARD_TIMEOUT: np.array([score.status == "timeout" for score in scores], np.float64),
    }
    for name in sorted({name for score in scores for name in score.extras}):
        values = [score.extras.get(name) for score in scores]
        # If an extra is a number for some responses and a text for others, it is a metric, and the texts count as
        # missing values.
        if any(isinstance(value, float) for value in values):
            numbers = [value if isinstance(value, float) else np.nan for value in values]
            columns[c.SCORER + name] = np.array(numbers, np.float64)
        else:
            columns[c.SCORER + name] = np.array([value or "" for value in values], dtype=object)
    if columns[c.REWARD_FAILED].any():
        columns[c.REWARD_ERROR] = np.array([score.error or "" for score in scores], dtype=object)
    num_timeouts = sum(score.status == "timeout" and score.kind != JUDGE for score in scores)
    if num_timeouts > _TIMEOUT_ALARM * len(scores):
        logger.warning("%d of %d responses ran out of reward.timeout_s", num_timeouts, len(scores))
    return columns

"""What pictures of a step need beside its metrics: when phases ran, when replicas had done, how long answers were.

One line a step in ``details.jsonl``. It is reckoned from what the driver holds of the step anyway.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rltrain.base.columns import names as c
from rltrain.controller.samples import Samples
from rltrain.run.report.details import DETAILS, length_bins
from rltrain.run.report.tracking import JsonLines
from rltrain.run.watchers.watcher import Watcher
from rltrain.trainer.metrics import Answered, Metrics

# Of the ends of a replica's answers, these quantiles are kept.
_QUANTILES = (0.5, 0.9, 1.0)
_DIGITS = 4


class Details(Watcher):
    """Writes the line of every step into the run's folder ``folder``."""

    def __init__(self, folder: Path, num_replicas: int) -> None:
        self._lines, self._num_replicas = JsonLines(folder / DETAILS), num_replicas

    def on_step(self, made: Answered) -> Metrics:
        """Add the line of this step."""
        self._lines.log(made.step, self._of(made))
        return {}

    def close(self) -> None:
        """Write what could not be written until now."""
        self._lines.close()

    def _of(self, made: Answered) -> dict[str, Any]:
        samples = made.samples
        lengths = length_bins(samples[c.RESPONSE_LENGTH])
        found, counts = np.unique(lengths, return_counts=True)
        return {
            "spans": [(span.phase, round(span.begin, _DIGITS), round(span.end, _DIGITS)) for span in made.spans],
            "replicas": self._replicas(samples),
            "lengths": [[int(place), int(number)] for place, number in zip(found, counts, strict=True)],
        }

    def _replicas(self, samples: Samples) -> list[list[float]]:
        """Seconds after its generation began in which each replica had half, most and all of its answers of the batch.
        One that had none has an empty list."""
        served = samples[c.SERVED]
        ended_s, engines = samples[c.ENDED_S][served], samples[c.ENGINE][served]
        own = (ended_s[engines == place] for place in range(self._num_replicas))
        return [np.quantile(ends, _QUANTILES).round(_DIGITS).tolist() if len(ends) else [] for ends in own]

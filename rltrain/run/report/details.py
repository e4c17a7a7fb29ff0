"""``details.jsonl``: data for charts that are not in the metrics. One line per step, and one when a phase begins.

It holds the times of phases, the ends of replicas, and response lengths, computed from data that the driver holds
anyway.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rltrain.common.columns import names as c
from rltrain.common.storage import json_lines
from rltrain.run.report.tracking import JsonLines
from rltrain.run.watchers.watcher import Watcher
from rltrain.runtime.samples import Samples
from rltrain.trainer.metrics.step import Answered, Metrics
from rltrain.trainer.metrics.timing import Span
from rltrain.trainer.plan import Plan

DETAILS = "details.jsonl"
# Lengths in the same quarter of an octave are counted together.
BINS_PER_OCTAVE = 4
# Quantiles of the end times of a replica's responses.
_QUANTILES = (0.5, 0.9, 1.0)
_DIGITS = 4


@dataclass(frozen=True)
class StepDetails:
    """Details of one step."""

    spans: list[Span]
    replicas: list[list[float]]
    """Per replica: seconds from the start of its generation until half, 90 % and all of its responses ended. Empty if
    it had none.
    """
    lengths: dict[int, int]
    """Number of responses per bin of lengths (`length_bins`)."""


def length_bins(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Return the bins of lengths [n] in tokens: one bin per quarter of an octave, 0 for at most one token."""
    bins: NDArray[np.int64] = np.floor(BINS_PER_OCTAVE * np.log2(np.maximum(lengths, 1))).astype(np.int64)
    return bins


def read_details(run: Path) -> dict[int, StepDetails]:
    """Return the details by step, ascending. The newer line of a repeated step wins. Raises StorageError."""
    lines = {line["step"]: line for line in json_lines(run / DETAILS) if "spans" in line}
    return {
        step: StepDetails([Span(*span) for span in line["spans"]], line["replicas"], dict(line["lengths"]))
        for step, line in sorted(lines.items())
    }


class Details(Watcher):
    """Writer of a line per step to ``details.jsonl`` in ``folder``."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._lines, self._num_replicas = JsonLines(folder / DETAILS), plan.num_engine_replicas
        self._step = 0

    def before_step(self, step: int) -> None:
        """Store the number of the step."""
        self._step = step

    def on_phase(self, name: str) -> None:
        """Write a line that shows other processes the phase of the run (`rltrain.tools.watch`)."""
        self._lines.log(self._step, {"phase": name, "at": round(time.time(), 1)})

    def on_step(self, made: Answered) -> Metrics:
        """Write the line of this step."""
        self._lines.log(made.step, self._of(made))
        return {}

    def __enter__(self) -> Details:
        return self

    def __exit__(self, *_: object) -> None:
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
        """Return `StepDetails.replicas` of the batch."""
        served = samples[c.SERVED]
        ended_s, engines = samples[c.ENDED_S][served], samples[c.ENGINE][served]
        own = (ended_s[engines == place] for place in range(self._num_replicas))
        return [np.quantile(ends, _QUANTILES).round(_DIGITS).tolist() if len(ends) else [] for ends in own]

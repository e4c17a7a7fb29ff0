"""``details.jsonl``: what pictures of a step need beside its metrics, a line a step; and a line where a phase begins.

When phases ran, when replicas had done, how long answers were. It is reckoned from what the driver holds anyway.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rltrain.base.columns import names as c
from rltrain.base.storage import json_lines
from rltrain.controller.samples import Samples
from rltrain.run.report.tracking import JsonLines
from rltrain.run.watchers.watcher import Watcher
from rltrain.trainer.metrics import Answered, Metrics
from rltrain.trainer.plan import Plan
from rltrain.trainer.timing import Span

DETAILS = "details.jsonl"
# Lengths that differ by less than a quarter of an octave are counted together.
BINS_PER_OCTAVE = 4
# Of the ends of a replica's answers, these quantiles are kept.
_QUANTILES = (0.5, 0.9, 1.0)
_DIGITS = 4


@dataclass(frozen=True)
class StepDetails:
    """A step of a run."""

    spans: list[Span]
    replicas: list[list[float]]
    """Of each replica: seconds after its generation began in which it had half, 90 % and all of its answers; empty
    where it had none."""
    lengths: dict[int, int]
    """How many answers a bin of lengths has (`length_bins`)."""


def length_bins(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """The bins of lengths [n] in tokens: one more for every quarter of an octave, from 0 for one token or none."""
    bins: NDArray[np.int64] = np.floor(BINS_PER_OCTAVE * np.log2(np.maximum(lengths, 1))).astype(np.int64)
    return bins


def read_details(run: Path) -> dict[int, StepDetails]:
    """By step, ascending; of a step that was made twice the newer. Raises StorageError."""
    lines = {line["step"]: line for line in json_lines(run / DETAILS) if "spans" in line}
    return {
        step: StepDetails([Span(*span) for span in line["spans"]], line["replicas"], dict(line["lengths"]))
        for step, line in sorted(lines.items())
    }


class Details(Watcher):
    """Writes the line of every step into the run's folder ``folder``."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._lines, self._num_replicas = JsonLines(folder / DETAILS), plan.num_engine_replicas
        self._step = 0

    def before_step(self, step: int) -> None:
        """Remember it."""
        self._step = step

    def on_phase(self, name: str) -> None:
        """Add a line, by which somebody elsewhere sees what the run does (`rltrain.tools.watch`)."""
        self._lines.log(self._step, {"phase": name, "at": round(time.time(), 1)})

    def on_step(self, made: Answered) -> Metrics:
        """Add the line of this step."""
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
        """Seconds after its generation began in which each replica had half, most and all of its answers of the batch.
        One that had none has an empty list."""
        served = samples[c.SERVED]
        ended_s, engines = samples[c.ENDED_S][served], samples[c.ENGINE][served]
        own = (ended_s[engines == place] for place in range(self._num_replicas))
        return [np.quantile(ends, _QUANTILES).round(_DIGITS).tolist() if len(ends) else [] for ends in own]

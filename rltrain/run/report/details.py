"""``details.jsonl``: what pictures of a step need beside its metrics. `rltrain.run.watchers.details` writes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rltrain.base.storage import json_lines
from rltrain.trainer.timing import Span

DETAILS = "details.jsonl"
# Lengths that differ by less than a quarter of an octave are counted together.
BINS_PER_OCTAVE = 4


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

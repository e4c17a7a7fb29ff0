"""Progress of a run: the driver's part of a checkpoint."""

from __future__ import annotations

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

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
    """The driver's own state.

    batches_drawn: rounds of prompts drawn so far. kl_coef: weight of the KL in the reward. sampler: the sampler's
    state. in_flight: row, draw and age of the prompts that were drawn and not yet learnt from (`PromptLine.state`);
    answers: what these have of answers, in a file of its own. lengths: mean answer per prompt, by split. metrics: of
    the step, for a run that ends between the checkpoint and its line in metrics.jsonl.
    """

    batches_drawn: int = 0
    kl_coef: float | None = None
    sampler: dict[str, NDArray[Any]] = field(default_factory=dict)
    in_flight: list[list[int]] = field(default_factory=list)
    answers: Samples | None = None
    lengths: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

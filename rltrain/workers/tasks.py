"""What the driver asks of the workers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rltrain.algorithms.aggregation import Denominators
from rltrain.workers.rollout.base import Sampling


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step: the sizes of this rank's micro-batches, and the counts of the whole global mini-batch.

    has_old_log_probs: the old_log_prob pass held the samples. Otherwise the update takes the old log-probs from its own forward,
    which is valid only for the first mini-batch of a step: no optimizer step has been made before it.
    """

    micro_sizes: tuple[int, ...]
    denominators: Denominators
    has_old_log_probs: bool = True


@dataclass(frozen=True)
class GenerateTask:
    """Answer these prompts, ``num_samples`` times each. rows [p]: places in the prompt store.

    (seed, split, step, row, sample) decides every random number; step: one, or one a prompt [p]. order [p]: places of the prompts, the one
    to start first in front (None: as they are). call: a number that no other task of this run has. stream: hand the texts of a job
    out as soon as its last answer has ended (`take_finished`). enough: stop once that many prompts, among them those at places
    below ``must``, have all their answers. todo [p, num_samples]: the answers that are asked for (None: all).
    """

    split: str
    rows: NDArray[np.int32]
    num_samples: int
    sampling: Sampling
    seed: int
    step: int | NDArray[np.int64]
    order: NDArray[np.int32] | None = None
    call: int = 0
    stream: bool = False
    enough: int | None = None
    must: int = 0
    todo: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class Finished:
    """Answers that have ended while others are generated: place of the prompt and sample [k] of each text; done: no more will come."""

    place: NDArray[np.int64]
    sample: NDArray[np.int64]
    done: bool


@dataclass(frozen=True)
class UpdateTask:
    """The actor's update in one step.

    Token advantages are whitened by (A - shift) * scale; importance weights are multiplied by weight_scale. noise_seed: decides
    the random part of a selection over tokens.
    """

    mini_batches: tuple[MiniBatch, ...]
    learning_rate: float
    shift: float = 0.0
    scale: float = 1.0
    weight_scale: float = 1.0
    noise_seed: int = 0

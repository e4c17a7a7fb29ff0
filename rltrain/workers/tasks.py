"""The tasks that the driver hands to the workers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rltrain.algorithms.aggregation import Denominators
from rltrain.workers.rollout.contract import Sampling


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step: the sizes of this rank's micro-batches, and the counts of the whole global mini-batch."""

    micro_sizes: tuple[int, ...]
    denominators: Denominators
    has_old_log_probs: bool = True
    """The old_log_prob pass covered the samples. Otherwise the update takes the old log-probs from its own forward.
    They are the old policy's only in the first mini-batch of a step, before an optimizer step is made; later ones come
    so where the loss reads none."""


@dataclass(frozen=True)
class SaveTask:
    """Save a role into ``folder``."""

    folder: str
    copies: bool = False
    """Of everything, where there is room, so that training may go on meanwhile."""
    export: str = ""
    """Folder of the policy as a Hugging Face model with ``card`` as README.md; "": none."""
    card: str = ""


@dataclass(frozen=True)
class Written:
    """What a rank has written."""

    digests: dict[str, str]
    """XXH3 by file."""
    problems: list[str]
    """Of the exported model."""


@dataclass(frozen=True)
class GenerateTask:
    """Answer these prompts, ``num_samples`` times each.

    (seed, split, step, row, sample) decides every random number; step is one number, or one per prompt [p].
    """

    split: str
    rows: NDArray[np.int32]
    """[p]: places in the prompt store."""
    num_samples: int
    sampling: Sampling
    seed: int
    step: int | NDArray[np.int64]
    order: NDArray[np.int32] | None = None
    """[p]: prompt indices, the first to start in front (None: as they are)."""
    call: int = 0
    """Unique within the run, the prefix of the replicas' shared counters."""
    stream: bool = False
    """Texts are handed out as soon as all answers to a prompt have ended (`take_finished`)."""
    enough: int | None = None
    """Generation stops when this many prompts are complete and the first ``must`` are among them."""
    must: int = 0
    todo: NDArray[np.bool_] | None = None
    """[p, num_samples]: the answers that are asked for (None: all)."""
    is_learnt_from: bool = True
    """The trainer will read the answers, and with them the images of their prompts."""


@dataclass(frozen=True)
class Finished:
    """Answers that ended while others are generated: prompt index and sample [k] per text."""

    place: NDArray[np.int64]
    sample: NDArray[np.int64]
    done: bool
    """No more will come."""


@dataclass(frozen=True)
class TurnAdvantages:
    """Of the turns of a rank's samples, end to end."""

    advantages: NDArray[np.float64]
    tokens: NDArray[np.int64]
    """Of the policy, per turn."""


@dataclass(frozen=True)
class UpdateTask:
    """The actor's update in one step.

    Token advantages are whitened by (A - shift) * scale; importance weights are multiplied by weight_scale.
    noise_seed decides the random part of a selection over tokens; entropy_coeff is the weight of the entropy bonus.
    """

    mini_batches: tuple[MiniBatch, ...]
    learning_rate: float
    shift: float = 0.0
    scale: float = 1.0
    weight_scale: float = 1.0
    noise_seed: int = 0
    entropy_coeff: float = 0.0

"""Tasks that the driver sends to the workers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rltrain.algorithms.aggregation import Denominators
from rltrain.workers.rollout.contract import Sampling


@dataclass(frozen=True)
class MiniBatch:
    """Mini-batch of an optimizer step: this rank's micro-batch sizes, and the denominators of the global mini-batch."""

    micro_sizes: tuple[int, ...]
    denominators: Denominators
    has_old_log_probs: bool = True
    """True if the old_log_prob pass covered the samples.

    Otherwise the update uses the log-probs of its forward pass. They equal the old policy's only in the first
    mini-batch of a step, before any optimizer step; for later mini-batches this is False only if the loss does not read
    old log-probs.
    """


@dataclass(frozen=True)
class SaveTask:
    """Save of a role into ``folder``."""

    folder: str
    copies: bool = False
    """True to copy everything first, if memory allows, so that training may continue."""
    export: str = ""
    """Folder for the policy as a Hugging Face model with ``card`` as README.md; "": no export."""
    card: str = ""


@dataclass(frozen=True)
class Written:
    """Files written by a rank."""

    digests: dict[str, str]
    """XXH3 by file."""
    problems: list[str]
    """Problems of the exported model."""


@dataclass(frozen=True)
class GenerateTask:
    """Generation of ``num_samples`` responses for each prompt.

    (seed, split, step, row, sample) seeds every random number; step is one number, or one per prompt [p].
    """

    split: str
    rows: NDArray[np.int32]
    """[p]: rows in the prompt store."""
    num_samples: int
    sampling: Sampling
    seed: int
    step: int | NDArray[np.int64]
    order: NDArray[np.int32] | None = None
    """[p]: prompt indices in starting order (None: as given)."""
    call: int = 0
    """Number of this call in the run: prefix of the replicas' shared counters."""
    stream: bool = False
    """Return texts as soon as all responses to a prompt have ended (`take_finished`)."""
    target_complete: int | None = None
    """Stop when this many prompts are complete, including the first ``num_required``."""
    num_required: int = 0
    pending_mask: NDArray[np.bool_] | None = None
    """[p, num_samples]: requested responses (None: all)."""
    is_learnt_from: bool = True
    """True if the trainer will read the responses, with the images of their prompts."""


@dataclass(frozen=True)
class Finished:
    """Responses that ended during generation: prompt index and sample [k] per text."""

    prompt_index: NDArray[np.int64]
    sample: NDArray[np.int64]
    done: bool
    """True if no more will follow."""


@dataclass(frozen=True)
class TurnAdvantages:
    """Advantages of the turns of a rank's samples, concatenated."""

    advantages: NDArray[np.float64]
    tokens: NDArray[np.int64]
    """Policy tokens per turn."""


@dataclass(frozen=True)
class UpdateTask:
    """Update of the actor in one step.

    Token advantages are whitened by (A - shift) * scale; importance weights are multiplied by weight_scale.
    """

    mini_batches: tuple[MiniBatch, ...]
    learning_rate: float
    shift: float = 0.0
    scale: float = 1.0
    weight_scale: float = 1.0
    noise_seed: int = 0
    """Seed of the random part of a token selection."""
    entropy_coeff: float = 0.0
    """Coefficient of the entropy bonus."""

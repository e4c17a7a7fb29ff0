"""What the driver asks of the workers."""

from __future__ import annotations

from dataclasses import dataclass

from rltrain.algorithms.aggregation import Denominators
from rltrain.workers.rollout.base import Sampling


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step: the sizes of this rank's micro-batches, and the counts of the whole global mini-batch.

    scored: the samples have their ``old_log_probs``. Otherwise no optimizer step lies in between, and those of the update's
    own forward are the old ones.
    """

    micro_sizes: tuple[int, ...]
    denominators: Denominators
    scored: bool = True


@dataclass(frozen=True)
class GenerateTask:
    """Answer these prompts. rows: places in the prompt store; (seed, step, row, sample) decides every random number.

    stream: hand the texts of a prompt out as soon as its last answer has ended (`take_finished`).
    """

    split: str
    rows: tuple[int, ...]
    sampling: Sampling
    seed: int
    step: int
    stream: bool = False


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

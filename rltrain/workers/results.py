"""Results of calls that travel to the driver, beside the objects that stay in the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from rltrain.algorithms.moments import Moments

Array = NDArray[Any]


@dataclass(frozen=True)
class PassNumbers:
    """Of a pass over samples. per_sample: numbers [n]. moments: per quantity, of tokens or of answers."""

    per_sample: dict[str, Array] = field(default_factory=dict)
    moments: dict[str, Moments] = field(default_factory=dict)


@dataclass(frozen=True)
class UpdateNumbers:
    """Of an update; arrays have one entry per optimizer step.

    shares: parts of the loss, which add up over ranks. token_sums: likewise, to be divided by the tokens of the
    mini-batch. grad_norm, skipped (1 = the numbers were not finite): the same on all ranks. measured: moments of the
    first mini-batch, before any step. memory_gb: peaks, by metric.
    """

    grad_norm: Array
    skipped: Array
    shares: dict[str, Array] = field(default_factory=dict)
    token_sums: dict[str, Array] = field(default_factory=dict)
    measured: dict[str, Moments] = field(default_factory=dict)
    memory_gb: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SyncReport:
    """Of a weight sync. gigabytes: taken over by the engine of this rank.

    canary_gap: mean |log pi_engine - log pi_trainer| over the tokens of a fixed text, both at temperature 1.
    """

    seconds: float
    gigabytes: float
    canary_gap: float


@dataclass(frozen=True)
class GenerationNumbers:
    """Of a generation. per_sample: numbers of the answers that this rank returns, ``slot`` among them, or nothing.

    seconds: by phase. sync: of the weights, where they had changed. image_bytes: of pixels that the trainer gets.
    num_damaged: answers that were emptied, because the engine gave them tokens or log-probs that cannot be.
    """

    seconds: dict[str, float]
    sync: SyncReport | None = None
    per_sample: dict[str, Array] = field(default_factory=dict)
    image_bytes: int = 0
    num_damaged: int = 0


def largest(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The largest of each number over ranks, which all have the same ones."""
    return {name: max(float(part[name]) for part in parts) for name in parts[0]}

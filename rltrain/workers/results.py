"""Results of calls that travel to the driver, beside the objects that stay in the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rltrain.algorithms.moments import Moments

Array = NDArray[Any]
# The part of a generation in which an engine has nothing running, because all of its conversations wait for an answer.
WAIT = "wait_for_tools"


@dataclass(frozen=True)
class PassNumbers:
    """Of a pass over samples."""

    per_sample: dict[str, Array] = field(default_factory=dict)
    """Numbers [n]."""
    moments: dict[str, Moments] = field(default_factory=dict)
    """Per quantity, of tokens or of answers."""


@dataclass(frozen=True)
class UpdateNumbers:
    """Of an update; arrays have one entry per optimizer step."""

    grad_norm: Array
    """The same on all ranks."""
    skipped: Array
    """1: the numbers were not finite. The same on all ranks."""
    shares: dict[str, Array] = field(default_factory=dict)
    """Parts of the loss, which add up over ranks."""
    token_sums: dict[str, Array] = field(default_factory=dict)
    """Likewise, to be divided by the tokens of the mini-batch."""
    measured: dict[str, Moments] = field(default_factory=dict)
    """Moments of the first mini-batch, before any step."""
    memory_gb: dict[str, float] = field(default_factory=dict)
    """Peaks, by metric."""
    overflowed: Array = field(default_factory=lambda: np.zeros(0))
    """1: the step was not made because gradients overflowed float16, and the loss scale was halved. The same on all
    ranks."""
    loss_scale: float | None = None
    """After the last step; None in other dtypes."""
    expert_load: Array | None = None
    """Tokens that went to each expert [layers, experts] in all forwards, over all ranks; None where it is not measured.
    The same on all ranks."""

    @property
    def num_made(self) -> int:
        """Optimizer steps that were made, those of mini-batches without a loss token among them."""
        return len(self.skipped) - int(self.skipped.sum() + self.overflowed.sum())


@dataclass(frozen=True)
class SyncReport:
    """Of a weight sync."""

    seconds: float
    gigabytes: float
    """Taken over by the engine of this rank."""
    canary_gap: float
    """Mean |log pi_engine - log pi_trainer| over the tokens of a fixed text, both at temperature 1."""


@dataclass(frozen=True)
class GenerationNumbers:
    """Of a generation."""

    seconds: dict[str, float]
    """By phase."""
    sync: SyncReport | None = None
    """Of the weights, where they had changed."""
    per_sample: dict[str, Array] = field(default_factory=dict)
    """Numbers of the answers that this rank returns, ``slot`` among them, or nothing."""
    image_bytes: int = 0
    """Of pixels that the trainer gets."""
    num_damaged: int = 0
    """Answers that were emptied, because the engine gave them tokens or log-probs that cannot be."""
    num_begun_anew: int = 0
    """Trajectories that a later step begins again (rollout.tail=carry_over)."""
    num_follow_up_tokens: int = 0
    """With which turns behind the first began (`Conversations.num_follow_up_tokens`)."""
    num_reused_tokens: int = 0
    """Of these, those that the engine did not compute again."""
    failure: str = ""
    """Why the first trajectory that could not go on could not (`columns.AGENT_FAILED`)."""


@dataclass(frozen=True)
class JudgeNumbers:
    """Of a judge's replies."""

    num_tokens: int
    """Of messages and replies of this rank."""
    seconds: float
    """The weights' way to the engine among them."""


def largest(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The largest of each number over ranks, which all have the same ones."""
    return {name: max(float(part[name]) for part in parts) for name in parts[0]}

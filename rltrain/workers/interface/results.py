"""Results of calls that are sent to the driver, in addition to the objects that stay in the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rltrain.algorithms.moments import Moments

Array = NDArray[Any]
# Seconds in which an engine is idle because all its conversations wait for tools.
WAIT = "wait_for_tools"


@dataclass(frozen=True)
class PassNumbers:
    """Results of a pass over samples."""

    per_sample: dict[str, Array] = field(default_factory=dict)
    """Numbers per sample [n]."""
    moments: dict[str, Moments] = field(default_factory=dict)
    """Moments per quantity, over tokens or responses."""


@dataclass(frozen=True)
class UpdateNumbers:
    """Results of an update; arrays have one entry per optimizer step."""

    grad_norm: Array
    """Gradient norm. Equal on all ranks."""
    skipped: Array
    """1: the step was skipped, because loss or gradient was not finite. Equal on all ranks."""
    shares: dict[str, Array] = field(default_factory=dict)
    """Parts of the loss, to be summed over ranks."""
    token_sums: dict[str, Array] = field(default_factory=dict)
    """Token sums, to be summed over ranks and divided by the tokens of the mini-batch."""
    measured: dict[str, Moments] = field(default_factory=dict)
    """Moments of the first mini-batch, before any optimizer step."""
    maxima: dict[str, float] = field(default_factory=dict)
    """Metrics of which the largest rank counts: memory peaks, and seconds waited for rows."""
    overflowed: Array = field(default_factory=lambda: np.zeros(0))
    """1: the step was skipped because gradients overflowed float16; the loss scale was halved. Equal on all ranks."""
    loss_scale: float | None = None
    """Loss scale after the last step; None in other dtypes."""
    expert_load: Array | None = None
    """Tokens per expert [layers, experts] in all forward passes and ranks; None if not measured. Equal on all ranks."""

    @property
    def num_made(self) -> int:
        """Number of optimizer steps, including mini-batches without a loss token."""
        return len(self.skipped) - int(self.skipped.sum() + self.overflowed.sum())


@dataclass(frozen=True)
class SyncReport:
    """Results of a weight sync."""

    seconds: float
    gigabytes: float
    """GiB of weights that this rank received for its engine."""
    canary_gap: float
    """Mean |log pi_engine - log pi_trainer| over the tokens of a fixed text, both at temperature 1."""


@dataclass(frozen=True)
class GenerationNumbers:
    """Results of a generation."""

    seconds: dict[str, float]
    """Seconds by phase."""
    sync: SyncReport | None = None
    """Report of the weight sync, if there was one."""
    per_sample: dict[str, Array] = field(default_factory=dict)
    """Numbers of the samples that this rank returns, including ``slot``; empty if it returns none."""
    image_bytes: int = 0
    """Bytes of pixels sent to the trainer."""
    num_damaged: int = 0
    """Responses that were emptied because of invalid tokens or log-probs."""
    num_begun_anew: int = 0
    """Trajectories that a later step restarts (rollout.tail=carry_over)."""
    num_follow_up_tokens: int = 0
    """Context tokens at the start of turns after the first (`Conversations.num_follow_up_tokens`)."""
    num_reused_tokens: int = 0
    """Follow-up tokens that the engine did not recompute."""
    failure: str = ""
    """Error of the first failed trajectory (`columns.AGENT_FAILED`)."""


@dataclass(frozen=True)
class JudgeNumbers:
    """Results of a judge's replies."""

    num_tokens: int
    """Tokens of messages and replies of this rank."""
    seconds: float
    """Seconds, including the weight sync."""


def largest(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the maximum of each number over ranks, which all have the same keys."""
    return {name: max(float(part[name]) for part in parts) for name in parts[0]}

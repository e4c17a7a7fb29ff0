"""Advantage estimators: how much better an answer was than expected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-6


@dataclass(frozen=True)
class OutcomeInputs:
    """One number an answer.

    scores: reward of each answer [n], float. groups: which prompt each answers [n], int64; answers to one prompt share it.
    """

    scores: Tensor
    groups: Tensor


AdvantageEstimator = Callable[[OutcomeInputs, bool], Tensor]
ADVANTAGE_ESTIMATORS: dict[str, AdvantageEstimator] = {}


def advantage_estimator(name: str) -> Callable[[AdvantageEstimator], AdvantageEstimator]:
    """Register a function as ``algorithm.adv_estimator=name``."""

    def register(function: AdvantageEstimator) -> AdvantageEstimator:
        ADVANTAGE_ESTIMATORS[name] = function
        return function

    return register


@advantage_estimator("grpo")
def grpo(inputs: OutcomeInputs, norm_by_std: bool) -> Tensor:
    """A_i = (r_i - mean of group) / (std of group + 1e-6)   (Shao et al. 2024, DeepSeekMath, section 4.1).

    The standard deviation is the unbiased one. ``norm_by_std=False``: A_i = r_i - mean of group (Liu et al. 2025,
    Dr. GRPO). Returns one advantage an answer [n]; every token of the answer has it.
    """
    groups = inputs.groups.unique(return_inverse=True)[1]
    count = torch.zeros(int(groups.max()) + 1, dtype=inputs.scores.dtype).index_add(
        0, groups, torch.ones_like(inputs.scores)
    )
    mean = torch.zeros_like(count).index_add(0, groups, inputs.scores) / count
    centred = inputs.scores - mean[groups]
    if not norm_by_std:
        return centred
    variance = torch.zeros_like(count).index_add(0, groups, centred.square()) / (count - 1).clamp(min=1)
    return centred / (variance.sqrt()[groups] + EPSILON)

"""Normalisation of rewards and advantages over a batch, on the driver, which has one number per response.

All tokens of a response share its advantage. So means and deviations over tokens equal moments over responses weighted
by length, and the driver needs no tokens.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rltrain.algorithms.groups import Groups
from rltrain.algorithms.moments import Moments
from rltrain.algorithms.shapes import PerResponse, ResponseInts
from rltrain.config.schema.algorithm import AdvNormConfig, AlgorithmConfig

Numbers = TypeVar("Numbers", Tensor, NDArray[np.float64])
# AReaL's epsilon of the standard deviation.
_STD_EPSILON = 1e-5


def shaped_reward(scores: Numbers, cfg: AlgorithmConfig) -> Numbers:
    """Return (score + reward_bias) * reward_scaling: [n] -> [n]. The keys have the same meaning in AReaL."""
    return (scores + cfg.reward_bias) * cfg.reward_scaling


def normalise(advantages: PerResponse, groups: ResponseInts, lengths: ResponseInts, cfg: AdvNormConfig) -> PerResponse:
    """Return (A - mean) / (std + 1e-5), each over the tokens of the batch or of a group, as AReaL's adv_norm.

    advantages, groups, lengths: [n]. ``mean_level`` and ``std_level``: batch or group; None skips the step. The
    standard deviation is unbiased and computed after the first step; with fewer than two tokens it is 1.
    """
    lengths = lengths.to(advantages.dtype)
    if cfg.mean_level:
        of = Groups(_members(groups, cfg.mean_level))
        mean = of.sum(lengths * advantages) / of.sum(lengths).clamp(min=1)
        # As in `Groups.centred`: a mean of equal numbers may have a rounding error.
        advantages = torch.where(of.flat(advantages) & ~of.alone, torch.zeros_like(mean), advantages - mean)
    if cfg.std_level:
        of = Groups(_members(groups, cfg.std_level))
        tokens = of.sum(lengths)
        deviations = advantages - of.sum(lengths * advantages) / tokens.clamp(min=1)
        variance = of.sum(lengths * deviations.square()) / (tokens - 1).clamp(min=1)
        advantages = torch.where(tokens < 2, advantages, advantages / (variance.sqrt() + _STD_EPSILON))
    return advantages


def _members(groups: ResponseInts, level: str) -> ResponseInts:
    return groups if level == "group" else torch.zeros_like(groups)


def whiten(advantages: PerResponse, lengths: ResponseInts) -> PerResponse:
    """Whiten to mean 0 and unbiased variance 1 over tokens; every token of response i has ``advantages[i]``."""
    weights = lengths.to(advantages.dtype)
    total, squares = (weights * advantages).sum(), (weights * advantages.square()).sum()
    numbers = weights.sum(), total, squares, advantages.max(), advantages.min()
    shift, scale = Moments(*map(float, numbers)).whitening()
    return (advantages - shift) * scale

"""Policy losses: one number a token, before aggregation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PolicyLossInputs:
    """All of shape [tokens], over the answers of one micro-batch laid end to end; only ``log_probs`` carries gradient."""

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor


@dataclass(frozen=True)
class ClipRange:
    """PPO's clipping: ratio within [1 - low, 1 + high]; for negative advantages the loss is at most -A * dual (dual clip)."""

    low: float
    high: float
    dual: float


@dataclass(frozen=True)
class PolicyLoss:
    """token_losses [tokens], and per-token statistics [tokens] that are averaged over all tokens of the mini-batch."""

    token_losses: Tensor
    statistics: dict[str, Tensor]


PolicyLossFunction = Callable[[PolicyLossInputs, ClipRange], PolicyLoss]
POLICY_LOSSES: dict[str, PolicyLossFunction] = {}


def policy_loss(name: str) -> Callable[[PolicyLossFunction], PolicyLossFunction]:
    """Register a function as ``actor.policy_loss.loss_mode=name``."""

    def register(function: PolicyLossFunction) -> PolicyLossFunction:
        POLICY_LOSSES[name] = function
        return function

    return register


@policy_loss("vanilla")
def vanilla(inputs: PolicyLossInputs, clip: ClipRange) -> PolicyLoss:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), r = pi / pi_old   (Schulman et al. 2017, eq. 7).

    With A < 0 the loss is bounded by -A * dual (Ye et al. 2020, dual-clip PPO, eq. 5). log r is clamped to +-20.
    """
    log_ratio = (inputs.log_probs - inputs.old_log_probs).clamp(-20, 20)
    ratio = log_ratio.exp()
    unclipped = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    pessimistic = torch.maximum(unclipped, clipped)
    bound = -inputs.advantages * clip.dual
    losses = torch.where(inputs.advantages < 0, torch.minimum(pessimistic, bound), pessimistic)
    with torch.no_grad():
        statistics = {
            "ppo_kl": -log_ratio,
            "pg_clipfrac": (clipped > unclipped).float(),
            "pg_clipfrac_lower": ((pessimistic > bound) & (inputs.advantages < 0)).float(),
        }
    return PolicyLoss(losses, statistics)

"""Inputs and outputs of policy losses, and the table of losses.

Notation of all losses: r = pi / pi_old of a token, A its advantage, [1 - low, 1 + high] the clip range, sg[]
stop-gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rltrain.algorithms.shapes import NumberOrMask, PerToken, TokenMask
from rltrain.common.columns.ragged import Ragged
from rltrain.config.schema import ActorConfig
from rltrain.config.schema.declarations import LossTraits, declared

# verl's bound: exp(20) and its products with advantages are finite in float32. Beyond it a token has no gradient.
LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class PolicyLossInputs:
    """Micro-batch of complete responses, concatenated; all [tokens], only ``log_probs`` carries gradient."""

    log_probs: PerToken
    old_log_probs: PerToken
    advantages: PerToken
    mask: Ragged
    """1 for loss tokens, with the length of every response."""
    selected: TokenMask | None = None
    """Tokens selected over the whole mini-batch (only for losses with a selection)."""
    group_weights: PerToken | None = None
    """Weight of the token's response, computed from all responses to its prompt (only for losses with group
    weights)."""

    @property
    def log_ratio(self) -> PerToken:
        """log r, clamped to +-20."""
        return (self.log_probs - self.old_log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    def sequence_sum(self, values: PerToken) -> PerToken:
        """Return, for each token, the sum over the loss tokens of its response."""
        return self.mask.broadcast(self.mask.like(values * self.mask.values).sum()).values

    def sequence_mean(self, values: PerToken) -> PerToken:
        """Return, for each token, the mean over the loss tokens of its response."""
        return self.sequence_sum(values) / self.mask.broadcast(self.mask.sum().clamp(min=1)).values


@dataclass(frozen=True)
class PolicyLoss:
    """Token losses [tokens], and per-token statistics [tokens], to be averaged over all tokens of the mini-batch."""

    token_losses: PerToken
    statistics: dict[str, PerToken]
    per_answer: bool = False
    """True if every token has the loss of its response. The importance weight is then also computed per response."""


@dataclass(frozen=True)
class BatchMeans:
    """Means over all tokens of the global mini-batch."""

    advantage: float
    log_prob: float


PolicyLossFunction = Callable[[PolicyLossInputs, ActorConfig], PolicyLoss]


@dataclass(frozen=True)
class Selection:
    """Selection of the tokens with the smallest keys in the global mini-batch, which a loss treats differently.

    keys(inputs, noise, means, cfg) -> [tokens], infinite for tokens that are not candidates; noise [tokens] is uniform
    in [0, 1) and a function of the token only. Number of selected tokens: the fraction share(cfg) of all tokens (at
    least one), or if share is None, as many as possible while their mean key is at most largest_mean(cfg).
    """

    keys: Callable[[PolicyLossInputs, Tensor, BatchMeans, ActorConfig], Tensor]
    share: Callable[[ActorConfig], float] | None = None
    largest_mean: Callable[[ActorConfig], float] | None = None


# (scores, labels, groups, cfg) -> weights in the loss of a group, all [responses of the global mini-batch]. Scores are
# mean_t log r, labels the signs of the advantages.
GroupWeights = Callable[[Tensor, Tensor, Tensor, ActorConfig], Tensor]


@dataclass(frozen=True)
class PolicyLossEntry:
    """Policy loss with its optional token selection and response weights."""

    function: PolicyLossFunction
    selection: Selection | None = None
    group_weights: GroupWeights | None = None


# Built-in losses by name. `config.schema.declarations` declares their properties.
POLICY_LOSSES: dict[str, PolicyLossEntry] = {}


def built_in(
    selection: Selection | None = None, group_weights: GroupWeights | None = None
) -> Callable[[PolicyLossFunction], PolicyLossFunction]:
    """Register a function as ``actor.policy_loss.loss_mode=<its name>``."""

    def register(function: PolicyLossFunction) -> PolicyLossFunction:
        POLICY_LOSSES[function.__name__] = PolicyLossEntry(function, selection, group_weights)
        return function

    return register


def policy_loss(
    *, selection: Selection | None = None, silent_at_zero: bool = False
) -> Callable[[PolicyLossFunction], PolicyLossFunction]:
    """Declare a custom policy loss.

    selection: selects tokens of the mini-batch, which the loss gets as ``inputs.selected``. silent_at_zero: a response
    with zero advantage has no gradient.
    """

    def declare(function: PolicyLossFunction) -> PolicyLossFunction:
        function.selection = selection  # type: ignore[attr-defined]
        # False by default: the update may skip only samples that cannot have a gradient.
        return declared(function, LossTraits(selects=selection is not None, silent_at_zero=silent_at_zero))

    return declare


def clip_range(cfg: ActorConfig) -> tuple[float, float]:
    """Return (low, high): ``clip_ratio`` for both, unless ``clip_ratio_low`` or ``clip_ratio_high`` is set."""
    low = cfg.clip_ratio if cfg.clip_ratio_low is None else cfg.clip_ratio_low
    high = cfg.clip_ratio if cfg.clip_ratio_high is None else cfg.clip_ratio_high
    return low, high


def ppo(ratio: PerToken, advantages: PerToken, cfg: ActorConfig) -> tuple[PerToken, PerToken]:
    """Return -A r and -A clip(r, 1 - low, 1 + high), whose maximum is the loss (Schulman et al. 2017, eq. 7)."""
    low, high = clip_range(cfg)
    return -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)


def dual_clip(ratio: PerToken, advantages: PerToken, cfg: ActorConfig) -> tuple[PerToken, dict[str, TokenMask]]:
    """Compute max(-A r, -A clip(r, 1 - low, 1 + high)), at most -A clip_ratio_c if A < 0.

    Also returns masks of the tokens to which each clip applies.

    Schulman et al. 2017, eq. 7; Ye et al. 2020, dual-clip PPO, eq. 5.
    """
    unclipped, clipped = ppo(ratio, advantages, cfg)
    # Within the clip range both terms are equal. torch then gives half of the gradient to each, so the sum is correct.
    pessimistic = torch.maximum(unclipped, clipped)
    # With A < 0 the clip does not bound a growing ratio, and a single token could dominate the gradient.
    bound = -advantages * cfg.clip_ratio_c
    losses = torch.where(advantages < 0, torch.minimum(pessimistic, bound), pessimistic)
    is_held = (pessimistic > bound) & (advantages < 0)
    return losses, {"pg_clipfrac": clipped > unclipped, "pg_clipfrac_lower": is_held}


def statistics_of(inputs: PolicyLossInputs, **terms: NumberOrMask) -> dict[str, PerToken]:
    """Return statistics per token [tokens]: ``ppo_kl`` = -log r, and ``terms``."""
    return {"ppo_kl": -inputs.log_ratio.detach(), **{name: value.detach().float() for name, value in terms.items()}}

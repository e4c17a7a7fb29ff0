"""What a policy loss gets and returns, and the table of losses.

Notation of all losses: r = pi / pi_old of a token, A its advantage, [1 - low, 1 + high] the clip range, sg[] no
gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rltrain.base.columns.ragged import Ragged
from rltrain.config.schema import ActorConfig
from rltrain.config.schema.declarations import LossTraits, declared

# verl's bound: exp(20) is finite in float32, and so are its products with advantages. Beyond it a token has no
# gradient.
LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class PolicyLossInputs:
    """One micro-batch of whole answers, laid end to end; all [tokens], only ``log_probs`` carries gradient."""

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Ragged
    """1 where a token counts, with the length of every answer."""
    selected: Tensor | None = None
    """Tokens chosen over the whole mini-batch, for losses that ask for a selection."""
    group_weights: Tensor | None = None
    """The weight of the answer of each token, from all answers to its prompt, for losses that ask for it."""

    @property
    def log_ratio(self) -> Tensor:
        """log r, clamped to +-20."""
        return (self.log_probs - self.old_log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Sum over the tokens that count, of the answer that each token belongs to."""
        return self.mask.broadcast(self.mask.like(values * self.mask.values).sum()).values

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Mean over the tokens that count, of the answer that each token belongs to."""
        return self.sequence_sum(values) / self.mask.broadcast(self.mask.sum().clamp(min=1)).values


@dataclass(frozen=True)
class PolicyLoss:
    """token_losses [tokens], and per-token statistics [tokens] that are averaged over all tokens of the mini-batch."""

    token_losses: Tensor
    statistics: dict[str, Tensor]
    per_answer: bool = False
    """Every token of an answer carries the answer's loss, which gets one importance weight too."""


@dataclass(frozen=True)
class BatchMeans:
    """Means over all tokens of the global mini-batch."""

    advantage: float
    log_prob: float


PolicyLossFunction = Callable[[PolicyLossInputs, ActorConfig], PolicyLoss]


@dataclass(frozen=True)
class Selection:
    """Which tokens of the global mini-batch a loss treats differently: those with the smallest keys.

    keys(inputs, noise, means, cfg) -> [tokens], infinite for tokens that are no candidates; noise [tokens] is uniform
    in [0, 1) and depends on the token alone. How many: share(cfg) of all tokens (at least one token), or without a
    share as many as have keys with a mean of at most largest_mean(cfg).
    """

    keys: Callable[[PolicyLossInputs, Tensor, BatchMeans, ActorConfig], Tensor]
    share: Callable[[ActorConfig], float] | None = None
    largest_mean: Callable[[ActorConfig], float] | None = None


# (scores, labels, groups, cfg) -> weights in the loss of a group, all [answers of the global mini-batch]. Scores are
# mean_t log r, labels the signs of the advantages.
GroupWeights = Callable[[Tensor, Tensor, Tensor, ActorConfig], Tensor]


@dataclass(frozen=True)
class PolicyLossEntry:
    """A loss and, where it asks for them, its selection over the mini-batch and the weights of its answers."""

    function: PolicyLossFunction
    selection: Selection | None = None
    group_weights: GroupWeights | None = None


# The built-in functions; their declarations are those of their names in `config.schema.declarations`.
POLICY_LOSSES: dict[str, PolicyLossEntry] = {}


def built_in(
    selection: Selection | None = None, group_weights: GroupWeights | None = None
) -> Callable[[PolicyLossFunction], PolicyLossFunction]:
    """Make a function ``actor.policy_loss.loss_mode=<its name>``."""

    def register(function: PolicyLossFunction) -> PolicyLossFunction:
        POLICY_LOSSES[function.__name__] = PolicyLossEntry(function, selection, group_weights)
        return function

    return register


def policy_loss(
    *, selection: Selection | None = None, silent_at_zero: bool = False
) -> Callable[[PolicyLossFunction], PolicyLossFunction]:
    """Declare a function of your own.

    selection: tokens of the mini-batch that it gets as ``selected``. silent_at_zero: an answer without advantage has
    no gradient.
    """

    def declare(function: PolicyLossFunction) -> PolicyLossFunction:
        function.selection = selection  # type: ignore[attr-defined]
        # Not silent unless it says so: what is left out of the update must be a sample that could not have moved it.
        return declared(function, LossTraits(selects=selection is not None, silent_at_zero=silent_at_zero))

    return declare


def clip_range(cfg: ActorConfig) -> tuple[float, float]:
    """(low, high): ``clip_ratio`` alone, or the asymmetric pair where it is set."""
    low = cfg.clip_ratio if cfg.clip_ratio_low is None else cfg.clip_ratio_low
    high = cfg.clip_ratio if cfg.clip_ratio_high is None else cfg.clip_ratio_high
    return low, high


def ppo(ratio: Tensor, advantages: Tensor, cfg: ActorConfig) -> tuple[Tensor, Tensor]:
    """-A r and -A clip(r, 1 - low, 1 + high); the loss is the larger of the two (Schulman et al. 2017, eq. 7)."""
    low, high = clip_range(cfg)
    return -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)


def dual_clip(ratio: Tensor, advantages: Tensor, cfg: ActorConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), with A < 0 at most -A clip_ratio_c; and where either clip holds.

    Schulman et al. 2017, eq. 7; Ye et al. 2020, dual-clip PPO, eq. 5.
    """
    unclipped, clipped = ppo(ratio, advantages, cfg)
    # Within the clip range both are equal, and torch gives half of the gradient to each; the halves add up to it.
    pessimistic = torch.maximum(unclipped, clipped)
    # With A < 0 the clip does not hold a ratio that grows, and a single token could dominate the gradient.
    bound = -advantages * cfg.clip_ratio_c
    losses = torch.where(advantages < 0, torch.minimum(pessimistic, bound), pessimistic)
    is_held = (pessimistic > bound) & (advantages < 0)
    return losses, {"pg_clipfrac": clipped > unclipped, "pg_clipfrac_lower": is_held}


def statistics_of(inputs: PolicyLossInputs, **terms: Tensor) -> dict[str, Tensor]:
    """Statistics per token [tokens]: ``ppo_kl`` = -log r, and ``terms``."""
    return {"ppo_kl": -inputs.log_ratio.detach(), **{name: value.detach().float() for name, value in terms.items()}}

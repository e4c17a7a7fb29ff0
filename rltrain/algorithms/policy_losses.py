"""Policy losses: one number per token, before aggregation.

Notation: r = pi / pi_old of a token, A its advantage, [1 - low, 1 + high] the clip range, sg[] no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rltrain.base.columns.ragged import Ragged
from rltrain.base.plugin import is_plugin, load_plugin
from rltrain.config.schema import ActorConfig
from rltrain.config.schema.declarations import LOSS_KEY, LossTraits, declared

# verl's bound: exp(20) is finite in float32, and so are its products with advantages. Beyond it a token has no
# gradient.
_LOG_RATIO_BOUND = 20.0


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

    @property
    def log_ratio(self) -> Tensor:
        """log r, clamped to +-20."""
        return (self.log_probs - self.old_log_probs).clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Mean over the tokens that count, of the answer that each token belongs to."""
        masked = self.mask.like(values * self.mask.values)
        return self.mask.broadcast(masked.sum() / self.mask.sum().clamp(min=1)).values


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
    in [0, 1) and depends on the token alone. share(cfg): the share of all tokens to select (at least one token).
    """

    keys: Callable[[PolicyLossInputs, Tensor, BatchMeans, ActorConfig], Tensor]
    share: Callable[[ActorConfig], float]


@dataclass(frozen=True)
class PolicyLossEntry:
    """A loss and, where it asks for one, its selection over the mini-batch."""

    function: PolicyLossFunction
    selection: Selection | None = None


# The built-in functions; their declarations are those of their names in `config.schema.declarations`.
POLICY_LOSSES: dict[str, PolicyLossEntry] = {}


def built_in(selection: Selection | None = None) -> Callable[[PolicyLossFunction], PolicyLossFunction]:
    """Make a function of this file ``actor.policy_loss.loss_mode=<its name>``."""

    def register(function: PolicyLossFunction) -> PolicyLossFunction:
        POLICY_LOSSES[function.__name__] = PolicyLossEntry(function, selection)
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


def find_policy_loss(name: str) -> PolicyLossEntry:
    """The loss of ``actor.policy_loss.loss_mode``, which may be FILE.py:NAME."""
    if not is_plugin(name):
        return POLICY_LOSSES[name]
    function = load_plugin(LOSS_KEY, name)
    return PolicyLossEntry(function, getattr(function, "selection", None))


def clip_range(cfg: ActorConfig) -> tuple[float, float]:
    """(low, high): ``clip_ratio`` alone, or the asymmetric pair where it is set."""
    low = cfg.clip_ratio if cfg.clip_ratio_low is None else cfg.clip_ratio_low
    high = cfg.clip_ratio if cfg.clip_ratio_high is None else cfg.clip_ratio_high
    return low, high


def _ppo(ratio: Tensor, advantages: Tensor, cfg: ActorConfig) -> tuple[Tensor, Tensor]:
    """-A r and -A clip(r, 1 - low, 1 + high); the loss is the larger of the two (Schulman et al. 2017, eq. 7)."""
    low, high = clip_range(cfg)
    return -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)


def _statistics(inputs: PolicyLossInputs, **terms: Tensor) -> dict[str, Tensor]:
    return {"ppo_kl": -inputs.log_ratio.detach(), **{name: value.detach().float() for name, value in terms.items()}}


@built_in()
def vanilla(inputs: PolicyLossInputs, cfg: ActorConfig) -> PolicyLoss:
    """max(-A r, -A clip(r, 1 - low, 1 + high))   (Schulman et al. 2017, eq. 7).

    With A < 0 the loss is bounded by -A * clip_ratio_c (Ye et al. 2020, dual-clip PPO, eq. 5).
    """
    unclipped, clipped = _ppo(inputs.log_ratio.exp(), inputs.advantages, cfg)
    # Within the clip range both are equal, and torch gives half of the gradient to each; the halves add up to it.
    pessimistic = torch.maximum(unclipped, clipped)
    # With A < 0 the clip does not hold a ratio that grows, and a single token could dominate the gradient.
    bound = -inputs.advantages * cfg.clip_ratio_c
    losses = torch.where(inputs.advantages < 0, torch.minimum(pessimistic, bound), pessimistic)
    is_held = (pessimistic > bound) & (inputs.advantages < 0)
    return PolicyLoss(losses, _statistics(inputs, pg_clipfrac=clipped > unclipped, pg_clipfrac_lower=is_held))


@built_in()
def gspo(inputs: PolicyLossInputs, cfg: ActorConfig) -> PolicyLoss:
    """PPO's clip on the ratio of the whole answer, s = exp(mean_t log r_t)   (Zheng et al. 2025, GSPO-token).

    The token form of the ratio is s pi / sg[pi].
    """
    sequence = inputs.sequence_mean(inputs.log_ratio).detach()
    # The first two terms are 0 and carry the gradient of the token. 10 is verl's bound on log s; with A < 0 the clip
    # alone would set none.
    ratio = (inputs.log_probs - inputs.log_probs.detach() + sequence).clamp(max=10.0).exp()
    unclipped, clipped = _ppo(ratio, inputs.advantages, cfg)
    return PolicyLoss(torch.maximum(unclipped, clipped), _statistics(inputs, pg_clipfrac=clipped > unclipped))


@built_in()
def gpg(inputs: PolicyLossInputs, cfg: ActorConfig) -> PolicyLoss:
    """-A log pi: the plain policy gradient   (Chu et al. 2025, GPG)."""
    return PolicyLoss(-inputs.advantages * inputs.log_probs, _statistics(inputs))


@built_in()
def cispo(inputs: PolicyLossInputs, cfg: ActorConfig) -> PolicyLoss:
    """-sg[clip(r, 1 - low, 1 + high)] A log pi: the weight is clipped, no token is dropped   (MiniMax 2025, M1)."""
    low, high = clip_range(cfg)
    ratio = inputs.log_ratio.exp().detach()
    weight = ratio.clamp(1 - low, 1 + high)
    return PolicyLoss(-weight * inputs.advantages * inputs.log_probs, _statistics(inputs, pg_clipfrac=weight != ratio))


@built_in()
def sapo(inputs: PolicyLossInputs, cfg: ActorConfig) -> PolicyLoss:
    """-A (4 / tau) sigmoid(tau (r - 1)), a soft gate in place of a clip   (Gao et al. 2025, SAPO).

    tau is tau_pos for A > 0 and tau_neg otherwise.
    """
    ratio = inputs.log_ratio.exp()
    tau = torch.full_like(inputs.advantages, cfg.tau_neg).masked_fill(inputs.advantages > 0, cfg.tau_pos)
    return PolicyLoss(-inputs.advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau, _statistics(inputs))


@built_in()
def geo_mean(inputs: PolicyLossInputs, cfg: ActorConfig) -> PolicyLoss:
    """-A exp(mean_t clip(log r_t, -low, high)), the clip pessimistic by the sign of A   (Zhao et al. 2025, GMPO).

    A is the mean advantage of the answer. Every token of an answer carries the answer's loss, so seq-mean-token-mean is
    the paper's objective.
    """
    low, high = clip_range(cfg)
    log_ratio, sign = inputs.log_ratio, inputs.advantages.sign()
    bounded = log_ratio.clamp(-low, high)
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * bounded)
    # With A = 0 the sign would make the ratio 1 without a gradient; such a token counts with its own.
    ratio = inputs.sequence_mean(torch.where(sign == 0, log_ratio, pessimistic)).exp()
    losses = -inputs.sequence_mean(inputs.advantages) * ratio
    statistics = _statistics(inputs, pg_clipfrac=(pessimistic != log_ratio) & (sign != 0))
    return PolicyLoss(losses, statistics, per_answer=True)


def _covariance(inputs: PolicyLossInputs, means: BatchMeans) -> Tensor:
    return (inputs.advantages - means.advantage) * (inputs.log_probs.detach() - means.log_prob)


def _clip_cov_keys(inputs: PolicyLossInputs, noise: Tensor, means: BatchMeans, cfg: ActorConfig) -> Tensor:
    unclipped, clipped = _ppo(inputs.log_ratio.exp(), inputs.advantages, cfg)
    covariance = _covariance(inputs, means)
    within = (covariance > cfg.policy_loss.clip_cov_lb) & (covariance < cfg.policy_loss.clip_cov_ub)
    # The smallest keys are selected, so noise draws uniformly among the candidates, the same ones for any cut of the
    # mini-batch.
    return noise.masked_fill(~(within & (clipped <= unclipped) & (inputs.mask.values > 0)), torch.inf)


@built_in(Selection(_clip_cov_keys, lambda cfg: cfg.policy_loss.clip_cov_ratio))
def clip_cov(inputs: PolicyLossInputs, cfg: ActorConfig) -> PolicyLoss:
    """PPO without gradient on a few random tokens whose log-prob and advantage covary   (Cui et al. 2025, Clip-Cov).

    clip_cov_ratio of the mini-batch's tokens are selected, among those with a covariance within (clip_cov_lb,
    clip_cov_ub) that PPO would not clip.
    """
    assert inputs.selected is not None
    unclipped, clipped = _ppo(inputs.log_ratio.exp(), inputs.advantages, cfg)
    losses = torch.maximum(unclipped, clipped).masked_fill(inputs.selected, 0.0)
    return PolicyLoss(losses, _statistics(inputs, pg_clipfrac=(clipped > unclipped) | inputs.selected))


def _kl_cov_keys(inputs: PolicyLossInputs, noise: Tensor, means: BatchMeans, cfg: ActorConfig) -> Tensor:
    return (-_covariance(inputs, means)).masked_fill(inputs.mask.values == 0, torch.inf)


@built_in(Selection(_kl_cov_keys, lambda cfg: cfg.policy_loss.kl_cov_ratio))
def kl_cov(inputs: PolicyLossInputs, cfg: ActorConfig) -> PolicyLoss:
    """-A r, and + ppo_kl_coef |log r| on the kl_cov_ratio of tokens that covary most   (Cui et al. 2025, KL-Cov)."""
    assert inputs.selected is not None
    log_ratio = inputs.log_ratio
    penalty = cfg.policy_loss.ppo_kl_coef * log_ratio.abs()
    losses = -inputs.advantages * log_ratio.exp() + penalty * inputs.selected
    return PolicyLoss(losses, _statistics(inputs, pg_clipfrac=inputs.selected))


def _dppo(inputs: PolicyLossInputs, divergence: Tensor, cfg: ActorConfig) -> PolicyLoss:
    """-sg[min(r, clip_ratio_c)] A log pi, without tokens that moved beyond the clip range in the direction of A."""
    low, high = clip_range(cfg)
    ratio = inputs.log_ratio.exp().detach()
    # A token that moved against its advantage keeps its gradient, which brings it back.
    up = (inputs.advantages > 0) & (ratio > 1) & (divergence > high)
    down = (inputs.advantages < 0) & (ratio < 1) & (divergence > low)
    weight = ratio.clamp(max=cfg.clip_ratio_c).masked_fill(up | down, 0.0)
    return PolicyLoss(-weight * inputs.advantages * inputs.log_probs, _statistics(inputs, pg_clipfrac=up | down))


@built_in()
def dppo_tv(inputs: PolicyLossInputs, cfg: ActorConfig) -> PolicyLoss:
    """A trust region in total variation: no token with |pi - pi_old| over the clip range   (Qi et al. 2026, DPPO)."""
    moved = (inputs.log_probs.detach().exp() - inputs.old_log_probs.exp()).abs()
    return _dppo(inputs, moved, cfg)


@built_in()
def dppo_kl(inputs: PolicyLossInputs, cfg: ActorConfig) -> PolicyLoss:
    """As dppo_tv, with the KL of the two-way choice "this token or another"   (Qi et al. 2026, DPPO)."""
    old, new = inputs.old_log_probs.exp(), inputs.log_probs.detach().exp()
    # verl's. A token of probability 1 leaves 0 for all others.
    tiny = 1e-8
    kl_of_token = old * ((old + tiny) / (new + tiny)).log()
    kl_of_others = (1 - old) * ((1 - old + tiny) / (1 - new + tiny)).log()
    return _dppo(inputs, kl_of_token + kl_of_others, cfg)

"""Policy losses per token, before aggregation. Losses of complete responses are in `sequence_losses`.

Notation as in `surrogate`: r = pi / pi_old of a token, A its advantage, [1 - low, 1 + high] the clip range, sg[]
stop-gradient.
"""

from __future__ import annotations

import torch

# Import the module to register its losses.
import rltrain.algorithms.sequence_losses  # noqa: F401
from rltrain.algorithms.advantages import suffix_sums
from rltrain.algorithms.kl import binary_kl
from rltrain.algorithms.shapes import PerToken
from rltrain.algorithms.surrogate import (
    LOG_RATIO_BOUND,
    POLICY_LOSSES,
    BatchMeans,
    PolicyLoss,
    PolicyLossEntry,
    PolicyLossFunction,
    PolicyLossInputs,
    Selection,
    built_in,
    clip_range,
    dual_clip,
    policy_loss,
    ppo,
    statistics_of,
)
from rltrain.common.plugin import is_plugin, load_plugin
from rltrain.config.schema import ActorConfig
from rltrain.config.schema.declarations import LOSS_KEY

# FIPO's bounds on f_t (`future_kl`) for a token with a negative advantage that became much more likely.
_SAFE_INFLUENCE = (0.8, 1.0)
# Names that custom loss files import from here.
__all__ = [
    "POLICY_LOSSES",
    "BatchMeans",
    "PolicyLoss",
    "PolicyLossEntry",
    "PolicyLossFunction",
    "PolicyLossInputs",
    "Selection",
    "clip_range",
    "find_policy_loss",
    "policy_loss",
]


def find_policy_loss(name: str) -> PolicyLossEntry:
    """Return the loss of ``actor.policy_loss.loss_mode``, which may be FILE.py:NAME."""
    if not is_plugin(name):
        return POLICY_LOSSES[name]
    function = load_plugin(LOSS_KEY, name)
    return PolicyLossEntry(function, getattr(function, "selection", None))


@built_in()
def vanilla(inputs: PolicyLossInputs, cfg: ActorConfig) -> PolicyLoss:
    """Compute max(-A r, -A clip(r, 1 - low, 1 + high))   (Schulman et al. 2017, eq. 7).

    With A < 0 the loss is bounded by -A * clip_ratio_c (Ye et al. 2020, dual-clip PPO, eq. 5).
    """
    losses, clips = dual_clip(inputs.log_ratio.exp(), inputs.advantages, cfg)
    return PolicyLoss(losses, statistics_of(inputs, **clips))


@built_in()
def gpg(inputs: PolicyLossInputs, cfg: ActorConfig) -> PolicyLoss:
    """Compute -A log pi: the plain policy gradient   (Chu et al. 2025, GPG)."""
    return PolicyLoss(-inputs.advantages * inputs.log_probs, statistics_of(inputs))


@built_in()
def cispo(inputs: PolicyLossInputs, cfg: ActorConfig) -> PolicyLoss:
    """Compute -sg[clip(r, 1 - low, 1 + high)] A log pi: clips the weight, keeps all tokens   (MiniMax 2025, M1)."""
    low, high = clip_range(cfg)
    ratio = inputs.log_ratio.exp().detach()
    weight = ratio.clamp(1 - low, 1 + high)
    return PolicyLoss(
        -weight * inputs.advantages * inputs.log_probs, statistics_of(inputs, pg_clipfrac=weight != ratio)
    )


@built_in()
def sapo(inputs: PolicyLossInputs, cfg: ActorConfig) -> PolicyLoss:
    """Compute -A (4 / tau) sigmoid(tau (r - 1)), a soft gate instead of a clip   (Gao et al. 2025, SAPO).

    tau is tau_pos for A > 0 and tau_neg otherwise.
    """
    ratio = inputs.log_ratio.exp()
    tau = torch.full_like(inputs.advantages, cfg.tau_neg).masked_fill(inputs.advantages > 0, cfg.tau_pos)
    return PolicyLoss(-inputs.advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau, statistics_of(inputs))


def _covariance(inputs: PolicyLossInputs, means: BatchMeans) -> PerToken:
    return (inputs.advantages - means.advantage) * (inputs.log_probs.detach() - means.log_prob)


def _clip_cov_keys(inputs: PolicyLossInputs, noise: PerToken, means: BatchMeans, cfg: ActorConfig) -> PerToken:
    unclipped, clipped = ppo(inputs.log_ratio.exp(), inputs.advantages, cfg)
    covariance = _covariance(inputs, means)
    within = (covariance > cfg.policy_loss.clip_cov_lb) & (covariance < cfg.policy_loss.clip_cov_ub)
    # The tokens with the smallest keys are selected. The key of a candidate is its noise, so candidates are sampled
    # uniformly, independent of the layout in micro-batches.
    return noise.masked_fill(~(within & (clipped <= unclipped) & (inputs.mask.values > 0)), torch.inf)


@built_in(Selection(_clip_cov_keys, lambda cfg: cfg.policy_loss.clip_cov_ratio))
def clip_cov(inputs: PolicyLossInputs, cfg: ActorConfig) -> PolicyLoss:
    """Compute PPO without gradient on random tokens whose log-prob and A covary   (Cui et al. 2025, Clip-Cov).

    A share clip_cov_ratio of the mini-batch's tokens is selected among tokens that PPO would not clip and whose
    covariance is within (clip_cov_lb, clip_cov_ub).
    """
    assert inputs.selected is not None
    unclipped, clipped = ppo(inputs.log_ratio.exp(), inputs.advantages, cfg)
    losses = torch.maximum(unclipped, clipped).masked_fill(inputs.selected, 0.0)
    return PolicyLoss(losses, statistics_of(inputs, pg_clipfrac=(clipped > unclipped) | inputs.selected))


def _kl_cov_keys(inputs: PolicyLossInputs, noise: PerToken, means: BatchMeans, cfg: ActorConfig) -> PerToken:
    return (-_covariance(inputs, means)).masked_fill(inputs.mask.values == 0, torch.inf)


@built_in(Selection(_kl_cov_keys, lambda cfg: cfg.policy_loss.kl_cov_ratio))
def kl_cov(inputs: PolicyLossInputs, cfg: ActorConfig) -> PolicyLoss:
    """Compute -A r, plus ppo_kl_coef |log r| on tokens with a high covariance   (Cui et al. 2025, KL-Cov).

    These are the share kl_cov_ratio of the mini-batch's tokens whose log-prob and A covary most.
    """
    assert inputs.selected is not None
    log_ratio = inputs.log_ratio
    penalty = cfg.policy_loss.ppo_kl_coef * log_ratio.abs()
    losses = -inputs.advantages * log_ratio.exp() + penalty * inputs.selected
    return PolicyLoss(losses, statistics_of(inputs, pg_clipfrac=inputs.selected))


def _dppo(inputs: PolicyLossInputs, divergence: PerToken, cfg: ActorConfig) -> PolicyLoss:
    """Compute -sg[min(r, clip_ratio_c)] A log pi, masking tokens beyond the clip range in the direction of A."""
    low, high = clip_range(cfg)
    ratio = inputs.log_ratio.exp().detach()
    # A token that moved against its advantage keeps its gradient, so that it moves back.
    up = (inputs.advantages > 0) & (ratio > 1) & (divergence > high)
    down = (inputs.advantages < 0) & (ratio < 1) & (divergence > low)
    weight = ratio.clamp(max=cfg.clip_ratio_c).masked_fill(up | down, 0.0)
    return PolicyLoss(-weight * inputs.advantages * inputs.log_probs, statistics_of(inputs, pg_clipfrac=up | down))


@built_in()
def dppo_tv(inputs: PolicyLossInputs, cfg: ActorConfig) -> PolicyLoss:
    """Mask tokens with |pi - pi_old| over the clip range: a total variation trust region   (Qi et al. 2026, DPPO)."""
    moved = (inputs.log_probs.detach().exp() - inputs.old_log_probs.exp()).abs()
    return _dppo(inputs, moved, cfg)


@built_in()
def dppo_kl(inputs: PolicyLossInputs, cfg: ActorConfig) -> PolicyLoss:
    """Mask tokens as in `dppo_tv`, using the KL of the binary choice "this token or another" (Qi et al. 2026, DPPO)."""
    return _dppo(inputs, binary_kl(inputs.old_log_probs.exp(), inputs.log_probs.detach().exp()), cfg)


def _moments(inputs: PolicyLossInputs, noise: PerToken, means: BatchMeans, cfg: ActorConfig) -> PerToken:
    return inputs.log_ratio.detach().square().masked_fill(inputs.mask.values == 0, torch.inf)


@built_in(Selection(_moments, largest_mean=lambda cfg: cfg.policy_loss.m2_threshold))
def m2po(inputs: PolicyLossInputs, cfg: ActorConfig) -> PolicyLoss:
    """Compute -A r M, without a clip: M masks the tokens that moved furthest   (Zheng et al. 2025, M2PO, 2510.01161).

    M is 1 on the tokens of the mini-batch with the smallest (log r)^2: on as many as possible while the mean of their
    (log r)^2 is at most m2_threshold.
    """
    assert inputs.selected is not None
    losses = -inputs.advantages * inputs.log_ratio.exp() * inputs.selected
    return PolicyLoss(losses, statistics_of(inputs, pg_clipfrac=~inputs.selected))


@built_in()
def dro(inputs: PolicyLossInputs, cfg: ActorConfig) -> PolicyLoss:
    """Compute -(A log pi - beta / 2 (log r)^2): a pull towards pi_old instead of a clip   (DRO, as in verl and Tinker).

    beta is dro_beta. Tokens with zero advantage are pulled too.
    """
    pull = (inputs.log_probs - inputs.old_log_probs).square() * cfg.policy_loss.dro_beta / 2
    return PolicyLoss(pull - inputs.advantages * inputs.log_probs, statistics_of(inputs))


@built_in()
def future_kl(inputs: PolicyLossInputs, cfg: ActorConfig) -> PolicyLoss:
    """Compute PPO with the advantage f_t A, where f_t rates the tokens after t   (Ma et al. 2026, FIPO, 2603.19835).

    f_t = sg[clip(exp(F_t), 1 - c, 1 + c)], F_t = sum_{k >= t} gamma^(k - t) log r_k over the loss tokens with r_k <=
    clip_ratio_c; c = future_kl_clip_ratio, gamma = 2^(-1 / decay_rate). With future_kl_clip_high_only f_t is at least
    1. Where A < 0 and r > safety_thresh, f_t is between 0.8 and 1. The loss of these advantages is the dual clip of
    `vanilla`.
    """
    keys, log_ratio = cfg.policy_loss, inputs.log_ratio.detach()
    counts = (inputs.mask.values > 0) & (log_ratio.exp() <= cfg.clip_ratio_c)
    future = suffix_sums(inputs.mask.like(log_ratio * counts), 2 ** (-1 / keys.decay_rate)).values
    low = 1.0 if keys.future_kl_clip_high_only else 1 - keys.future_kl_clip_ratio
    # Bound the exponent first: exp of a sum over a long response may overflow.
    influence = future.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().clamp(low, 1 + keys.future_kl_clip_ratio)
    is_risky = (inputs.advantages < 0) & (log_ratio.exp() > keys.safety_thresh)
    influence = torch.where(is_risky, influence.clamp(*_SAFE_INFLUENCE), influence)
    losses, clips = dual_clip(inputs.log_ratio.exp(), inputs.advantages * influence, cfg)
    return PolicyLoss(losses, statistics_of(inputs, future_kl_influence=influence, **clips))

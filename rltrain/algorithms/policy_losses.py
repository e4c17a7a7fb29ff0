"""Policy losses, before aggregation: with one weight per token, and (at the end) with one weight per response.

Notation as in `surrogate`: r = pi / pi_old of a token, A its advantage, [1 - low, 1 + high] the clip range, sg[]
stop-gradient. W = exp(sum_t log r_t) is the ratio of a response, s = exp(mean_t log r_t) its length-normalised form.
Micro-batches contain complete responses, so that both need only the tokens of a micro-batch.
"""

from __future__ import annotations

import torch

from rltrain.algorithms.advantages import suffix_sums
from rltrain.algorithms.kl import binary_kl
from rltrain.algorithms.shapes import PerResponse, PerToken, ResponseInts
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


@built_in()
def gspo(inputs: PolicyLossInputs, cfg: ActorConfig) -> PolicyLoss:
    """Compute PPO's clip on the ratio of the response, s = exp(mean_t log r_t)   (Zheng et al. 2025, GSPO-token).

    The token form of the ratio is s pi / sg[pi].
    """
    sequence = inputs.sequence_mean(inputs.log_ratio).detach()
    # The first two terms cancel in value, but carry the gradient of the token. 10 is verl's bound on log s; with A < 0
    # the clip alone would not bound it.
    ratio = (inputs.log_probs - inputs.log_probs.detach() + sequence).clamp(max=10.0).exp()
    unclipped, clipped = ppo(ratio, inputs.advantages, cfg)
    return PolicyLoss(torch.maximum(unclipped, clipped), statistics_of(inputs, pg_clipfrac=clipped > unclipped))


@built_in()
def luspo(inputs: PolicyLossInputs, cfg: ActorConfig) -> PolicyLoss:
    """Compute GSPO times the response length, so that no length is favoured   (Liu et al. 2026, LUSPO, 2602.05261).

    That is GSPO with a sum over the tokens of a response instead of their mean: seq-mean-token-sum.
    """
    return gspo(inputs, cfg)


@built_in()
def geo_mean(inputs: PolicyLossInputs, cfg: ActorConfig) -> PolicyLoss:
    """Compute -A exp(mean_t clip(log r_t, -low, high)), clipped on one side as in PPO   (Zhao et al. 2025, GMPO).

    A token uses its clipped or its unclipped log r_t, whichever makes A log r_t smaller. A is the mean advantage of the
    response. All tokens of a response have its loss, so seq-mean-token-mean is the paper's objective.
    """
    low, high = clip_range(cfg)
    log_ratio, sign = inputs.log_ratio, inputs.advantages.sign()
    bounded = log_ratio.clamp(-low, high)
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * bounded)
    # With A = 0, `pessimistic` is 0, i.e. a ratio of 1 without a gradient. Such tokens use their unclipped ratio.
    ratio = inputs.sequence_mean(torch.where(sign == 0, log_ratio, pessimistic)).exp()
    losses = -inputs.sequence_mean(inputs.advantages) * ratio
    statistics = statistics_of(inputs, pg_clipfrac=(pessimistic != log_ratio) & (sign != 0))
    return PolicyLoss(losses, statistics, per_answer=True)


@built_in()
def vespo(inputs: PolicyLossInputs, cfg: ActorConfig) -> PolicyLoss:
    """Compute -sg[phi(W)] A log pi, phi(W) = W^k exp(lambda (1 - W)): a soft weight, 1 at W = 1   (VESPO, 2602.10693).

    k, lambda are vespo.k_pos, vespo.lambda_pos for A >= 0, and k_neg, lambda_neg otherwise. W is not normalised by
    length, and log W is clamped to +-20.
    """
    shape = cfg.policy_loss.vespo
    is_bad = inputs.advantages < 0
    power, rate = (
        torch.full_like(inputs.advantages, good).masked_fill(is_bad, bad)
        for good, bad in ((shape.k_pos, shape.k_neg), (shape.lambda_pos, shape.lambda_neg))
    )
    log_weight = inputs.sequence_sum(inputs.log_ratio).detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    # Compute a single exponential, because W^k alone would overflow where phi is nearly 0.
    weight = (power * log_weight + rate * (1 - log_weight.exp())).exp()
    return PolicyLoss(-weight * inputs.advantages * inputs.log_probs, statistics_of(inputs, vespo_weight=weight))


@built_in()
def topr(inputs: PolicyLossInputs, cfg: ActorConfig) -> PolicyLoss:
    """Compute -log pi A for A >= 0, -sg[clip(W, 0, 1)] A log pi for A < 0   (Le Roux et al. 2025, TOPR, 2503.14286).

    Bad responses are pushed down less as they become less likely. The bounds are topr_negative_ratio_lower and
    topr_negative_ratio_upper. The loss is summed over the tokens of a response, because log pi is the log-probability
    of the whole response: seq-mean-token-sum.
    """
    low, high = cfg.policy_loss.topr_negative_ratio_lower, cfg.policy_loss.topr_negative_ratio_upper
    ratio = inputs.sequence_sum(inputs.log_ratio).detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    is_bad = inputs.advantages < 0
    weight = torch.where(is_bad, ratio.clamp(low, high), 1.0)
    outside = is_bad & (weight != ratio)
    return PolicyLoss(-weight * inputs.advantages * inputs.log_probs, statistics_of(inputs, pg_clipfrac=outside))


def misclassified(scores: PerResponse, labels: PerResponse, groups: ResponseInts, cfg: ActorConfig) -> PerResponse:
    """Return |dL / ds_i| of every response [n], with L the loss of its group in `real` (Zhai et al. 2026, 2602.05630).

    It is e^(-y_i s_i / tau) / (tau (1 + C)), with C the sum of e^(-y_j s_j / tau) over all responses j of the group
    with the label of i, including i. It is 0 for a response without a label.
    """
    exponents = -(labels * scores).double() / cfg.policy_loss.real_tau
    _, sides = torch.stack([groups.double(), labels.double()]).unique(dim=1, return_inverse=True)
    # The term 1 in 1 + C is e^0.
    largest = exponents.new_zeros(len(scores)).scatter_reduce(0, sides, exponents, "amax")[sides]
    totals = torch.zeros_like(exponents).index_add(0, sides, (exponents - largest).exp())[sides]
    shares = (exponents - largest).exp() / ((-largest).exp() + totals) * (labels != 0)
    return shares / cfg.policy_loss.real_tau


@built_in(group_weights=misclassified)
def real(inputs: PolicyLossInputs, cfg: ActorConfig) -> PolicyLoss:
    """Classify responses within their group, with logit s_i = mean_t log r_t (Zhai et al. 2026, REAL, 2602.05630).

    L = log(1 + sum_{y_i = 1} e^(-s_i / tau)) + log(1 + sum_{y_j = -1} e^(s_j / tau)) of a group, tau = real_tau. The
    label y is the sign of the advantage. With rewards of 0 and 1 and grpo, these are the labels of the paper; responses
    in a group of equal scores have no label. The loss here is -sg[w] y s, which has the gradient of L; w is
    `misclassified`, over the whole mini-batch. All tokens of a response have its loss: seq-mean-token-mean.
    """
    assert inputs.group_weights is not None
    labels = inputs.sequence_sum(inputs.advantages).sign()
    losses = -inputs.group_weights * labels * inputs.sequence_mean(inputs.log_ratio)
    return PolicyLoss(losses, statistics_of(inputs), per_answer=True)

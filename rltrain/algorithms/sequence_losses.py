"""Policy losses with one weight per response.

Notation as in `surrogate`. W = exp(sum_t log r_t) is the ratio of a response, s = exp(mean_t log r_t) its
length-normalised form. Micro-batches contain complete responses, so these losses need only the tokens of a micro-batch.
"""

from __future__ import annotations

import torch

from rltrain.algorithms.shapes import PerResponse, ResponseInts
from rltrain.algorithms.surrogate import (
    LOG_RATIO_BOUND,
    PolicyLoss,
    PolicyLossInputs,
    built_in,
    clip_range,
    ppo,
    statistics_of,
)
from rltrain.config.schema import ActorConfig


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

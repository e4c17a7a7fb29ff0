"""Rollout correction: mismatch between the policies of engine and trainer, importance weights and rejection.

w = pi_train / pi_engine of a sampled token, before the update. Importance weights correct the expectation, and are
truncated to bound the variance (Espeholt et al. 2018, V-trace; Yao et al. 2025, TIS). Rejection masks tokens or
responses with too large a mismatch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rltrain.algorithms.kl import binary_kl
from rltrain.algorithms.moments import Moments
from rltrain.algorithms.shapes import PerResponse, PerToken, ResponseInts, TokenMask
from rltrain.common.columns import names as c
from rltrain.common.columns.ragged import Ragged
from rltrain.config.schema.algorithm import RejectionRule, RolloutCorrectionConfig

# verl's bound on log w. exp(20) exceeds any useful threshold, and its square is finite in float32.
_LOG_BOUND = 20.0


def importance_weights(log_ratio: Ragged, cfg: RolloutCorrectionConfig) -> Ragged:
    """Return the weight of every token, from log w.

    ``rollout_is=token``: w. ``sequence``: the product of w over the response, for each of its tokens. A single
    threshold truncates from above; with two thresholds, weights outside become 0 (IcePop).
    """
    logs = log_ratio if cfg.rollout_is == "token" else log_ratio.broadcast(log_ratio.sum())
    weights = logs.values.clamp(-_LOG_BOUND, _LOG_BOUND).exp()
    low, high = cfg.importance_bounds()
    if low is None:
        return log_ratio.like(weights.clamp(max=high))
    return log_ratio.like(weights.masked_fill((weights < low) | (weights > high), 0.0))


def accepted(train: Ragged, engine: Ragged, rules: list[RejectionRule]) -> Ragged:
    """Return a mask of tokens that pass every rule. A sequence rule applies to all tokens of a response."""
    keep = torch.ones_like(train.values, dtype=torch.bool)
    for rule in rules:
        measured = train.like(_measure(train.values, engine.values, rule.measure))
        if rule.over != "token":
            measured = train.broadcast(_reduce(measured, rule.over))
        keep &= (measured.values <= rule.high) & (measured.values >= rule.low)
    return train.like(keep)


def _measure(train: PerToken, engine: PerToken, name: str) -> PerToken:
    """Return k1, k2 or k3 of KL(engine || trainer) per token (Schulman 2020).

    ``binary_kl``: maximum of KL(engine || trainer) and KL(trainer || engine) of the binary choice "this token or
    another" (Ling 2026, KPop).
    """
    if name == "binary_kl":
        probs = engine.exp(), train.exp()
        return torch.maximum(binary_kl(*probs), binary_kl(*reversed(probs)))
    log_ratio = (train - engine).clamp(-_LOG_BOUND, _LOG_BOUND)
    if name == "k1":
        return -log_ratio
    return log_ratio.square() / 2 if name == "k2" else log_ratio.exp() - 1 - log_ratio


def keeps(mask: Ragged, log_probs: PerToken, engine: PerToken, advantages: PerToken, threshold: float) -> TokenMask:
    """Return the off-policy mask: False for tokens that are removed from the loss   (DeepSeek-AI 2025, V3.2, eq. 9).

    A token is removed if A < 0 and the policy has moved away from its response: mean_t(log pi_engine - log pi) >
    threshold, over the loss tokens of the response. All [tokens]. engine: log-probs under the policy that sampled the
    tokens.
    """
    gap = mask.like((engine - log_probs) * mask.values).sum() / mask.sum().clamp(min=1)
    return (mask.broadcast(gap).values <= threshold) | (advantages >= 0)


def _reduce(values: Ragged, over: str) -> PerResponse:
    if over == "seq_max":
        start = torch.full((len(values),), -math.inf, dtype=values.values.dtype, device=values.values.device)
        return start.scatter_reduce(0, values.row_ids, values.values, "amax")
    return values.sum() if over == "seq_sum" else values.mean()


def correct(train: Ragged, engine: Ragged, cfg: RolloutCorrectionConfig, *, weighs: bool) -> dict[str, Ragged]:
    """Return ``loss_mask`` if tokens are rejected, and with ``weighs`` the importance weights ``is_weights``."""
    log_ratio = train.like(train.values - engine.values)
    columns: dict[str, Ragged] = {}
    if weighs:
        columns[c.IS_WEIGHTS] = importance_weights(log_ratio, cfg)
    if cfg.rollout_rs:
        columns[c.LOSS_MASK] = accepted(train, engine, cfg.rejection_rules())
    return columns


def compare(
    train: Ragged,
    engine: Ragged,
    columns: dict[str, Ragged],
    cfg: RolloutCorrectionConfig,
    carried: ResponseInts | None = None,
) -> dict[str, Moments]:
    """Return moments of the mismatch, and of the correction in ``columns``. carried [n]: see `fresh_gap`."""
    log_ratio = train.like(train.values - engine.values)
    moments = mismatch(train, engine)
    moments |= correction(columns.get(c.IS_WEIGHTS), columns.get(c.LOSS_MASK), log_ratio, cfg)
    # Tokens carried over from earlier steps also differ because the policy was updated since, which must not trigger
    # the alarm on the engine's gap.
    return moments if carried is None else moments | {"gap": fresh_gap(train, engine, carried)}


def mismatch(train: Ragged, engine: Ragged) -> dict[str, Moments]:
    """Return moments of the difference between two log-probs of the same tokens, by quantity.

    ``*ppl*`` and ``w_product*`` are over responses, all others over tokens.
    """
    # Compute in float64, because k3 of a small gap is a difference of nearly equal numbers.
    log_ratio = train.like((train.values - engine.values).double())
    bounded = log_ratio.values.clamp(-_LOG_BOUND, _LOG_BOUND)
    train_prob, engine_prob = (log_probs.values.double().exp() for log_probs in (train, engine))
    # A response without tokens has no perplexity, but its mean log-prob of 0 would count as a perplexity of 1.
    has_tokens = train.lengths > 0
    train_log_ppl, engine_log_ppl = (-log_probs.mean()[has_tokens].double() for log_probs in (train, engine))
    products = log_ratio.sum()[has_tokens].clamp(-_LOG_BOUND, _LOG_BOUND)
    quantities = {
        "gap": log_ratio.values.abs(),
        "prob_gap": (train_prob - engine_prob).abs(),
        "train_prob": train_prob,
        "engine_prob": engine_prob,
        "prob_product": train_prob * engine_prob,
        "k1": -log_ratio.values,
        "k3": bounded.exp() - 1 - bounded,
        "w_squared": (2 * bounded).exp(),
        "w_product_squared": (2 * products).exp(),
        "train_log_ppl": train_log_ppl,
        "engine_log_ppl": engine_log_ppl,
        "train_ppl": train_log_ppl.exp(),
        "engine_ppl": engine_log_ppl.exp(),
        "log_ppl_gap": (train_log_ppl - engine_log_ppl).abs(),
    }
    return {name: Moments.of(values) for name, values in quantities.items()}


def fresh_gap(train: Ragged, engine: Ragged, carried: ResponseInts) -> Moments:
    """Return the gap of tokens from the current policy: all after the first ``carried`` [n] tokens of each row."""
    fresh = train.positions >= carried[train.row_ids]
    return Moments.of((train.values - engine.values)[fresh].abs())


def correction(
    weights: Ragged | None, mask: Ragged | None, log_ratio: Ragged, cfg: RolloutCorrectionConfig
) -> dict[str, Moments]:
    """Return moments of the importance weights, and shares of rejected tokens and responses."""
    quantities: dict[str, Tensor] = {}
    if weights is not None:
        low, high = cfg.importance_bounds()
        logs = log_ratio if cfg.rollout_is == "token" else log_ratio.broadcast(log_ratio.sum())
        quantities["is"] = weights.values
        quantities["is_high"] = logs.values > math.log(high)
        # Truncation changes high weights only. The share of low weights is the share below the reciprocal of the
        # threshold.
        quantities["is_low"] = logs.values < math.log(low or 1 / high)
        if cfg.rollout_is == "sequence":
            # All tokens of a response have its weight, so a mean over tokens would weight long responses more.
            quantities["is_answers"] = weights.mean()[weights.lengths > 0]
    if mask is not None:
        has_tokens = mask.lengths > 0
        quantities["rejected"] = ~mask.values
        quantities["rejected_answers"] = (mask.sum() < mask.lengths)[has_tokens]
    return {name: Moments.of(values) for name, values in quantities.items()}

"""The engine samples from a policy that is not quite the trainer's: how far, and what to do about it.

w = pi_train / pi_engine of a sampled token, before the update. Importance weights correct the expectation, truncated to
bound the variance (Espeholt et al. 2018, V-trace; Yao et al. 2025, TIS); rejection leaves out what is too far away.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rltrain import columns as c
from rltrain.config.algorithm_schema import RejectionRule, RolloutCorrectionConfig
from rltrain.ragged import Ragged

Sums = dict[str, float]
_LOG_BOUND = 20.0


def importance_weights(log_ratio: Ragged, cfg: RolloutCorrectionConfig) -> Ragged:
    """Weight of every token, from log w.

    ``rollout_is=token``: w; ``sequence``: the product of w over the answer, on each of its tokens. A single threshold
    truncates from above; with two, weights outside become 0 (IcePop).
    """
    logs = log_ratio if cfg.rollout_is == "token" else log_ratio.broadcast(log_ratio.sum())
    weights = logs.values.clamp(-_LOG_BOUND, _LOG_BOUND).exp()
    low, high = cfg.importance_bounds()
    if low is None:
        return log_ratio.like(weights.clamp(max=high))
    return log_ratio.like(weights.masked_fill((weights < low) | (weights > high), 0.0))


def accepted(log_ratio: Ragged, rules: list[RejectionRule]) -> Ragged:
    """Whether each token passes every rule; a rule on sequences decides over all tokens of the answer."""
    keep = torch.ones_like(log_ratio.values, dtype=torch.bool)
    for rule in rules:
        measured = log_ratio.like(_measure(log_ratio.values, rule.measure))
        if rule.over != "token":
            measured = log_ratio.broadcast(_reduce(measured, rule.over))
        keep &= (measured.values <= rule.high) & (measured.values >= rule.low)
    return log_ratio.like(keep)


def _measure(log_ratio: Tensor, name: str) -> Tensor:
    """k1, k2, k3 of KL(engine || trainer) per token (Schulman 2020)."""
    log_ratio = log_ratio.clamp(-_LOG_BOUND, _LOG_BOUND)
    if name == "k1":
        return -log_ratio
    return log_ratio.square() / 2 if name == "k2" else log_ratio.exp() - 1 - log_ratio


def _reduce(values: Ragged, over: str) -> Tensor:
    if over == "seq_max":
        start = torch.full((len(values),), -math.inf, dtype=values.values.dtype, device=values.values.device)
        return start.scatter_reduce(0, values.row_ids, values.values, "amax")
    return values.sum() if over == "seq_sum" else values.mean()


def compare(
    train: Ragged, engine: Ragged, cfg: RolloutCorrectionConfig, given: Tensor | None = None, *, weighs: bool
) -> tuple[dict[str, Ragged], Sums]:
    """Columns ``is_weights`` and ``loss_mask`` where the loss uses them, and the sums of mismatch and correction.

    given [n]: tokens from earlier policies, see `fresh_gap`. weighs: importance weights enter the loss.
    """
    log_ratio = train.like(train.values - engine.values)
    columns: dict[str, Ragged] = {}
    if weighs:
        columns[c.IS_WEIGHTS] = importance_weights(log_ratio, cfg)
    if cfg.rollout_rs:
        columns[c.LOSS_MASK] = accepted(log_ratio, cfg.rejection_rules())
    corrected = correction_sums(columns.get(c.IS_WEIGHTS), columns.get(c.LOSS_MASK), log_ratio, cfg)
    fresh = {} if given is None else fresh_gap(train, engine, given)
    return columns, mismatch_sums(train, engine) | fresh | corrected


def mismatch_sums(train: Ragged, engine: Ragged) -> Sums:
    """What adds up over ranks (``max/``: what is maximised) of the difference between two log-probs of the same tokens."""
    log_ratio = train.like((train.values - engine.values).double())
    gap, bounded = log_ratio.values.abs(), log_ratio.values.clamp(-_LOG_BOUND, _LOG_BOUND)
    probs = [each.values.double().exp() for each in (train, engine)]
    prob_gap = (probs[0] - probs[1]).abs()
    having = train.lengths > 0
    means = [-each.mean()[having].double() for each in (train, engine)]
    products = log_ratio.sum()[having].clamp(-_LOG_BOUND, _LOG_BOUND)
    return {
        "tokens": float(len(gap)),
        "sequences": float(having.sum()),
        "gap": float(gap.sum()),
        "max/gap": float(gap.max()) if len(gap) else 0.0,
        "prob_gap": float(prob_gap.sum()),
        "max/prob_gap": float(prob_gap.max()) if len(gap) else 0.0,
        "prob_gap_squared": float(prob_gap.square().sum()),
        "train_prob": float(probs[0].sum()),
        "train_prob_squared": float(probs[0].square().sum()),
        "engine_prob": float(probs[1].sum()),
        "engine_prob_squared": float(probs[1].square().sum()),
        "prob_product": float((probs[0] * probs[1]).sum()),
        "k1": float(-log_ratio.values.sum()),
        "k3": float((bounded.exp() - 1 - bounded).sum()),
        "w_squared": float((2 * bounded).exp().sum()),
        "w_product_squared": float((2 * products).exp().sum()),
        "train_log_ppl": float(means[0].sum()),
        "engine_log_ppl": float(means[1].sum()),
        "train_ppl": float(means[0].exp().sum()),
        "engine_ppl": float(means[1].exp().sum()),
        "log_ppl_gap": float((means[0] - means[1]).abs().sum()),
    }


def fresh_gap(train: Ragged, engine: Ragged, given: Tensor) -> Sums:
    """The gap of `mismatch_sums` over tokens that the current policy sampled: those after the first ``given`` [n] of each row."""
    fresh = train.positions >= given[train.row_ids]
    gap = (train.values - engine.values)[fresh].abs().double()
    return {"gap": float(gap.sum()), "max/gap": float(gap.max()) if len(gap) else 0.0, "gap_tokens": float(len(gap))}


def correction_sums(
    weights: Ragged | None, mask: Ragged | None, log_ratio: Ragged, cfg: RolloutCorrectionConfig
) -> Sums:
    """Likewise, of the weights and of what was rejected."""
    sums: Sums = {}
    if weights is not None:
        values = weights.values.double()
        low, high = cfg.importance_bounds()
        logs = log_ratio if cfg.rollout_is == "token" else log_ratio.broadcast(log_ratio.sum())
        sums |= {
            "is": float(values.sum()),
            "is_squared": float(values.square().sum()),
            "max/is": float(values.max()) if len(values) else 0.0,
            "max/minus_is": float(-values.min()) if len(values) else -math.inf,
            "is_high": float((logs.values > math.log(high)).sum()),
            "is_low": float((logs.values < math.log(low or 1 / high)).sum()),
        }
        if cfg.rollout_is == "sequence":  # one weight an answer, so the mean is over answers
            sums["is_answers"] = float(weights.mean().double().sum())
    if mask is not None:
        some = (mask.sum() < mask.lengths) & (mask.lengths > 0)
        sums |= {"rejected": float((~mask.values).sum()), "sequences_rejected": float(some.sum())}
    return sums

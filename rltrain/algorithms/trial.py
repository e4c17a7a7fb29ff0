"""Trial of custom estimators and losses on a few numbers, before anything is started.

Problem: a function that raises or returns a wrong shape would fail after models are loaded and the first batch is
generated. Choice: a batch of four responses on the CPU. Left out: a check of the formula, which only its author can do.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import replace

import torch

from rltrain.algorithms.advantages import OutcomeInputs, TokenInputs, find_estimator
from rltrain.algorithms.policy_losses import PolicyLoss, PolicyLossInputs, find_policy_loss
from rltrain.common.columns.ragged import Ragged
from rltrain.common.plugin import is_plugin
from rltrain.config.schema import ActorConfig
from rltrain.config.schema.algorithm import AlgorithmConfig

# The batch contains an empty response and a response with a single token, because custom functions often fail on them.
_LENGTHS = torch.tensor([3, 1, 0, 2])


def try_estimator(cfg: AlgorithmConfig) -> Iterator[str]:
    """Yield errors of ``algorithm.adv_estimator=FILE.py:NAME``."""
    if not is_plugin(cfg.adv_estimator):
        return
    key = f"algorithm.adv_estimator={cfg.adv_estimator}"
    function, traits = find_estimator(cfg.adv_estimator), cfg.estimator
    # float64, as passed by driver and workers. The second group has equal scores: its standard deviation is 0.
    scores = torch.tensor([1.0, 0.0, 0.5, 0.5], dtype=torch.float64)
    tokens = Ragged(torch.ones(6, dtype=torch.float64), _LENGTHS)
    try:
        baselines, groups = scores if traits.greedy_baseline else None, torch.tensor([0, 0, 1, 1])
        if traits.per_token:
            inputs = TokenInputs(tokens, tokens if traits.values else None, baselines)
            if traits.sum_pi_squared:
                log_probs, squares = tokens.like(-tokens.values), tokens.like(tokens.values / 2)
                inputs = replace(inputs, groups=groups, log_probs=log_probs, sum_pi_squared=squares)
            advantages, wanted = function(inputs, cfg).advantages.values, 6
        else:
            terms = dict.fromkeys(cfg.gdpo_reward_keys, scores)
            advantages, wanted = function(OutcomeInputs(scores, groups, _LENGTHS, terms, baselines), cfg), 4
    except Exception:  # noqa: BLE001 - user code; whatever it raises is reported with its traceback
        yield f"{key} fails on a small batch:\n{traceback.format_exc(limit=-2)}"
        return
    fits = isinstance(advantages, torch.Tensor) and advantages.shape == (wanted,)
    if not fits or not bool(advantages.isfinite().all()):
        yield (
            f"{key} must return {wanted} finite numbers for a batch of 4 responses with 6 tokens; it returned "
            f"{advantages!r}."
        )


def try_policy_loss(cfg: ActorConfig) -> Iterator[str]:
    """Yield errors of ``actor.policy_loss.loss_mode=FILE.py:NAME``."""
    name = cfg.policy_loss.loss_mode
    if not is_plugin(name):
        return
    key = f"actor_rollout_ref.actor.policy_loss.loss_mode={name}"
    # The log-probs differ from the old log-probs, so that the ratio is not 1. A ratio of 1 would hide errors in its
    # use.
    log_probs = torch.full((6,), -0.5, requires_grad=True)
    mask = Ragged(torch.ones(6), _LENGTHS)
    selected = torch.zeros(6, dtype=torch.bool)
    inputs = PolicyLossInputs(log_probs, torch.full((6,), -0.6), torch.linspace(-1, 1, 6), mask, selected)
    function = find_policy_loss(name).function
    try:
        policy_loss = function(inputs, cfg)
    except Exception:  # noqa: BLE001 - user code; whatever it raises is reported with its traceback
        yield f"{key} fails on a small batch:\n{traceback.format_exc(limit=-2)}"
        return
    if not isinstance(policy_loss, PolicyLoss):
        returned = type(policy_loss).__name__
        yield f"{key} must return a rltrain.algorithms.policy_losses.PolicyLoss; it returned {returned}."
    elif policy_loss.token_losses.shape != (6,) or not policy_loss.token_losses.requires_grad:
        yield (
            f"{key}: token_losses must have one number per token [6] and depend on inputs.log_probs; it has "
            f"{policy_loss.token_losses!r}."
        )

"""Declarations of advantage estimators and policy losses: their inputs and requirements.

The need for a critic, a greedy baseline or a selection over a mini-batch must be known before anything starts, without
waiting seconds for the import of torch. So the declarations of built-in functions are here, and their formulas in
`rltrain.algorithms`. A user's function (FILE.py:NAME) is declared by the decorators there; its file is imported once to
read the declaration. No other code depends on the name of an algorithm.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from rltrain.common.errors import ConfigError
from rltrain.common.plugin import is_plugin, load_plugin

ESTIMATOR_KEY = "algorithm.adv_estimator"
LOSS_KEY = "actor_rollout_ref.actor.policy_loss.loss_mode"
# Loss of algorithm.rollout_correction.loss_type=reinforce: the plain policy gradient.
REINFORCE_LOSS = "gpg"
# Loss of a teacher's cost per token (distillation_loss.use_policy_gradient), as in verl.
TEACHER_LOSS = "vanilla"
# Aggregation of token losses if neither the user nor the loss sets one.
TOKEN_MEAN = "token-mean"
_ANSWER_MEAN = "seq-mean-token-mean"
_ANSWER_SUM = "seq-mean-token-sum"
_ATTRIBUTE = "rltrain_declaration"


@dataclass(frozen=True)
class EstimatorTraits:
    """Declaration of an advantage estimator."""

    per_token: bool = False
    """True if it returns one advantage per token, computed on the workers; otherwise it returns one per response, on
    the driver."""
    per_turn: bool = False
    """True if it returns one advantage per turn of the policy, computed on the driver."""
    values: bool = False
    """True if it needs a critic's value of every token."""
    greedy_baseline: bool = False
    """True if it needs the reward of a greedy response per prompt."""
    compares: bool = False
    """True if it compares the responses of a group."""
    takes_one: bool = False
    """True if the advantage of a single response is its score, as in verl. Otherwise one response per prompt is
    refused."""
    sum_pi_squared: bool = False
    """True if it needs the sum over the vocabulary of pi_old^2 per token, and the samples of a group on one rank."""
    reward_terms: bool = False
    """True if it uses the numbers named by ``gdpo_reward_keys`` instead of the reward."""
    whitens: bool = False
    """True if its token advantages are whitened over the batch."""
    reads: tuple[str, ...] | None = None
    """Keys of ``algorithm`` that it reads (None: unknown)."""


@dataclass(frozen=True)
class LossTraits:
    """Declaration of a policy loss."""

    selects: bool = False
    """True if it treats some tokens of the global mini-batch differently."""
    weighs_groups: bool = False
    """True if it weights a response by the others of its group in the global mini-batch."""
    silent_at_zero: bool = False
    """True if a response with zero advantage has no gradient, so that the update may skip it."""
    aggregation: str = TOKEN_MEAN
    """Aggregation in the definition of the loss, used unless ``loss_agg_mode`` is set."""
    reads: tuple[str, ...] | None = None
    """Keys of ``actor`` that it reads (None: unknown)."""


_BY_STD = ("norm_adv_by_std_in_grpo",)
_GROUP = EstimatorTraits(compares=True, takes_one=True, reads=())
ESTIMATORS = {
    "gae": EstimatorTraits(per_token=True, values=True, whitens=True, reads=("gamma", "lam")),
    "grpo": dataclasses.replace(_GROUP, reads=_BY_STD),
    "grpo_vectorized": dataclasses.replace(_GROUP, reads=_BY_STD),
    "reinforce_plus_plus": EstimatorTraits(per_token=True, whitens=True, reads=("gamma",)),
    # Its formula whitens on the driver, as in gdpo; `whitens` concerns token advantages, which are not on the driver.
    "reinforce_plus_plus_baseline": _GROUP,
    "rloo": _GROUP,
    # verl returns 0 for a single response here, so nothing would be learnt.
    "rloo_vectorized": EstimatorTraits(compares=True, reads=()),
    "remax": EstimatorTraits(per_token=True, greedy_baseline=True, reads=()),
    "opo": _GROUP,
    "optimal_token_baseline": EstimatorTraits(
        per_token=True, compares=True, takes_one=True, sum_pi_squared=True, reads=()
    ),
    "maxrl": EstimatorTraits(compares=True, reads=()),
    "lite_ppo": EstimatorTraits(compares=True, reads=()),
    "grpo_passk": EstimatorTraits(compares=True, reads=_BY_STD),
    "gpg": _GROUP,
    "gpg_paper": EstimatorTraits(compares=True, reads=()),
    "gdpo": dataclasses.replace(_GROUP, reward_terms=True, reads=(*_BY_STD, "gdpo_reward_keys", "gdpo_reward_weights")),
    "turn_rloo": EstimatorTraits(per_turn=True, compares=True, reads=("gamma",)),
    "gigpo": EstimatorTraits(per_turn=True, compares=True, reads=(*_BY_STD, "gamma", "gigpo.step_advantage_w")),
}

_CLIP = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
_CLIP_COV = tuple(f"policy_loss.clip_cov_{name}" for name in ("ratio", "lb", "ub"))
_VESPO = tuple(f"policy_loss.vespo.{name}" for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg"))
_TOPR = tuple(f"policy_loss.topr_negative_ratio_{name}" for name in ("lower", "upper"))
_FUTURE_KL = tuple(
    f"policy_loss.{name}"
    for name in ("decay_rate", "future_kl_clip_ratio", "future_kl_clip_high_only", "safety_thresh")
)
POLICY_LOSSES = {
    "vanilla": LossTraits(silent_at_zero=True, reads=(*_CLIP, "clip_ratio_c")),
    "gspo": LossTraits(silent_at_zero=True, aggregation=_ANSWER_MEAN, reads=_CLIP),
    "gpg": LossTraits(silent_at_zero=True, reads=()),
    "cispo": LossTraits(silent_at_zero=True, reads=_CLIP),
    "sapo": LossTraits(silent_at_zero=True, aggregation=_ANSWER_MEAN, reads=("tau_pos", "tau_neg")),
    # Every token of a response has the loss of the response, so this is GMPO's mean over responses.
    "geo_mean": LossTraits(silent_at_zero=True, aggregation=_ANSWER_MEAN, reads=_CLIP),
    # The loss is not `silent_at_zero`, because a token with zero advantage may be selected. Without it, another token
    # would be selected.
    "clip_cov": LossTraits(selects=True, reads=(*_CLIP, *_CLIP_COV)),
    "kl_cov": LossTraits(selects=True, reads=("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef")),
    "dppo_tv": LossTraits(silent_at_zero=True, reads=(*_CLIP, "clip_ratio_c")),
    "dppo_kl": LossTraits(silent_at_zero=True, reads=(*_CLIP, "clip_ratio_c")),
    # The loss is not `silent_at_zero`, because a token with zero advantage is pulled back to the old policy.
    "dro": LossTraits(reads=("policy_loss.dro_beta",)),
    "luspo": LossTraits(silent_at_zero=True, aggregation=_ANSWER_SUM, reads=_CLIP),
    "vespo": LossTraits(silent_at_zero=True, reads=_VESPO),
    "topr": LossTraits(silent_at_zero=True, aggregation=_ANSWER_SUM, reads=_TOPR),
    "real": LossTraits(
        weighs_groups=True, silent_at_zero=True, aggregation=_ANSWER_MEAN, reads=("policy_loss.real_tau",)
    ),
    # The loss is not `silent_at_zero`, because tokens with zero advantage are counted too.
    "m2po": LossTraits(selects=True, reads=("policy_loss.m2_threshold",)),
    "future_kl": LossTraits(silent_at_zero=True, reads=(*_CLIP, "clip_ratio_c", *_FUTURE_KL)),
}


def declared(function: Any, traits: EstimatorTraits | LossTraits) -> Any:
    """Attach a declaration to a user's function and return the function."""
    setattr(function, _ATTRIBUTE, traits)
    return function


def estimator_traits(name: str) -> EstimatorTraits:
    """Return the declaration of ``algorithm.adv_estimator=name``.

    A function without a declaration returns one advantage per response and has no requirements.
    """
    return _of_plugin(ESTIMATOR_KEY, name) if is_plugin(name) else ESTIMATORS.get(name, EstimatorTraits())


def loss_traits(name: str) -> LossTraits:
    """Return the declaration of ``actor.policy_loss.loss_mode=name``."""
    return _of_plugin(LOSS_KEY, name) if is_plugin(name) else POLICY_LOSSES.get(name, LossTraits())


@functools.cache
def _of_plugin(key: str, name: str) -> Any:
    nothing = EstimatorTraits() if key == ESTIMATOR_KEY else LossTraits()
    try:
        # A function without a decorator gets the declaration without requirements.
        return getattr(load_plugin(key, name), _ATTRIBUTE, nothing)
    except ConfigError:  # `preflight` reports it with all other problems
        return nothing

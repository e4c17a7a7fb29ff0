"""Keys under actor.policy_loss: the surrogate that is maximised, and its parameters."""

from __future__ import annotations

from dataclasses import dataclass

from rltrain.config.schema.algorithm import REWARDED
from rltrain.config.schema.declarations import POLICY_LOSSES
from rltrain.config.schema.fields import key, section

# Condition of the keys of `loss_mode`; a policy that learns only from a teacher has no policy loss.
POLICY_LOSS = REWARDED | {
    "algorithm.rollout_correction.bypass_mode=False or algorithm.rollout_correction.loss_type=ppo_clip": (
        "rollout_correction.loss_type=reinforce is a separate policy loss"
    )
}


@dataclass
class VespoConfig:
    """VESPO: phi(W) = W^k exp(lambda (1 - W)).

    This is the weight of a response with the ratio W.
    """

    k_pos: float = key(2.0, least=0)
    """vespo: k for responses with an advantage of 0 or more."""
    lambda_pos: float = key(3.0, least=0)
    """vespo: lambda for responses with an advantage of 0 or more."""
    k_neg: float = key(3.0, least=0)
    """vespo: k for responses with a negative advantage."""
    lambda_neg: float = key(2.0, least=0)
    """vespo: lambda for responses with a negative advantage."""


@dataclass
class PolicyLossConfig:
    """The surrogate that is maximised."""

    loss_mode: str = key("vanilla", among=tuple(POLICY_LOSSES), plugin=True, only_with=POLICY_LOSS)
    """vanilla (PPO with dual clip), gspo, gpg, cispo, sapo, geo_mean, clip_cov, kl_cov, dppo_tv, dppo_kl, dro, luspo,
    vespo, topr, m2po, future_kl (FIPO), real, or a user's function: FILE.py:NAME."""
    clip_cov_ratio: float = key(0.0002, least=0, most=1)
    """clip_cov: share of tokens without a gradient."""
    clip_cov_lb: float = 1.0
    """clip_cov: smallest covariance of such a token."""
    clip_cov_ub: float = 5.0
    """clip_cov: largest covariance of such a token."""
    kl_cov_ratio: float = key(0.0002, least=0, most=1)
    """kl_cov: share of tokens with a KL penalty."""
    ppo_kl_coef: float = key(0.1, least=0)
    """kl_cov: weight of that penalty."""
    dro_beta: float = key(0.1, over=0)
    """dro: weight of the pull towards the old policy."""
    real_tau: float = key(0.5, over=0)
    """real: temperature of the classification."""
    m2_threshold: float = key(0.04, over=0)
    """m2po: largest mean of (log r)^2 over the tokens that are kept."""
    vespo: VespoConfig = section(VespoConfig)
    """VESPO's weight."""
    topr_negative_ratio_lower: float = key(0.0, least=0)
    """topr: smallest weight of a response with a negative advantage."""
    topr_negative_ratio_upper: float = key(1.0, least=0)
    """topr: largest weight of a response with a negative advantage."""
    decay_rate: float = key(32.0, over=0)
    """future_kl: number of tokens after which later tokens count half."""
    future_kl_clip_ratio: float = key(0.2, least=0)
    """future_kl: the factor of a token's advantage is clipped to 1 +- this."""
    future_kl_clip_high_only: bool = True
    """future_kl: the factor is never below 1."""
    safety_thresh: float = key(4.0, over=0)
    """future_kl: if the ratio of a token with a negative advantage is larger than this, its factor is 0.8 to 1."""

"""Losses on one micro-batch: the actor's (policy loss, entropy bonus, KL to the reference, distance from a teacher),
and the critic's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from rltrain.algorithms.aggregation import Denominators, token_weights
from rltrain.algorithms.distillation import TeacherLoss
from rltrain.algorithms.policy_losses import PolicyLossFunction, PolicyLossInputs
from rltrain.base.columns.batch import Batch
from rltrain.base.columns.ragged import Ragged
from rltrain.config.schema import ActorConfig
from rltrain.config.schema.declarations import TOKEN_MEAN

# Samples with the log-probs of their policy tokens, and the entropy where it was computed.
Measured: TypeAlias = tuple[Batch, Tensor, Tensor | None]


@dataclass(frozen=True)
class LossShare:
    """The share of one micro-batch in the loss of its mini-batch."""

    loss: Tensor
    """This micro-batch's share of the mini-batch loss (scalar, differentiable)."""
    shares: dict[str, Tensor] = field(default_factory=dict)
    """Parts of the loss that add up over micro-batches and ranks."""
    token_sums: dict[str, Tensor] = field(default_factory=dict)
    """Sums over tokens, to be divided by the token count of the mini-batch."""
    measured: tuple[Measured, ...] = ()
    """Samples whose difference between engine and trainer is still to be measured, because no pass has done it; on the
    device, as whoever looks at them makes the host wait."""

    def __add__(self, other: LossShare) -> LossShare:
        """Both micro-batches together."""
        return LossShare(
            self.loss + other.loss,
            _add(self.shares, other.shares),
            _add(self.token_sums, other.token_sums),
            self.measured + other.measured,
        )


def _add(shares: dict[str, Tensor], others: dict[str, Tensor]) -> dict[str, Tensor]:
    # An idle micro-batch, which keeps ranks in step, has a loss and no parts.
    return shares | {name: shares[name] + value if name in shares else value for name, value in others.items()}


def actor_loss(
    inputs: PolicyLossInputs,
    denominators: Denominators,
    cfg: ActorConfig,
    policy_loss: PolicyLossFunction,
    aggregation: str,
    *,
    weights: Tensor | None = None,
    kept: Mapping[str, Tensor] | None = None,
    entropy: Tensor | None = None,
    entropy_coeff: float = 0.0,
    kl: Tensor | None = None,
    teacher: TeacherLoss | None = None,
    expert_balance: Tensor | None = None,
) -> LossShare:
    """agg(M w policy loss) - entropy_coeff * agg'(H) + kl_loss_coef * agg'(KL(pi || pi_ref)) + coef * agg'(teacher's)
    + router_aux_loss_coef * ``expert_balance``, the micro-batch's share of the loss on the balance of experts (scalar).

    ``aggregation``: the policy loss's agg. ``weights``: importance weights w of the rollout correction. ``kept``: M,
    False on tokens that the policy loss passes over, which the denominators count all the same, by the name of the
    statistic that counts these. All token tensors have shape [tokens].

    ``teacher``: what one says of the tokens; it may be all that is learnt from, without the policy loss.

    With use_bias_correction_kl the KL is r KL, r = pi / pi_old with its gradient: the tokens are the old policy's, and
    r makes them a sample of the policy's (DeepSeek-AI 2025, V3.2, eq. 7).
    """
    of_policy = token_weights(aggregation, inputs.mask, denominators)
    # As in verl, a loss that is defined with a mean of its own changes nothing for entropy and KL.
    per_token = token_weights(cfg.loss_agg_mode or TOKEN_MEAN, inputs.mask, denominators)
    shares, statistics, loss = dict[str, Tensor](), dict[str, Tensor](), inputs.log_probs.new_zeros(())
    if teacher is not None:
        losses, statistics = teacher.token_losses(inputs, cfg, weights)
        shares["distillation/loss"] = aggregate(losses, per_token)
        loss = shares["distillation/loss"]
    if teacher is None or teacher.cfg.use_task_rewards:
        policy = policy_loss(inputs, cfg)
        # As in verl the weights are those of the policy loss alone, not of entropy and KL.
        if weights is not None and policy.per_answer:
            # verl's: their geometric mean, with its guard for a weight of 0.
            weights = inputs.sequence_mean((weights + 1e-10).log()).exp()
        losses = policy.token_losses if weights is None else policy.token_losses * weights
        statistics = statistics | policy.statistics
        for name, tokens in (kept or {}).items():
            # A token that is passed over counts for nothing, even if its loss is infinite.
            losses = losses.masked_fill(~tokens, 0.0)
            statistics = statistics | {name: (~tokens).float()}
        shares["pg_loss"] = aggregate(losses, of_policy)
        loss = shares["pg_loss"] if teacher is None else shares["pg_loss"] + teacher.cfg.distillation_loss_coef * loss
    if entropy is not None:
        shares["entropy_loss"] = aggregate(entropy, per_token)
        loss = loss - entropy_coeff * shares["entropy_loss"]
    if kl is not None:
        kl = kl * inputs.log_ratio.exp() if cfg.use_bias_correction_kl else kl
        shares["kl_loss"] = aggregate(kl, per_token)
        loss = loss + cfg.kl_loss_coef * shares["kl_loss"]
    if expert_balance is not None:
        shares["moe/aux_loss"] = expert_balance
        loss = loss + cfg.router_aux_loss_coef * expert_balance
    return make_loss_share(loss, shares, statistics, inputs.mask)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, dict[str, Tensor]]:
    """max((V - R)^2, (clip(V, V_old +- clip) - R)^2) / 2   (Schulman et al. 2017, the clipped form of their code).

    All [tokens]; only ``values`` carries gradient. Returns token losses and per-token statistics.
    """
    # The larger of both losses: a value gains nothing by moving further than `clip` in one update, and one that moved
    # too far the wrong way still has its gradient.
    clipped = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
    plain_loss, clipped_loss = (values - returns).square(), (clipped - returns).square()
    statistics = {"vf_clipfrac": (clipped_loss > plain_loss).float(), "vpred_mean": values.detach()}
    return torch.maximum(plain_loss, clipped_loss) / 2, statistics


def aggregate(values: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over tokens; a token of weight 0 counts for nothing, even if its value is infinite."""
    return (weights * values.masked_fill(weights == 0, 0.0)).sum()


def make_loss_share(loss: Tensor, shares: dict[str, Tensor], statistics: dict[str, Tensor], mask: Ragged) -> LossShare:
    """The loss with its parts, detached, and the sums of the statistics over the tokens that count."""
    return LossShare(
        loss=loss,
        shares={name: share.detach() for name, share in shares.items()},
        token_sums={name: aggregate(values, mask.values) for name, values in statistics.items()},
    )

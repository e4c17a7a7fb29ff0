"""Losses of a micro-batch.

Actor: policy loss, entropy bonus, KL to the reference, divergence from a teacher. Critic: value loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from rltrain.algorithms.aggregation import Denominators, token_weights
from rltrain.algorithms.distillation import TeacherLoss
from rltrain.algorithms.policy_losses import PolicyLossFunction, PolicyLossInputs
from rltrain.algorithms.shapes import PerToken, Scalar, TokenMask
from rltrain.common.columns.batch import Batch
from rltrain.common.columns.ragged import Ragged
from rltrain.config.schema import ActorConfig
from rltrain.config.schema.declarations import TOKEN_MEAN

# Samples, with the log-probs of their policy tokens, and the entropy if it was computed.
Measured: TypeAlias = tuple[Batch, Tensor, Tensor | None]


@dataclass(frozen=True)
class LossShare:
    """Share of a micro-batch in the loss of its mini-batch."""

    loss: Scalar
    """Share of the mini-batch loss (scalar, differentiable)."""
    shares: dict[str, Scalar] = field(default_factory=dict)
    """Parts of the loss, to be summed over micro-batches and ranks."""
    token_sums: dict[str, Scalar] = field(default_factory=dict)
    """Sums over tokens, to be divided by the token count of the mini-batch."""
    measured: tuple[Measured, ...] = ()
    """Samples for which no earlier pass measured the mismatch between engine and trainer. The numbers stay on the
    device, because reading them makes the host wait."""

    def __add__(self, other: LossShare) -> LossShare:
        """Return the sum of the shares of two micro-batches."""
        return LossShare(
            self.loss + other.loss,
            _add(self.shares, other.shares),
            _add(self.token_sums, other.token_sums),
            self.measured + other.measured,
        )


def _add(shares: dict[str, Tensor], others: dict[str, Tensor]) -> dict[str, Tensor]:
    # A rank without samples computes an empty micro-batch to stay in sync. Its loss has no named parts.
    return shares | {name: shares[name] + value if name in shares else value for name, value in others.items()}


def actor_loss(
    inputs: PolicyLossInputs,
    denominators: Denominators,
    cfg: ActorConfig,
    policy_loss: PolicyLossFunction,
    aggregation: str,
    *,
    weights: PerToken | None = None,
    kept: Mapping[str, TokenMask] | None = None,
    entropy: PerToken | None = None,
    entropy_coeff: float = 0.0,
    kl: PerToken | None = None,
    teacher: TeacherLoss | None = None,
    expert_balance: Scalar | None = None,
) -> LossShare:
    """Return the micro-batch's share of the actor loss:

    agg(M w policy loss) - entropy_coeff * agg'(H) + kl_loss_coef * agg'(KL(pi || pi_ref)) + coef * agg'(teacher loss) +
    router_aux_loss_coef * ``expert_balance`` (scalar, the micro-batch's share of the auxiliary loss).

    ``aggregation``: mode of agg; agg' uses ``loss_agg_mode``. ``weights``: importance weights w of the rollout
    correction. ``kept``: masks M, by the name of the statistic that counts the tokens where M is False. These tokens
    are excluded from the policy loss, but included in the denominators. All token tensors have shape [tokens].
    ``teacher``: the teacher signal; it may replace the policy loss.

    With use_bias_correction_kl, the KL is multiplied by r = pi / pi_old, which also carries gradient: the tokens are
    samples of the old policy, and r reweights them to the policy (DeepSeek-AI 2025, V3.2, eq. 7).
    """
    of_policy = token_weights(aggregation, inputs.mask, denominators)
    # As in verl, a policy loss with a fixed aggregation does not change the aggregation of entropy and KL.
    per_token = token_weights(cfg.loss_agg_mode or TOKEN_MEAN, inputs.mask, denominators)
    shares, statistics, loss = dict[str, Tensor](), dict[str, Tensor](), inputs.log_probs.new_zeros(())
    if teacher is not None:
        losses, statistics = teacher.token_losses(inputs, cfg, weights)
        shares["distillation/loss"] = aggregate(losses, per_token)
        loss = shares["distillation/loss"]
    if teacher is None or teacher.cfg.use_task_rewards:
        policy = policy_loss(inputs, cfg)
        # As in verl the weights apply to the policy loss only, not to entropy and KL.
        if weights is not None and policy.per_answer:
            # As in verl, all tokens of a response get the geometric mean of their weights. 1e-10 avoids log(0).
            weights = inputs.sequence_mean((weights + 1e-10).log()).exp()
        losses = policy.token_losses if weights is None else policy.token_losses * weights
        statistics = statistics | policy.statistics
        for name, tokens in (kept or {}).items():
            # A masked token contributes nothing, even if its loss is infinite.
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


def value_loss(
    values: PerToken, old_values: PerToken, returns: PerToken, clip: float
) -> tuple[PerToken, dict[str, PerToken]]:
    """Compute max((V - R)^2, (clip(V, V_old +- clip) - R)^2) / 2   (Schulman et al. 2017, clipped as in their code).

    All [tokens]; only ``values`` carries gradient. Returns token losses and per-token statistics.
    """
    # The maximum of both: moving a value further than `clip` in one update does not reduce the loss, but a value that
    # moved too far in the wrong direction keeps its gradient.
    clipped = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
    plain_loss, clipped_loss = (values - returns).square(), (clipped - returns).square()
    statistics = {"vf_clipfrac": (clipped_loss > plain_loss).float(), "vpred_mean": values.detach()}
    return torch.maximum(plain_loss, clipped_loss) / 2, statistics


def aggregate(values: PerToken, weights: PerToken) -> Scalar:
    """Return the weighted sum over tokens. A token of weight 0 contributes nothing, even if its value is infinite."""
    return (weights * values.masked_fill(weights == 0, 0.0)).sum()


def make_loss_share(
    loss: Scalar, shares: dict[str, Scalar], statistics: dict[str, PerToken], mask: Ragged
) -> LossShare:
    """Return the loss with its detached parts, and the sums of the statistics over loss tokens."""
    return LossShare(
        loss=loss,
        shares={name: share.detach() for name, share in shares.items()},
        token_sums={name: aggregate(values, mask.values) for name, values in statistics.items()},
    )

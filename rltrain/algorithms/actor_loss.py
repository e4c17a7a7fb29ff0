"""The actor's loss on one micro-batch: policy loss, entropy bonus, KL to the reference."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rltrain.algorithms.aggregation import Denominators, token_weights
from rltrain.algorithms.kl import kl_per_token
from rltrain.algorithms.policy_losses import POLICY_LOSSES, ClipRange, PolicyLossInputs
from rltrain.config.schema import ActorConfig


@dataclass(frozen=True)
class ActorLoss:
    """loss: this micro-batch's share of the mini-batch loss (scalar, differentiable).

    shares: parts of the loss that add up over micro-batches and ranks. token_sums: sums over tokens, to be divided by the
    token count of the mini-batch.
    """

    loss: Tensor
    shares: dict[str, Tensor]
    token_sums: dict[str, Tensor]


def clip_range(cfg: ActorConfig) -> ClipRange:
    """``clip_ratio`` alone, or the asymmetric pair where it is set."""
    low = cfg.clip_ratio if cfg.clip_ratio_low is None else cfg.clip_ratio_low
    high = cfg.clip_ratio if cfg.clip_ratio_high is None else cfg.clip_ratio_high
    return ClipRange(low, high, cfg.clip_ratio_c)


def actor_loss(
    inputs: PolicyLossInputs,
    lengths: Tensor,
    denominators: Denominators,
    cfg: ActorConfig,
    *,
    entropy: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
) -> ActorLoss:
    """agg(policy loss) - entropy_coeff * agg(H) + kl_loss_coef * agg(KL(pi || pi_ref)).

    All token tensors have shape [lengths.sum()].
    """
    weights = token_weights(cfg.loss_agg_mode, lengths, denominators)
    policy = POLICY_LOSSES[cfg.policy_loss.loss_mode](inputs, clip_range(cfg))
    shares = {"pg_loss": (weights * policy.token_losses).sum()}
    loss = shares["pg_loss"]
    if entropy is not None:
        shares["entropy_loss"] = (weights * entropy).sum()
        loss = loss - cfg.entropy_coeff * shares["entropy_loss"]
    if ref_log_probs is not None:
        shares["kl_loss"] = (weights * kl_per_token(inputs.log_probs, ref_log_probs, cfg.kl_loss_type)).sum()
        loss = loss + cfg.kl_loss_coef * shares["kl_loss"]
    return ActorLoss(
        loss=loss,
        shares={name: share.detach() for name, share in shares.items()},
        token_sums={name: values.sum() for name, values in policy.statistics.items()},
    )

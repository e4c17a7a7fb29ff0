"""Distillation: divergence of the policy from a teacher at every token, and its loss (Agarwal et al. 2024, GKD).

Notation: p the policy's distribution over the vocabulary, q the teacher's, y the token sampled from p. A divergence
gets the full log-probs of a chunk of tokens and returns a hand-written gradient, because the logits of all tokens are
never stored (`models.head`). As in GKD, the gradient through the sampling of responses is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from rltrain.algorithms.kl import kl_per_token
from rltrain.algorithms.policy_losses import PolicyLossInputs, find_policy_loss
from rltrain.algorithms.shapes import Distributions, PerToken
from rltrain.config.schema import ActorConfig
from rltrain.config.schema.declarations import TEACHER_LOSS
from rltrain.config.schema.distillation import DistillationLossConfig


class Divergence(Protocol):
    """Divergence D of p from q per token; log_p and log_q are full distributions."""

    def value(self, log_p: Distributions, log_q: Distributions) -> tuple[PerToken, PerToken]:
        """Return (D, data that `gradient` needs per token)."""

    def gradient(self, log_p: Distributions, log_q: Distributions, kept: PerToken) -> Distributions:
        """Return dD / dz, where p = softmax(z). May overwrite ``log_q``."""


class ReverseKL:
    """Reverse KL: KL(p || q) = sum_v p (log p - log q);  dD / dz = p (log p - log q - KL)."""

    def value(self, log_p: Distributions, log_q: Distributions) -> tuple[PerToken, PerToken]:
        """See `Divergence`."""
        kl = torch.linalg.vecdot(log_p.exp(), log_p - log_q)
        return kl, kl

    def gradient(self, log_p: Distributions, log_q: Distributions, kept: PerToken) -> Distributions:
        """See `Divergence`."""
        return log_q.add_(kept[:, None]).sub_(log_p).mul_(log_p.exp()).neg_()


class ForwardKL:
    """Forward KL: KL(q || p) = sum_v q (log q - log p);  dD / dz = p - q."""

    def value(self, log_p: Distributions, log_q: Distributions) -> tuple[PerToken, PerToken]:
        """See `Divergence`."""
        kl = torch.linalg.vecdot(log_q.exp(), log_q - log_p)
        return kl, kl

    def gradient(self, log_p: Distributions, log_q: Distributions, kept: PerToken) -> Distributions:
        """See `Divergence`."""
        return log_p.exp().sub_(log_q.exp_())


@dataclass(frozen=True)
class JSD:
    """JSD: beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p   (Agarwal et al. 2024, eq. 1).

    dD / dz = (1 - beta) p (log p - log m - KL(p || m)).
    """

    beta: float

    def value(self, log_p: Distributions, log_q: Distributions) -> tuple[PerToken, PerToken]:
        """See `Divergence`."""
        log_m = self._log_mean(log_p, log_q)
        of_p = torch.linalg.vecdot(log_p.exp(), log_p - log_m)
        of_q = torch.linalg.vecdot(log_q.exp(), log_q - log_m)
        return self.beta * of_q + (1 - self.beta) * of_p, of_p

    def gradient(self, log_p: Distributions, log_q: Distributions, kept: PerToken) -> Distributions:
        """See `Divergence`."""
        log_m = self._log_mean(log_p, log_q)
        return log_m.add_(kept[:, None]).sub_(log_p).mul_(log_p.exp()).mul_(self.beta - 1)

    def _log_mean(self, log_p: Distributions, log_q: Distributions) -> Distributions:
        return torch.logaddexp(log_q + math.log(self.beta), log_p + math.log1p(-self.beta))


def divergence_of(cfg: DistillationLossConfig) -> Divergence:
    """Return the divergence for a ``loss_mode`` that compares whole distributions."""
    if cfg.loss_mode == "jsd":
        return JSD(cfg.jsd_beta)
    return ReverseKL() if cfg.loss_mode == "reverse_kl" else ForwardKL()


@dataclass(frozen=True)
class TeacherLoss:
    """Values from the teacher for the tokens of a micro-batch."""

    cfg: DistillationLossConfig
    log_probs: PerToken | None = None
    """log q(y) [tokens], for an estimated divergence; NaN for tokens that are not in the teacher's vocabulary."""
    divergence: PerToken | None = None
    """D [tokens], differentiable in the policy, for an exact divergence."""

    def token_losses(
        self, inputs: PolicyLossInputs, actor: ActorConfig, weights: PerToken | None
    ) -> tuple[PerToken, dict[str, PerToken]]:
        """Return losses [tokens], and per-token statistics [tokens].

        weights: importance weights, applied if the divergence is used as a cost in a policy loss.
        """
        distances, statistics = self._distances(inputs)
        if (limit := self.cfg.loss_max_clamp) is not None:
            distances = distances.clamp(-limit, limit)
        if not self.cfg.use_policy_gradient:
            return distances, statistics
        # Lu et al. 2025: the advantage of a token is its negated divergence from the teacher.
        costs = PolicyLossInputs(inputs.log_probs, inputs.old_log_probs, -distances.detach(), inputs.mask)
        losses = find_policy_loss(TEACHER_LOSS).function(costs, actor).token_losses
        return losses if weights is None else losses * weights, statistics

    def _distances(self, inputs: PolicyLossInputs) -> tuple[PerToken, dict[str, PerToken]]:
        if self.divergence is not None:
            kl = {"distillation/kl": self.divergence.detach()} if self.cfg.loss_mode == "reverse_kl" else {}
            return self.divergence, kl
        assert self.log_probs is not None
        log_p, least, unknown = inputs.log_probs, self.cfg.log_prob_min_clamp, self.log_probs.isnan()
        log_q = torch.where(unknown, log_p.detach(), self.log_probs)
        statistics = {"distillation/kl": (log_p - log_q).detach(), "distillation/unknown_tokens": unknown.float()}
        if least is not None:
            log_p, log_q = log_p.clamp(min=least), log_q.clamp(min=least)
        return kl_per_token(log_p, log_q, self.cfg.loss_mode), statistics

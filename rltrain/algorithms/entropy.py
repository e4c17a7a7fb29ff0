"""What the entropy of the policy decides: which tokens are learnt from, and the weight of an entropy bonus."""

from __future__ import annotations

import torch
from torch import Tensor

from rltrain.config.schema import AdaptiveEntropyConfig

# Entropies that differ by less are equal: the same token, packed beside others, has another last bit.
ENTROPY_ROUNDING = 1e-4


def certainty(entropies: Tensor, mask: Tensor) -> Tensor:
    """-H of every token, infinite where ``mask`` is 0; all [tokens]   (Wang et al. 2025, 2506.01939, eq. 5 and 6).

    The policy loss of a token counts where H >= tau, the border of the share ``top_entropy_quantile`` of all tokens of
    the batch with the highest H: those with the smallest of these numbers.
    """
    return (-entropies.double()).masked_fill(mask == 0, torch.inf)


def entropy_weight(coef: float, entropy: float, cfg: AdaptiveEntropyConfig) -> float:
    """alpha_k = c_k where H_k <= target_entropy, else 0   (He et al. 2025, Skywork-OR1, 2505.22312, section 3.2.5)."""
    assert cfg.target_entropy is not None
    return coef if entropy <= cfg.target_entropy else 0.0


def adapted_entropy_coef(coef: float, entropy: float, cfg: AdaptiveEntropyConfig) -> float:
    """c_(k + 1) = c_k + delta where H_k < target_entropy, c_k - delta where it is over that (the same section).

    delta is delta_ent_coef. The result is held between 0 and max_ent_coef, as the authors' code holds it between two
    bounds. An entropy that is NaN changes nothing.
    """
    assert cfg.target_entropy is not None
    difference = cfg.target_entropy - entropy
    moved = coef + cfg.delta_ent_coef * ((difference > 0) - (difference < 0))
    return min(max(moved, 0.0), cfg.max_ent_coef)

"""Token selection by entropy, and adaptation of the entropy coefficient."""

from __future__ import annotations

import torch

from rltrain.algorithms.shapes import NumberOrMask, PerToken
from rltrain.config.schema import AdaptiveEntropyConfig

# Entropies closer than this count as equal, because packing changes their last bits.
ENTROPY_ROUNDING = 1e-4


def certainty(entropies: PerToken, mask: NumberOrMask) -> PerToken:
    """Return keys [tokens] that sort tokens by decreasing entropy: -H, infinite where ``mask`` is 0.

    The policy loss counts only tokens with H >= tau (Wang et al. 2025, 2506.01939, eq. 5 and 6). tau is chosen so that
    a share ``top_entropy_quantile`` of the batch's tokens is counted. They have the highest H, so the smallest keys.
    """
    return (-entropies.double()).masked_fill(mask == 0, torch.inf)


def entropy_weight(coef: float, entropy: float, cfg: AdaptiveEntropyConfig) -> float:
    """Return c_k if H_k <= target_entropy, else 0   (He et al. 2025, Skywork-OR1, 2505.22312, section 3.2.5)."""
    assert cfg.target_entropy is not None
    return coef if entropy <= cfg.target_entropy else 0.0


def adapted_entropy_coef(coef: float, entropy: float, cfg: AdaptiveEntropyConfig) -> float:
    """Return c_(k + 1) = c_k + delta if H_k < target_entropy, c_k - delta if it is above (same section).

    delta is delta_ent_coef. The result is clamped to [0, max_ent_coef], as in the authors' code. An entropy of NaN
    changes nothing.
    """
    assert cfg.target_entropy is not None
    difference = cfg.target_entropy - entropy
    moved = coef + cfg.delta_ent_coef * ((difference > 0) - (difference < 0))
    return min(max(moved, 0.0), cfg.max_ent_coef)

"""The critic's loss, per token and before aggregation."""

from __future__ import annotations

import torch
from torch import Tensor


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

"""Aggregation of token losses, with denominators of the whole global mini-batch.

Problem: a mean per micro-batch depends on how micro-batches are formed. Choice: every mode is a weighted sum over
tokens whose denominators are counted over the mini-batch, so any split into micro-batches and ranks gives the same sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rltrain.algorithms.shapes import PerToken
from rltrain.common.columns import names as c
from rltrain.common.columns.batch import Batch
from rltrain.common.columns.ragged import Ragged

AGGREGATION_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True)
class Denominators:
    """Counts over a global mini-batch (loss tokens, sequences, groups with loss tokens), and the divisor of the mode
    ``seq-mean-token-sum-norm``.
    """

    tokens: int
    sequences: int
    # The scale factor is constant for a run. verl's default, the padded width of the batch, would change the scale of
    # the loss from batch to batch.
    loss_scale_factor: int
    groups: int = 1


def token_weights(mode: str, mask: Ragged, denominators: Denominators) -> PerToken:
    """Return token weights, so that the sum of ``weights * token_losses`` over all ranks is the aggregated loss.

    ``mask``: 1 for loss tokens, else 0 [tokens]. Returns [tokens].

    - token-mean: 1 / tokens (DAPO)
    - token-sum: 1
    - seq-mean-token-sum: 1 / sequences
    - seq-mean-token-mean: 1 / (sequences * loss tokens of the sequence) (GRPO paper)
    - seq-mean-token-sum-norm: 1 / (sequences * loss_scale_factor) (Dr. GRPO)
    """
    # If every token of a mini-batch was rejected, the loss is 0, not NaN.
    sequences = max(denominators.sequences, 1)
    if mode == "token-mean":
        return mask.values / max(denominators.tokens, 1)
    if mode == "token-sum":
        return mask.values
    if mode == "seq-mean-token-sum":
        return mask.values / sequences
    if mode == "seq-mean-token-mean":
        # Only this mode needs token counts per sequence. Local counts suffice, because micro-batches hold complete
        # responses.
        return mask.values * mask.broadcast(1.0 / (sequences * mask.sum().clamp(min=1))).values
    if mode == "seq-mean-token-sum-norm":
        return mask.values / (sequences * denominators.loss_scale_factor)
    raise ValueError(f"unknown aggregation mode '{mode}' (known: {', '.join(AGGREGATION_MODES)})")


def loss_mask(batch: Batch, tokens: Ragged) -> Ragged:
    """Return 1 per loss token, 0 per token rejected by the rollout correction; same shape and device as ``tokens``."""
    return tokens.like(
        batch.ragged(c.LOSS_MASK).values.float() if c.LOSS_MASK in batch else torch.ones_like(tokens.values)
    )

"""How token losses become one number, with denominators of the whole global mini-batch.

Problem: a mean per micro-batch depends on how the batch is cut. Choice: every mode is a weighted sum over tokens, and
its denominators are counted before the batch is cut, so any cut into micro-batches and ranks gives the same sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rltrain.base.columns import names as c
from rltrain.base.columns.batch import Batch
from rltrain.base.columns.ragged import Ragged

AGGREGATION_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True)
class Denominators:
    """Counts over one global mini-batch: loss tokens, sequences with one, their prompts; and the divisor of -norm."""

    tokens: int
    sequences: int
    # A constant of the run. The padded width, verl's default, would change the loss from batch to batch.
    horizon: int
    groups: int = 1


def token_weights(mode: str, mask: Ragged, denominators: Denominators) -> Tensor:
    """Weight of each token, so that ``(weights * token_losses).sum()`` over all ranks is the aggregated loss.

    ``mask``: 1 where a token counts, 0 where it does not [tokens]. Returns [tokens].

    - token-mean: 1 / tokens (DAPO)
    - token-sum: 1
    - seq-mean-token-sum: 1 / sequences
    - seq-mean-token-mean: 1 / (sequences * loss tokens of the sequence) (GRPO paper)
    - seq-mean-token-sum-norm: 1 / (sequences * horizon) (Dr. GRPO)
    """
    # A mini-batch of which every token was rejected has a loss of 0, not NaN.
    sequences = max(denominators.sequences, 1)
    if mode == "token-mean":
        return mask.values / max(denominators.tokens, 1)
    if mode == "token-sum":
        return mask.values
    if mode == "seq-mean-token-sum":
        return mask.values / sequences
    if mode == "seq-mean-token-mean":
        # The only mode with a count per sequence. It may be taken here because a micro-batch holds whole answers.
        return mask.values * mask.broadcast(1.0 / (sequences * mask.sum().clamp(min=1))).values
    if mode == "seq-mean-token-sum-norm":
        return mask.values / (sequences * denominators.horizon)
    raise ValueError(f"unknown aggregation mode '{mode}' (known: {', '.join(AGGREGATION_MODES)})")


def loss_mask(batch: Batch, tokens: Ragged) -> Ragged:
    """1 per token that counts, 0 per token that the rollout correction rejected; shaped and placed like ``tokens``."""
    return tokens.like(
        batch.ragged(c.LOSS_MASK).values.float() if c.LOSS_MASK in batch else torch.ones_like(tokens.values)
    )

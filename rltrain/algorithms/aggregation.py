"""How token losses become one number, with denominators of the whole global mini-batch.

Every mode is a weighted sum over tokens; only the weights differ. Because the denominators are counted before the batch is
cut, the sum over any cutting into micro-batches and ranks is the same number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

AGGREGATION_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True)
class Denominators:
    """Counts over one global mini-batch: loss tokens, sequences with at least one loss token, longest allowed response."""

    tokens: int
    sequences: int
    max_response_length: int


def token_weights(mode: str, lengths: Tensor, denominators: Denominators) -> Tensor:
    """Weight of each token, so that ``(weights * token_losses).sum()`` over all ranks is the aggregated loss.

    ``lengths``: loss tokens of each sequence [n]. Returns [lengths.sum()].

    - token-mean: 1 / tokens (DAPO)
    - seq-mean-token-sum: 1 / sequences
    - seq-mean-token-mean: 1 / (sequences * length of the sequence) (GRPO paper)
    - seq-mean-token-sum-norm: 1 / (sequences * max_response_length) (Dr. GRPO)
    """
    sequences = max(denominators.sequences, 1)
    if mode == "token-mean":
        per_sequence = torch.full_like(lengths, 1.0 / max(denominators.tokens, 1), dtype=torch.float32)
    elif mode == "seq-mean-token-sum":
        per_sequence = torch.full_like(lengths, 1.0 / sequences, dtype=torch.float32)
    elif mode == "seq-mean-token-mean":
        per_sequence = 1.0 / (sequences * lengths.clamp(min=1).float())
    elif mode == "seq-mean-token-sum-norm":
        per_sequence = torch.full_like(
            lengths, 1.0 / (sequences * denominators.max_response_length), dtype=torch.float32
        )
    else:
        raise ValueError(f"unknown aggregation mode '{mode}' (known: {', '.join(AGGREGATION_MODES)})")
    return per_sequence.repeat_interleave(lengths)

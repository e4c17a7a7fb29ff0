"""Attention over packed sequences: every segment sees itself, causally, and nothing else.

Registered with transformers as an attention implementation, so that any decoder that goes through its attention interface
is trained without padding. The segment lengths travel as a keyword argument of the forward call (host integers: no device
sync, and gradient checkpointing replays them).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "rltrain_packed"
SEGMENTS = "rltrain_segments"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    rltrain_segments: Sequence[int] | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each segment of one packed row.

    query [1, heads, tokens, d]; key, value [1, kv heads, tokens, d]; ``rltrain_segments`` adds up to tokens.
    Returns [1, tokens, heads, d]. Raises NotImplementedError for what it would compute wrongly.
    """
    if rltrain_segments is None:
        raise NotImplementedError(
            f"{type(module).__name__} does not hand keyword arguments on to its attention, so packed sequences cannot be trained"
        )
    if softcap is not None or "s_aux" in unused:
        raise NotImplementedError("attention with soft-capping or sinks is not supported on packed sequences")
    grouped = query.shape[1] != key.shape[1]
    parts = zip(*(tensor.split(list(rltrain_segments), dim=2) for tensor in (query, key, value)), strict=True)
    outputs = [
        nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=_window(q.shape[2], sliding_window, q.device), dropout_p=dropout,
            is_causal=not _needs_window(q.shape[2], sliding_window), scale=scaling, enable_gqa=grouped,
        )
        for q, k, v in parts
    ]  # fmt: skip
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _needs_window(length: int, sliding_window: int | None) -> bool:
    return sliding_window is not None and length > sliding_window


def _window(length: int, sliding_window: int | None, device: torch.device) -> Tensor | None:
    if sliding_window is None or length <= sliding_window:
        return None
    everything = torch.ones(length, length, dtype=torch.bool, device=device)
    return everything.tril() & everything.triu(1 - sliding_window)


def register() -> None:
    """Make ``attn_implementation="rltrain_packed"`` known; no mask is ever built for it."""
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)

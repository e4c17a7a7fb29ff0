"""Attention weights from query-key products, for layers with sinks, soft caps, chunks or query scaling.

Training (`models.attention`) and the embedded engine's cache (`workers.rollout.embedded.kv`) share these functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# Name of the attribute that marks layers whose queries `tempered` scales.
_TEMPERED = "rltrain_tempered"


class Kind(NamedTuple):
    """Properties of a layer's causal attention."""

    scaling: float | None = None
    """Factor of the query-key products. None: 1 / sqrt(d)."""
    window: int | None = None
    """Number of keys that a token sees, including its own."""
    chunk: int | None = None
    """Size of the chunks of a sample within which tokens see keys (Llama 4)."""
    softcap: float | None = None
    """A score s becomes softcap * tanh(s / softcap) (Gemma 2)."""
    sinks: Tensor | None = None
    """[heads]: an extra score in the softmax, without a value (gpt-oss)."""

    @classmethod
    def of(cls, module: nn.Module, scaling: float | None, window: int | None, softcap: float | None,
           sinks: Tensor | None) -> Kind:  # fmt: skip
        """Return the kind of the attention layer ``module``, from its config and the arguments of transformers."""
        return cls(scaling, window, chunk_of(module), softcap or None, sinks)

    def reach(self, places: Tensor) -> Tensor | None:
        """Return the number of keys visible at these positions of samples, including the token itself; None for all."""
        most = None if self.window is None else torch.full_like(places, self.window)
        if self.chunk is not None:
            within = places % self.chunk + 1
            most = within if most is None else torch.minimum(most, within)
        return most

    def scale(self, head_size: int) -> float:
        """Return the factor of the query-key products."""
        return head_size**-0.5 if self.scaling is None else self.scaling


def chunk_of(module: nn.Module) -> int | None:
    """Return the chunk length of a layer, or None. transformers passes it only as a mask."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None or layer is None or kinds[layer] != "chunked_attention":
        return None
    return int(config.attention_chunk_size)  # type: ignore[union-attr]


def tempered(module: nn.Module, query: Tensor, places: Callable[[torch.device], Tensor]) -> Tensor:
    """Scale query [1, heads, tokens, d] or [rows, heads, 1, d] by the tokens' positions [tokens or rows] in their
    samples, if the layer does so (Llama 4; Nakanishi 2025, arXiv 2501.19399).
    """
    if not getattr(module, _TEMPERED, False):
        return query
    place = places(query.device).float().view((1, 1, -1, 1) if len(query) == 1 else (-1, 1, 1, 1))
    config: Any = module.config
    factor = torch.log1p(torch.floor((place + 1) / config.floor_scale)) * config.attn_scale + 1
    return (query * factor).to(query.dtype)


def count_places_here(model: nn.Module) -> None:
    """Make `tempered` scale the queries of Llama 4, because transformers would use positions in the packed row."""
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            vars(module).update({"attn_temperature_tuning": False, _TEMPERED: True})


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Limit scores to +-softcap, unless it is None."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Compute the softmax of scores [any, kv heads, n, keys] with sinks [heads].

    n: the queries of all heads that share the keys, with the heads innermost.
    """
    if sinks is None:
        return torch.softmax(scores, -1)
    batch, kv_heads, rows, _ = scores.shape
    columns = sinks.to(scores.dtype).view(kv_heads, -1)
    column = columns.repeat(1, rows // columns.shape[1])[None, ..., None].expand(batch, -1, -1, 1)
    return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]


def masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, kind: Kind) -> Tensor:
    """Compute attention of any kind. Only the mask [n, keys] of 0 and -inf determines the visible keys.

    query [1, kv heads, n, d], the queries of all heads that share the keys, with the heads innermost; key, value [1, kv
    heads, keys, d].
    """
    if kind.softcap is None and kind.sinks is None:
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=kind.scaling)
    if torch.is_grad_enabled():
        # The scores are recomputed in the backward pass. Otherwise autograd would keep them for all blocks.
        again: Any = {"use_reentrant": False, "preserve_rng_state": False}
        result: Tensor = checkpoint(_products, query, key, value, mask, kind, **again)
        return result
    return _products(query, key, value, mask, kind)


def _products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, kind: Kind) -> Tensor:
    scores = capped((query @ key.mT) * kind.scale(query.shape[-1]), kind.softcap) + mask
    return weights(scores, kind.sinks) @ value

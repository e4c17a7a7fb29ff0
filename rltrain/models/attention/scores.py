"""From the products of queries and keys to the weights of a softmax, where a layer does more than scale them.

Training (`models.attention`) and the embedded engine's cache (`workers.rollout.embedded.kv`) take the same steps from
here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# Set on layers whose queries are scaled by `tempered`.
_TEMPERED = "rltrain_tempered"


class Kind(NamedTuple):
    """What a layer's attention is, beside causal."""

    scaling: float | None = None
    """Of the products, None for 1 / sqrt(d)."""
    window: int | None = None
    """A token sees that many keys, itself among them."""
    chunk: int | None = None
    """And only those in the same stretch of ``chunk`` places of its sample (Llama 4)."""
    softcap: float | None = None
    """A score s becomes softcap * tanh(s / softcap) (Gemma 2)."""
    sinks: Tensor | None = None
    """[heads]: one score more, which takes its part of the softmax and gives no value (gpt-oss)."""

    @classmethod
    def of(cls, module: nn.Module, scaling: float | None, window: int | None, softcap: float | None,
           sinks: Tensor | None) -> Kind:  # fmt: skip
        """The kind of the layer whose attention is ``module``, from it and from what transformers hands over."""
        return cls(scaling, window, chunk_of(module), softcap or None, sinks)

    def reach(self, places: Tensor) -> Tensor | None:
        """How many keys tokens at these places of their samples see, themselves among them; None for all."""
        most = None if self.window is None else torch.full_like(places, self.window)
        if self.chunk is not None:
            within = places % self.chunk + 1
            most = within if most is None else torch.minimum(most, within)
        return most

    def scale(self, head_size: int) -> float:
        """What the products are multiplied with."""
        return head_size**-0.5 if self.scaling is None else self.scaling


def chunk_of(module: nn.Module) -> int | None:
    """The length of the chunks within which a layer attends, or None. transformers says it by a mask alone."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None or layer is None or kinds[layer] != "chunked_attention":
        return None
    return int(config.attention_chunk_size)  # type: ignore[union-attr]


def tempered(module: nn.Module, query: Tensor, places: Callable[[torch.device], Tensor]) -> Tensor:
    """query [1, heads, tokens, d] or [rows, heads, 1, d], scaled by the tokens' places [tokens or rows] in their
    samples where the layer does so (Llama 4; Nakanishi 2025, arXiv 2501.19399).
    """
    if not getattr(module, _TEMPERED, False):
        return query
    place = places(query.device).float().view((1, 1, -1, 1) if len(query) == 1 else (-1, 1, 1, 1))
    config: Any = module.config
    factor = torch.log1p(torch.floor((place + 1) / config.floor_scale)) * config.attn_scale + 1
    return (query * factor).to(query.dtype)


def count_places_here(model: nn.Module) -> None:
    """Let `tempered` scale the queries of Llama 4, which would take a token's place in the packed row for that in its
    sample.
    """
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            vars(module).update({"attn_temperature_tuning": False, _TEMPERED: True})


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Scores within +-softcap, where there is one."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax of scores [any, kv heads, n, keys], where sinks [heads] take a part of it.

    The n are queries of all heads that share the keys, these heads innermost.
    """
    if sinks is None:
        return torch.softmax(scores, -1)
    batch, kv_heads, rows, _ = scores.shape
    columns = sinks.to(scores.dtype).view(kv_heads, -1)
    column = columns.repeat(1, rows // columns.shape[1])[None, ..., None].expand(batch, -1, -1, 1)
    return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]


def masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, kind: Kind) -> Tensor:
    """Attention of any kind; which keys are seen says the mask [n, keys] of 0 and -inf alone.

    query [1, kv heads, n, d], the queries of all heads that share the keys, these heads innermost; key, value
    [1, kv heads, keys, d].
    """
    if kind.softcap is None and kind.sinks is None:
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=kind.scaling)
    if torch.is_grad_enabled():
        # Computed again in the backward pass, or autograd would keep the scores of all blocks.
        again: Any = {"use_reentrant": False, "preserve_rng_state": False}
        result: Tensor = checkpoint(_products, query, key, value, mask, kind, **again)
        return result
    return _products(query, key, value, mask, kind)


def _products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, kind: Kind) -> Tensor:
    scores = capped((query @ key.mT) * kind.scale(query.shape[-1]), kind.softcap) + mask
    return weights(scores, kind.sinks) @ value

"""Attention over packed sequences: every segment attends causally to itself and to its prefix.

Padding would waste most of a batch of responses, and a mask over all packed tokens would grow quadratically. Therefore
this module registers an attention implementation with transformers that computes segment by segment, so every decoder
that uses transformers' attention interface can train without padding. The plan of segments is a keyword argument of the
forward call. It consists of host integers, so it needs no device sync, and gradient checkpointing passes it again.

The device's entry in `rltrain.common.device` selects the kernel: scaled dot products per block here, or the accelerator
kernels in `models.attention.varlen`. Not every kernel supports soft-capped scores and sinks. Without support, the
products are computed explicitly and recomputed in the backward pass, so that memory does not grow with the square of
the length.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import AttentionInterface, PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rltrain.common.errors import ConfigError
from rltrain.config.schema.families import family
from rltrain.models.attention.packing import AttentionPlan
from rltrain.models.attention.ring import Ring, ring_attend
from rltrain.models.attention.scores import Kind, masked, tempered
from rltrain.models.attention.ulysses import share_of_heads, share_of_tokens
from rltrain.models.attention.varlen import kernel_for

NAME = "rltrain_packed"
# transformers passes unknown keywords of a forward call to the attention function, whose parameter has this name.
PLAN = "rltrain_plan"
# Kinds of layers that process each token independently.
STATELESS = {"moe", "mlp"}
# Queries are processed in blocks, so a mask has at most this many rows (queries x heads per kv head).
_BLOCK = 256
# On a CPU, half-precision attention prepares a kernel for each length and is slow for short segments: a backward pass
# over varying lengths takes two to three times as long as in fp32. Segments with at most this many keys are therefore
# computed in fp32.
_FEW_KEYS = 1024
_PLAIN = Kind()


def attend(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, kind: Kind = _PLAIN) -> Tensor:
    """Compute attention by ``plan`` with the device's kernel.

    query [1, heads, tokens, d]; key, value [1, kv heads, tokens, d]; ``plan`` covers the tokens. Returns [1, tokens,
    heads, d]. Causality is bottom-right: the last query sees every key.
    """
    if kind.chunk is not None:
        plan = plan.chunked(kind.chunk)
    # Ignore a window that hides nothing, so that kernels use their plain causal path.
    if kind.window is not None and kind.window >= max(plan.key_lengths):
        kind = kind._replace(window=None)
    if (kernel := kernel_for(query, kind)) is not None:
        return kernel(query, key, value, plan, kind)
    parts = (query.split(plan.query_lengths, dim=2), _keys(key, plan), _keys(value, plan))
    outputs = [_segment(*part, kind) for part in zip(*parts, strict=True)]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


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
    s_aux: Tensor | None = None,
    rltrain_plan: AttentionPlan | None = None,
    rltrain_group: ProcessGroup | None = None,
    rltrain_ring: Ring | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Call `attend` with the signature that transformers expects. Raises NotImplementedError for unsupported layers.

    With ``rltrain_group``, the tensors hold this rank's slice of the tokens, and the plan covers the tokens of all
    ranks of the group, which attend by Ulysses, or by ring attention if ``rltrain_ring`` is given.
    """
    if rltrain_plan is None:
        raise NotImplementedError(
            f"{type(module).__name__} does not pass keyword arguments to its attention, so packed sequences cannot be "
            "trained"
        )
    if dropout or attention_mask is not None:
        raise NotImplementedError(
            f"{type(module).__name__} needs {'dropout' if dropout else 'a custom mask'}, which packed sequences do not "
            "support"
        )
    kind = Kind.of(module, scaling, sliding_window, softcap, s_aux)
    group = rltrain_group if rltrain_ring is None else rltrain_ring.heads
    if group is not None:
        query, key, value = share_of_heads(group, query, key, value)
        if s_aux is not None:
            kind = kind._replace(sinks=s_aux.chunk(group.size())[group.rank()])
    if rltrain_ring is None:
        output = attend(tempered(module, query, rltrain_plan.places), key, value, rltrain_plan, kind)
    else:
        output = ring_attend(module, query, key, value, rltrain_plan, kind, rltrain_ring.around)
    return output if group is None else share_of_tokens(group, output), None


def register() -> None:
    """Register ``attn_implementation="rltrain_packed"`` with transformers.

    No mask function is registered, so transformers skips mask creation and does not inspect the positions.
    """
    # Every model load calls this function, but registering again would replace the wrapper that compiled layers may
    # have registered, which torch.compile skips.
    if NAME not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        AttentionInterface.register(NAME, packed_attention)


def check_layers(config: PretrainedConfig, longest: int | None = None) -> None:
    """Raise ConfigError for models whose layers would mix the samples of a packed row.

    These are models with layer types that `attend` does not support, or rotary frequencies that depend on the longest
    sequence of a forward pass. longest: maximum number of tokens per sequence.
    """
    text = config.get_text_config()
    whole = getattr(text, "rope_parameters", None) or {}
    # Some families have separate rope parameters for each kind of layer.
    for rope in (whole, *(part for part in whole.values() if isinstance(part, dict))):
        limit: int = rope.get("original_max_position_embeddings") or getattr(text, "max_position_embeddings", None) or 0
        if rope.get("rope_type") not in ("longrope", "dynamic") or (longest is not None and longest <= limit):
            continue
        raise ConfigError(
            f"{type(config).__name__} changes its rotary frequencies beyond {limit} tokens "
            f"(rope_type={rope['rope_type']}), so samples of one forward would affect each other. Keep "
            f"data.max_prompt_length + data.max_response_length (now {longest}) within {limit}."
        )
    # Griffin calls its layer types block types.
    kinds = {*(getattr(text, "layer_types", None) or getattr(text, "block_types", None) or ())}
    kinds -= {"full_attention", "sliding_attention", "chunked_attention", "attention", *STATELESS}
    kinds -= {"linear_attention"} if family(text.model_type).gated_delta_nets else set()
    if kinds:
        raise ConfigError(
            f"{type(config).__name__} has layers of kind {', '.join(sorted(kinds))}, which cannot be trained on "
            "packed sequences. Use a model with full, sliding-window or chunked attention."
        )


# -- any device: scaled dot products, segment by segment ---------------------------------------------------------------


def _keys(tensor: Tensor, plan: AttentionPlan) -> list[Tensor]:
    """Split ``tensor`` [1, kv heads, tokens, d] into the keys that each segment sees.

    The tensor is split, not sliced, because the gradient of a slice is as large as the whole tensor.
    """
    parts = tensor.split(plan.query_lengths, dim=2)
    # A prefix is always a complete earlier segment, so its keys are one of the parts.
    place = {(segment.start, segment.stop): part for segment, part in zip(plan.segments, parts, strict=True)}
    return [
        torch.cat([place[segment.prefix], part], 2) if segment.prefix_length else part
        for segment, part in zip(plan.segments, parts, strict=True)
    ]


def _segment(query: Tensor, key: Tensor, value: Tensor, kind: Kind) -> Tensor:
    """Compute attention of query [1, heads, n, d], the last n positions of key, value [1, kv heads, m, d]."""
    groups, length, window = query.shape[1] // key.shape[1], query.shape[2], kind.window
    if query.is_cpu and query.dtype.itemsize < 4 and key.shape[2] <= _FEW_KEYS:
        return _segment(query.float(), key.float(), value.float(), kind).to(query.dtype)
    product = nn.functional.scaled_dot_product_attention
    fused = kind.softcap is None and kind.sinks is None
    # is_causal is aligned top-left, which equals bottom-right only if there are as many queries as keys.
    if fused and length == key.shape[2] and (window is None or length <= window):
        if groups > 1 and not query.is_cpu:
            # Without the flash kernel, enable_gqa leaves only a kernel that materializes the whole product.
            key, value, groups = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), 1
        return product(query, key, value, is_causal=True, scale=kind.scaling, enable_gqa=groups > 1)
    # Heads that share keys become neighbouring queries, so that each key is read, and its gradient written, once.
    query = query.unflatten(1, (-1, groups)).transpose(2, 3)
    parts = []
    for queries, keys in _blocks(length, key.shape[2], groups, window):
        before = key.shape[2] - length + queries.start - keys.start
        mask = _band(queries.stop - queries.start, before, groups, window, query)
        part = masked(query[:, :, queries].flatten(2, 3), key[:, :, keys], value[:, :, keys], mask, kind)
        parts.append(part.unflatten(2, (-1, groups)))
    return torch.cat(parts, 2).transpose(2, 3).flatten(1, 2)


def _blocks(num_queries: int, num_keys: int, groups: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of queries with the keys that any query of the block sees."""
    before, size = num_keys - num_queries, max(1, _BLOCK // groups)
    for start in range(0, num_queries, size):
        stop = min(start + size, num_queries)
        first = 0 if window is None else max(0, before + start + 1 - window)
        yield slice(start, stop), slice(first, before + stop)


def _band(num_queries: int, before: int, groups: int, window: int | None, like: Tensor) -> Tensor:
    """Return the mask [queries * groups, before + queries] of 0 and -inf.

    Query i has ``groups`` rows and sees key j if 0 <= before + i - j < window.
    """
    # Round up to a power of two, so that a few templates serve all lengths.
    middle = max(1024, 1 << (before - 1).bit_length())
    template = _template(max(1, _BLOCK // groups), middle, groups, window, like.dtype, like.device)
    mask = template[: num_queries * groups, middle - before : middle + num_queries]
    return mask if like.is_cpu else mask.contiguous()


@lru_cache(8)
# The first call may be in inference mode, and autograd cannot save tensors created in that mode.
@torch.inference_mode(False)
def _template(
    block: int, before: int, groups: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the mask of a whole block after ``before`` keys.

    Visibility depends only on the distance, so all other masks are slices of it.
    """
    i = torch.arange(block * groups, dtype=torch.int32, device=device)[:, None] // groups
    distance = i - torch.arange(-before, block, dtype=torch.int32, device=device)
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)

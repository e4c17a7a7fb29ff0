"""Attention over packed sequences: every segment sees itself, causally, and the prefix that it continues.

Padding wastes most of a batch of answers, and a mask over all packed tokens would grow with their square. So this
registers an attention implementation with transformers that computes segment by segment; every decoder that goes
through its attention interface is then trained without padding. The plan of segments travels as a keyword argument of
the forward call: it holds host integers, so it costs no device sync, and gradient checkpointing replays it.

The device's row in `rltrain.device` names the kernel: scaled dot products per block, variable-length flash attention
on CUDA, npu_fusion_attention on Ascend. The last two are written against the real signatures and have not been run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig

from rltrain.device import device_of, npu_fusion_attention
from rltrain.errors import ConfigError
from rltrain.models.packing import AttentionPlan
from rltrain.models.ulysses import share_of_heads, share_of_tokens

NAME = "rltrain_packed"
# transformers hands unknown keywords of a forward call on to the attention function, whose parameter has this name.
PLAN = "rltrain_plan"
# Queries are processed in blocks, so that a mask has at most this many rows (queries x heads per kv head).
_BLOCK = 256
# On a CPU, half precision prepares a kernel per length and is slow for short products: a backward pass over varying
# lengths takes two to three times as long. So segments that see at most this many keys are computed in fp32.
_FEW_KEYS = 1024
# npu_fusion_attention takes at most this many segments per call.
_NPU_SEGMENTS = 1024


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: AttentionPlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
) -> Tensor:
    """Attention by ``plan``, through the kernel of the device.

    query [1, heads, tokens, d]; key, value [1, kv heads, tokens, d]; ``plan`` covers the tokens. Returns
    [1, tokens, heads, d]. ``sliding_window``: a token sees that many keys, itself among them. Causality is
    bottom-right: the last query sees every key.
    """
    kernel = _kernel(query)
    # A window that hides nothing is dropped, so that kernels take the plain causal way.
    window = None if sliding_window is None or sliding_window >= max(plan.key_lengths) else sliding_window
    if kernel is not None:
        return kernel(query, key, value, plan, scaling, window)
    parts = (query.split(plan.query_lengths, dim=2), _keys(key, plan), _keys(value, plan))
    outputs = [_segment(*part, scaling, window) for part in zip(*parts, strict=True)]
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
    rltrain_plan: AttentionPlan | None = None,
    rltrain_group: ProcessGroup | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """`attend`, as transformers calls it. Raises NotImplementedError for models that it would compute wrongly.

    With ``rltrain_group`` the tensors hold this rank's slice of the tokens, and the plan covers the tokens of all ranks
    of the group.
    """
    if rltrain_plan is None:
        raise NotImplementedError(
            f"{type(module).__name__} does not hand keyword arguments on to its attention, so packed sequences "
            "cannot be trained"
        )
    if softcap is not None or unused.get("s_aux") is not None:
        raise NotImplementedError("attention with soft-capping or sinks is not supported on packed sequences")
    if dropout or attention_mask is not None:
        raise NotImplementedError(
            f"{type(module).__name__} asks for {'dropout' if dropout else 'a mask of its own'}, which packed "
            "sequences do not get"
        )
    if rltrain_group is None:
        return attend(query, key, value, rltrain_plan, scaling, sliding_window), None
    query, key, value = share_of_heads(rltrain_group, query, key, value)
    output = attend(query, key, value, rltrain_plan, scaling, sliding_window)
    return share_of_tokens(rltrain_group, output), None


def register() -> None:
    """Make ``attn_implementation="rltrain_packed"`` known; no mask is ever built for it."""
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


def check_layers(config: PretrainedConfig, longest: int | None = None) -> None:
    """Raises ConfigError for models whose layers would mix the samples of a packed row. longest: most tokens per
    sequence.

    These are models with kinds of layers that `attend` does not know, and models whose rotary frequencies depend on the
    longest sequence of a forward pass.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    limit: int = rope.get("original_max_position_embeddings") or getattr(text, "max_position_embeddings", None) or 0
    if rope.get("rope_type") in ("longrope", "dynamic") and (longest is None or longest > limit):
        raise ConfigError(
            f"{type(config).__name__} has other rotary frequencies beyond {limit} tokens "
            f"(rope_type={rope['rope_type']}), so samples of one forward would change each other. Keep "
            f"data.max_prompt_length + data.max_response_length (now {longest}) within {limit}."
        )
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ConfigError(
            f"{type(config).__name__} has layers of kind {', '.join(sorted(kinds))}, which rltrain cannot train on "
            "packed sequences. Use a model with full or sliding-window attention."
        )


# -- any device: scaled dot products, segment by segment ---------------------------------------------------------------


def _keys(tensor: Tensor, plan: AttentionPlan) -> list[Tensor]:
    """The part of ``tensor`` [1, kv heads, tokens, d] that each segment sees.

    Cut by split, because the gradient of a slice is as large as the whole tensor.
    """
    parts = tensor.split(plan.query_lengths, dim=2)
    # A prefix is always a whole earlier segment, so its keys are one of the parts.
    place = {(each.start, each.stop): part for each, part in zip(plan.segments, parts, strict=True)}
    return [
        torch.cat([place[each.prefix], part], 2) if each.prefix_length else part
        for each, part in zip(plan.segments, parts, strict=True)
    ]


def _segment(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """query [1, heads, n, d] of the last n places of key, value [1, kv heads, m, d]."""
    groups, own = query.shape[1] // key.shape[1], query.shape[2]
    if query.is_cpu and query.dtype.itemsize < 4 and key.shape[2] <= _FEW_KEYS:
        return _segment(query.float(), key.float(), value.float(), scaling, window).to(query.dtype)
    product = nn.functional.scaled_dot_product_attention
    # is_causal counts from the top left corner, which is the bottom right one only where there are as many queries as
    # keys.
    if own == key.shape[2] and (window is None or own <= window):
        if groups > 1 and not query.is_cpu:
            # Where the flash kernel does not fit, enable_gqa leaves only a kernel that builds the whole product at
            # once.
            key, value, groups = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), 1
        return product(query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1)
    # Heads that share keys become neighbouring queries, so that a key is read and its gradient written once for them
    # all.
    query = query.unflatten(1, (-1, groups)).transpose(2, 3)
    parts = []
    for queries, keys in _blocks(own, key.shape[2], groups, window):
        before = key.shape[2] - own + queries.start - keys.start
        mask = _band(queries.stop - queries.start, before, groups, window, query)
        part = product(
            query[:, :, queries].flatten(2, 3), key[:, :, keys], value[:, :, keys], attn_mask=mask, scale=scaling
        )
        parts.append(part.unflatten(2, (-1, groups)))
    return torch.cat(parts, 2).transpose(2, 3).flatten(1, 2)


def _blocks(num_queries: int, num_keys: int, groups: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, and the keys that any query of the block sees."""
    before, size = num_keys - num_queries, max(1, _BLOCK // groups)
    for start in range(0, num_queries, size):
        stop = min(start + size, num_queries)
        first = 0 if window is None else max(0, before + start + 1 - window)
        yield slice(start, stop), slice(first, before + stop)


def _band(num_queries: int, before: int, groups: int, window: int | None, like: Tensor) -> Tensor:
    """mask [queries * groups, before + queries], 0 or -inf.

    Query i, which has ``groups`` rows, sees key j when 0 <= before + i - j < window.
    """
    # Rounded up to a power of two, so that a few templates serve all lengths.
    middle = max(1024, 1 << (before - 1).bit_length())
    template = _template(max(1, _BLOCK // groups), middle, groups, window, like.dtype, like.device)
    mask = template[: num_queries * groups, middle - before : middle + num_queries]
    return mask if like.is_cpu else mask.contiguous()


@lru_cache(8)
# The first to ask may be in inference mode, and autograd refuses to save a tensor that was made there.
@torch.inference_mode(False)
def _template(
    block: int, before: int, groups: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The mask of a whole block behind ``before`` keys.

    Visibility depends on the distance alone, so every other mask is a part of it.
    """
    i = torch.arange(block * groups, dtype=torch.int32, device=device)[:, None] // groups
    distance = i - torch.arange(-before, block, dtype=torch.int32, device=device)
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


# -- variable-length kernels of accelerators (not run) -----------------------------------------------------------------

Kernel = Callable[[Tensor, Tensor, Tensor, AttentionPlan, float | None, int | None], Tensor]


def _kernel(query: Tensor) -> Kernel | None:
    """The device's own kernel for such queries, or None. Flash kernels compute in half precision alone."""
    kernel = device_of(query).attention
    if kernel == "npu":
        return _npu
    half = query.dtype in (torch.float16, torch.bfloat16)
    return _cuda if kernel == "flash" and half and query.shape[-1] <= 256 and _flash() else None


def _rows(tensor: Tensor) -> Tensor:
    """[1, heads, tokens, d] -> [tokens, heads, d]."""
    return tensor[0].transpose(0, 1)


def _cuda(
    query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scaling: float | None, window: int | None
) -> Tensor:
    query_starts, key_starts, where = plan.on_device(query.device)
    rows = [_rows(tensor)[where] if plan.has_prefixes else _rows(tensor).contiguous() for tensor in (key, value)]
    flash, width = _flash(), value.shape[-1]
    assert flash is not None
    # The kernel knows one head size; multi-head latent attention has narrower values.
    rows[1] = nn.functional.pad(rows[1], (0, query.shape[-1] - width))
    return flash(
        _rows(query).contiguous(), *rows, query_starts, key_starts, max(plan.query_lengths), max(plan.key_lengths),
        # The kernel counts the keys to the left of a token; our window counts the token itself too.
        scale=scaling, left=-1 if window is None else window - 1, grouped=query.shape[1] != key.shape[1],
    )[None, ..., :width]  # fmt: skip


@cache
def _flash() -> Callable[..., Any] | None:
    """torch's own variable-length attention (torch >= 2.11), else that of the flash-attn package, else None."""
    try:
        from torch.nn.attention.varlen import varlen_attn

        if {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys():
            return lambda *tensors, scale, left, grouped: varlen_attn(
                *tensors, scale=scale, window_size=(left, 0), enable_gqa=grouped
            )
    except ImportError:
        pass
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return lambda *tensors, scale, left, grouped: flash_attn_varlen_func(
        *tensors, softmax_scale=scale, causal=True, window_size=(left, 0)
    )


def _npu(
    query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, scaling: float | None, window: int | None
) -> Tensor:
    """Layout TND with host lengths; sparse_mode 3 is causal and 4 a band, both counted from the bottom right."""
    rows = [_rows(tensor) for tensor in (key, value)]
    if plan.has_prefixes:
        where = plan.on_device(query.device)[2]
        rows = [each[where] for each in rows]
    band = {"sparse_mode": 3} if window is None else {"sparse_mode": 4, "pre_tockens": window - 1, "next_tockens": 0}
    outputs = []
    for first in range(0, len(plan.segments), _NPU_SEGMENTS):
        q_ends, kv_ends = (ends[first : first + _NPU_SEGMENTS] for ends in (plan.query_ends, plan.key_ends))
        # The kernel takes cumulative lengths, which start anew with each call.
        q_start, kv_start = (ends[first - 1] if first else 0 for ends in (plan.query_ends, plan.key_ends))
        some = (each[kv_start : kv_ends[-1]].contiguous() for each in rows)
        outputs.append(npu_fusion_attention()(
            _rows(query)[q_start : q_ends[-1]].contiguous(), *some, query.shape[1], "TND",
            atten_mask=_upper_triangle(query.device), scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            actual_seq_qlen=tuple(end - q_start for end in q_ends),
            actual_seq_kvlen=tuple(end - kv_start for end in kv_ends), **band,
        )[0])  # fmt: skip
    return torch.cat(outputs)[None]


@cache
def _upper_triangle(device: torch.device) -> Tensor:
    """The fixed mask from which npu_fusion_attention takes its blocks."""
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)

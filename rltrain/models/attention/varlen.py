"""Packed attention by accelerator kernels: variable-length flash attention and npu_fusion_attention.

The calls follow the real signatures but have not been run; tests use doubles that implement the documented semantics.
torch's flash kernel does not support sinks. But sinks only rescale its result: with corrected softmax sum and output,
its backward pass computes the right gradients (`_Flash`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from rltrain.common.device import device_of, torch_npu
from rltrain.models.attention.packing import AttentionPlan
from rltrain.models.attention.scores import Kind

_log = logging.getLogger(__name__)
# npu_fusion_attention takes at most this many segments per call.
_NPU_SEGMENTS = 1024
# The largest head size that a flash kernel supports. torch's kernel also needs a multiple of 8.
_LARGEST_HEAD = 256

Kernel = Callable[[Tensor, Tensor, Tensor, AttentionPlan, Kind], Tensor]


def kernel_for(query: Tensor, kind: Kind) -> Kernel | None:
    """Return the device's kernel for these queries, or None. If a device with a kernel cannot use it here, a warning is
    logged once."""
    name = device_of(query).attention
    if name == "npu":
        return _slow("its kernel does not support soft-capped scores") if kind.softcap else _npu
    if name != "flash":
        return None
    if query.dtype not in (torch.float16, torch.bfloat16):
        return _slow(f"flash kernels compute in half precision, not in {query.dtype}")
    if query.shape[-1] > _LARGEST_HEAD or query.shape[-1] % 8:
        return _slow(f"no flash kernel supports heads of size {query.shape[-1]}")
    if _flash(kind.softcap is not None, kind.sinks is not None) is None:
        return _slow("soft-capped scores need the package flash-attn" if kind.softcap else "torch has no flash kernel")
    return _cuda


@cache
def _slow(reason: str) -> None:
    _log.warning("attention is computed in blocks of queries, several times slower than with a kernel: %s", reason)


def _rows(tensor: Tensor) -> Tensor:
    """Transpose [1, heads, tokens, d] to [tokens, heads, d]."""
    return tensor[0].transpose(0, 1)


def _gathered(tensor: Tensor, plan: AttentionPlan, where: Tensor) -> Tensor:
    """Gather the keys of all segments [keys, kv heads, d] from [1, kv heads, tokens, d]."""
    return _rows(tensor).index_select(0, where) if plan.has_prefixes else _rows(tensor).contiguous()


# -- CUDA --------------------------------------------------------------------------------------------------------------


def _cuda(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, kind: Kind) -> Tensor:
    query_starts, key_starts, where = plan.on_device(query.device)
    width = value.shape[-1]
    # The kernel has one head size, but the values of multi-head latent attention are narrower.
    value = nn.functional.pad(value, (0, query.shape[-1] - width))
    flash = _flash(kind.softcap is not None, kind.sinks is not None)
    assert flash is not None
    return flash(
        _rows(query).contiguous(), _gathered(key, plan, where), _gathered(value, plan, where),
        query_starts, key_starts, max(plan.query_lengths), max(plan.key_lengths), kind=kind,
    )[None, ..., :width]  # fmt: skip


@cache
def _flash(capped: bool, sinks: bool) -> Callable[..., Tensor] | None:
    """Return the function for this kind of attention, or None. Its arguments are (query, key, value, query starts, key
    starts, longest query, longest key, kind), and its tensors are [tokens, heads, d].
    """
    if capped:
        return None if sinks else _package()
    return (None if sinks else _torchs()) or (_Flash.of if torch.backends.cuda.is_flash_attention_available() else None)


def _left(kind: Kind) -> int:
    """Return the number of keys to the left of a token. Unlike in our window, the token itself is not counted."""
    return -1 if kind.window is None else kind.window - 1


def _torchs() -> Callable[..., Tensor] | None:
    """Return torch's public function (torch >= 2.11), which selects the device's fastest kernel, or None."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    parameters = inspect.signature(varlen_attn).parameters
    if "window_size" not in parameters:
        return None

    def flash(query: Tensor, key: Tensor, *others: Any, kind: Kind) -> Any:
        # torch 2.11 supports grouped queries without a keyword for them.
        grouped: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if "enable_gqa" in parameters else {}
        return varlen_attn(query, key, *others, scale=kind.scaling, window_size=(_left(kind), 0), **grouped)

    return flash


def _package() -> Callable[..., Tensor] | None:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return lambda *tensors, kind: flash_attn_varlen_func(
        *tensors, softmax_scale=kind.scaling, causal=True, window_size=(_left(kind), 0), softcap=kind.softcap
    )


class _Flash(torch.autograd.Function):
    """Flash operator of `varlen_attn`, with sinks.

    A sink s adds exp(s) to the sum of a row, whose logarithm is L: L' = log(exp(L) + exp(s)), and the output becomes o'
    = o exp(L - L'). Flash's backward pass recomputes P' = exp(scores - L') and dS = P' (do V^T - <do, o'>), so from L'
    and o' it computes the gradients with the sink. The sink's gradient is -exp(s - L') <do, o'>.
    """

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, *lengths: Any, kind: Kind) -> Tensor:
        result: Tensor = cls.apply(query, key, value, kind.sinks, lengths, kind.scale(query.shape[-1]), _left(kind))
        return result

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, lengths: tuple[Any, ...],
        scale: float, left: int,
    ) -> Tensor:  # fmt: skip
        windows = {"scale": scale, "window_size_left": left, "window_size_right": 0}
        output, total, state, unused, _ = _operators()[0](
            query, key, value, *lengths, 0.0, left < 0, return_debug_mask=False, **windows
        )
        if sinks is not None:  # total [heads, tokens]
            with_sink = torch.logaddexp(total, sinks.to(total.dtype)[:, None])
            output = (output * (total - with_sink).exp().mT[..., None]).to(output.dtype)
            total = with_sink
        ctx.save_for_backward(query, key, value, sinks, output, total, state, unused)
        ctx.lengths, ctx.windows = lengths, windows
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        query, key, value, sinks, output, total, state, unused = ctx.saved_tensors
        input_gradients = _operators()[1](
            gradient.contiguous(), query, key, value, output, total, *ctx.lengths, 0.0,
            ctx.windows["window_size_left"] < 0, state, unused, **ctx.windows,
        )  # fmt: skip
        of_sinks = None
        if sinks is not None:
            shares = (sinks.to(total.dtype)[:, None] - total).exp()
            products = (gradient.to(total.dtype) * output.to(total.dtype)).sum(-1).mT
            of_sinks = -(shares * products).sum(1).to(sinks.dtype)
        return (*input_gradients, of_sinks, None, None, None)


def flash_operators(query: Tensor, kind: Kind) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return torch's flash operators, forward and backward, or None if they do not take such queries."""
    takes = kind.softcap is None and kernel_for(query, kind) is _cuda
    return _operators() if takes and torch.backends.cuda.is_flash_attention_available() else None


def _operators() -> tuple[Callable[..., Any], Callable[..., Any]]:
    return torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward


# -- Ascend ------------------------------------------------------------------------------------------------------------


def _npu(query: Tensor, key: Tensor, value: Tensor, plan: AttentionPlan, kind: Kind) -> Tensor:
    """Call the kernel with layout TND and host lengths; sparse_mode 3 is causal and 4 a band, both bottom-right."""
    where = plan.on_device(query.device)[2]
    rows = [_gathered(tensor, plan, where) for tensor in (key, value)]
    options: dict[str, Any] = {"sparse_mode": 3}
    if kind.window is not None:
        options = {"sparse_mode": 4, "pre_tockens": kind.window - 1, "next_tockens": 0}
    if kind.sinks is not None:
        options["sink"] = kind.sinks.float()
    outputs = []
    for first in range(0, len(plan.segments), _NPU_SEGMENTS):
        q_ends, kv_ends = (ends[first : first + _NPU_SEGMENTS] for ends in (plan.query_ends, plan.key_ends))
        # The kernel takes cumulative lengths, which start from 0 in each call.
        q_start, kv_start = (ends[first - 1] if first else 0 for ends in (plan.query_ends, plan.key_ends))
        slices = (kv_rows[kv_start : kv_ends[-1]].contiguous() for kv_rows in rows)
        outputs.append(torch_npu().npu_fusion_attention(
            _rows(query)[q_start : q_ends[-1]].contiguous(), *slices, query.shape[1], "TND",
            atten_mask=_upper_triangle(query.device), scale=kind.scale(query.shape[-1]),
            actual_seq_qlen=tuple(end - q_start for end in q_ends),
            actual_seq_kvlen=tuple(end - kv_start for end in kv_ends), **options,
        )[0])  # fmt: skip
    return torch.cat(outputs)[None]


@cache
@torch.inference_mode(False)  # the first call may be in that mode, whose tensors autograd cannot save
def _upper_triangle(device: torch.device) -> Tensor:
    """Return the fixed mask from which npu_fusion_attention takes its blocks."""
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)

"""torch_npu's fused operators by their definitions, with the real names and arguments."""

from typing import Any

import torch
from torch import Tensor


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt(input.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return gamma * (input.float() * scale).to(input.dtype), scale


def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Any = None) -> Tensor:
    assert rotary_mode == "half", rotary_mode
    assert rotate is None
    left, right = input.chunk(2, -1)
    return input * r1 + torch.cat([-right, left], -1) * r2


def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    gate, up = input.chunk(2, dim)
    return torch.nn.functional.silu(gate) * up


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """Layout TND with the two modes that count from the bottom right: 3 (causal) and 4 (a band).

    query [tokens, heads, d]; key, value [tokens, kv heads, d]; lengths are cumulative and on the host.
    """
    assert input_layout == "TND", f"the double knows the layout TND, not {input_layout}"
    assert query.shape[1] == head_num
    assert sparse_mode in (3, 4), f"the double knows the modes 3 and 4, not {sparse_mode}"
    assert {pse, padding_mask, prefix} == {None}
    assert keep_prob == 1.0
    assert atten_mask is not None
    if not hasattr(atten_mask, "is_the_triangle"):  # looked at once: the device has no memory for such checks
        expected = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
        assert torch.equal(atten_mask.cpu(), expected), "these modes take the upper triangle"
        atten_mask.is_the_triangle = True
    for tensor in (query, key, value):
        assert tensor.is_contiguous(), "the kernel reads contiguous rows"
        assert tensor.dtype == query.dtype
    assert sink is None or (sink.dtype == torch.float32 and sink.shape == (head_num,))
    for ends, tensor in ((actual_seq_qlen, query), (actual_seq_kvlen, key)):
        assert {type(end) for end in ends} == {int}, "lengths are host integers"
        assert len(ends) <= 1024, "the kernel takes at most 1024 segments"
        assert ends[-1] == len(tensor), f"the lengths end at {ends[-1]}, and there are {len(tensor)} rows"
    if sparse_mode == 3:
        pre_tockens, next_tockens = 2147483647, 0
    spans = [*zip(_spans(actual_seq_qlen), _spans(actual_seq_kvlen), strict=True)]
    output, largest, total = _Fused.apply(query, key, value, sink, spans, (scale, pre_tockens, next_tockens))
    return output, largest, total, query.new_empty(0), 0, 0, 0


class _Fused(torch.autograd.Function):
    """Saves for the backward pass what the fused kernel saves: no products, but eight copies of two numbers per row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, spans: Any, how: Any) -> Any:
        output = _by_definition(query, key, value, sink, spans, how)
        rows = [query.new_zeros(*query.shape[:2], 8, dtype=torch.float32) for _ in range(2)]
        ctx.save_for_backward(query, key, value, sink, output, *rows)
        ctx.spans, ctx.how = spans, how
        ctx.mark_non_differentiable(*rows)
        return output, *rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *unused: Tensor) -> Any:
        given = [tensor if tensor is None else tensor.detach().requires_grad_() for tensor in ctx.saved_tensors[:4]]
        with torch.enable_grad():
            output = _by_definition(*given, ctx.spans, ctx.how)
        found = iter(torch.autograd.grad(output, [each for each in given if each is not None], gradient))
        return *(each if each is None else next(found) for each in given), None, None


def _by_definition(query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, spans: Any, how: Any) -> Tensor:
    scale, before, after = how
    groups = query.shape[1] // key.shape[1]
    outputs = []
    for own, seen in spans:
        q, k, v = query[own], key[seen], value[seen]
        # Rows of heads that share keys: [kv heads, groups, n, d].
        rows = q.unflatten(1, (-1, groups)).permute(1, 2, 0, 3)
        places = torch.arange(len(q), device=query.device)[:, None] + len(k) - len(q)
        distance = places - torch.arange(len(k), device=query.device)
        hidden = (distance < -after) | (distance > before)
        scores = (rows.float() @ k.float().permute(1, 2, 0)[:, None]) * scale
        scores = scores.masked_fill(hidden, -torch.inf)
        if sink is not None:
            extra = sink.unflatten(0, (-1, groups))[..., None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, extra], -1)
        weights = scores.softmax(-1)[..., : len(k)]
        mixed = weights @ v.float().transpose(0, 1)[:, None]
        outputs.append(mixed.permute(2, 0, 1, 3).flatten(1, 2).to(query.dtype))
    return torch.cat(outputs)


def _spans(ends: Any) -> list[slice]:
    return [slice(start, end) for start, end in zip((0, *ends[:-1]), ends, strict=True)]

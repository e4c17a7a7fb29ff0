"""torch_npu's fused operators by their definitions, with the names and arguments of the real ones."""

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
    assert {pse, padding_mask, prefix, sink} == {None}
    assert keep_prob == 1.0
    assert atten_mask is not None
    assert torch.equal(atten_mask, torch.ones(2048, 2048, dtype=torch.bool, device=query.device).triu(1)), (
        "these modes take the upper triangle"
    )
    for tensor in (query, key, value):
        assert tensor.is_contiguous(), "the kernel reads contiguous rows"
        assert tensor.dtype == query.dtype
    for ends, tensor in ((actual_seq_qlen, query), (actual_seq_kvlen, key)):
        assert {type(end) for end in ends} == {int}, "lengths are host integers"
        assert len(ends) <= 1024, "the kernel takes at most 1024 segments"
        assert ends[-1] == len(tensor), f"the lengths end at {ends[-1]}, and there are {len(tensor)} rows"
    assert len(actual_seq_qlen) == len(actual_seq_kvlen)
    if sparse_mode == 3:
        pre_tockens, next_tockens = 2147483647, 0
    groups = query.shape[1] // key.shape[1]
    outputs = []
    for own, seen in zip(_spans(actual_seq_qlen), _spans(actual_seq_kvlen), strict=True):
        q, k, v = query[own], key[seen], value[seen]
        # Rows of heads that share keys: [kv heads, groups * n, d].
        rows = q.unflatten(1, (-1, groups)).permute(1, 2, 0, 3)
        places = torch.arange(len(q), device=query.device)[:, None] + len(k) - len(q)
        distance = places - torch.arange(len(k), device=query.device)
        hidden = (distance < -next_tockens) | (distance > pre_tockens)
        scores = (rows.float() @ k.float().permute(1, 2, 0)[:, None]) * scale
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        mixed = weights @ v.float().transpose(0, 1)[:, None]
        outputs.append(mixed.permute(2, 0, 1, 3).flatten(1, 2).to(query.dtype))
    nothing = query.new_empty(0)
    return torch.cat(outputs), nothing, nothing, nothing, 0, 0, 0


def _spans(ends: Any) -> list[slice]:
    return [slice(start, end) for start, end in zip((0, *ends[:-1]), ends, strict=True)]

"""Gated delta rule over segments of a packed row (Yang et al. 2025, arXiv 2412.06464).

Each head has a memory, which is updated chunk by chunk: first within all chunks of all segments at once, then from
chunk to chunk, in parallel over the segments that have another chunk. flash-linear-attention has a kernel for this; it
is called with its documented arguments but has not been run here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from rltrain.common.device import send

_CHUNK = 64


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, step: Tensor, lengths: Sequence[int],
    before: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the gated delta rule: S_t = a_t S_{t-1} (1 - b_t k_t k_t^T) + b_t v_t k_t^T, o_t = S_t q_t.

    query, key [tokens, heads, d] (normalized here, and query divided by sqrt(d)); value [tokens, heads, d']; decay (log
    a), step (b) [tokens, heads]; before: initial memories [segments, heads, d, d'], or None for zeros. Returns outputs
    [tokens, heads, d'] in fp32 and the final memories of the segments.

    Chunks as in section 3.3 of the paper: with G the running sums of log a, D_ij = exp(G_i - G_j) for i >= j, A = 1 +
    strictly lower (b K K^T D): U = A^-1 b V and W = A^-1 b exp(G) K, so that O = exp(G) Q S + lower (Q K^T D) (U - W S)
    and S' = exp(G_end) S + (exp(G_end - G) K)^T (U - W S).
    """
    query, key, value, decay, step = (tensor.float() for tensor in (query, key, value, decay, step))
    query, key = (tensor * torch.rsqrt(tensor.square().sum(-1, keepdim=True) + 1e-6) for tensor in (query, key))
    query = query * query.shape[-1] ** -0.5
    if before is None:
        before = value.new_zeros(len(lengths), value.shape[1], key.shape[2], value.shape[2])
    if max(lengths) == 1:
        return _one_step(query, key, value, decay, step, before.float())
    size, where, back, counts, order, home = _chunks(tuple(lengths), value.device)
    # Shape [chunks, heads, size, ...]. Padding is zero, so it changes neither outputs nor memories.
    query, key, value = (
        pad(tensor, (0, 0, 0, 0, 0, 1)).index_select(0, where).unflatten(0, (-1, size)).transpose(1, 2)
        for tensor in (query, key, value)
    )
    decay, step = (
        pad(tensor, (0, 0, 0, 1)).index_select(0, where).unflatten(0, (-1, size)).transpose(1, 2)
        for tensor in (decay, step)
    )
    sums = decay.cumsum(-1)
    hidden = torch.ones(size, size, dtype=torch.bool, device=value.device).triu(1)
    between = (sums[..., :, None] - sums[..., None, :]).masked_fill(hidden, -torch.inf).exp()
    system = (key * step[..., None]) @ key.mT * between
    sides = torch.cat([value, key * sums.exp()[..., None]], -1) * step[..., None]
    # The solver reads only below the diagonal and assumes ones on it.
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    new, read = solved.split([value.shape[-1], key.shape[-1]], -1)
    within = query @ key.mT * between
    query, end = query * sums.exp()[..., None], sums[..., -1:]
    key = key * (end - sums).exp()[..., None]
    memory, outputs, ended = before.float().index_select(0, order), [], []
    pieces = zip(
        *(tensor.split(counts) for tensor in (query, key, new, read, within, end.exp()[..., None])), strict=True
    )
    for queries, keys, values, reads, inner, keep in pieces:
        # Segments are sorted by number of chunks, so finished ones are last.
        ended.append(memory[len(queries) :])
        memory = memory[: len(queries)]
        values = values - reads @ memory
        outputs.append(queries @ memory + inner @ values)
        memory = memory * keep + keys.mT @ values
    after = torch.cat([memory, *ended[::-1]]).index_select(0, home)
    return torch.cat(outputs).transpose(1, 2).flatten(0, 1).index_select(0, back), after


def _one_step(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, step: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `delta_rule` for segments of one token, such as the rows of a decode step."""
    memory = memory * decay.exp()[..., None, None]
    recalled_value = (key[:, :, None] @ memory)[:, :, 0]
    memory = memory + key[..., None] * ((value - recalled_value) * step[..., None])[:, :, None]
    return (query[:, :, None] @ memory)[:, :, 0], memory


@lru_cache(8)
# The first call may be in inference mode, and autograd cannot save tensors created in that mode.
@torch.inference_mode(False)
def _chunks(lengths: tuple[int, ...], device: torch.device) -> tuple[int, Tensor, Tensor, list[int], Tensor, Tensor]:
    """Return the chunk layout: chunk size; token index of each chunk slot (``total`` for padding); slot of each token;
    number of segments with a first, second, ... chunk; the segments sorted by number of chunks; and the inverse of that
    order.

    The first chunks of all segments come before the second ones.
    """
    size = min(_CHUNK, max(lengths))
    firsts, total = list(accumulate((0, *lengths[:-1]))), sum(lengths)
    # Python integers, because in a dry run meta tensors have no values.
    numbers = [-(-length // size) for length in lengths]
    order = sorted(range(len(lengths)), key=lambda segment: -numbers[segment])
    counts = [sum(num_chunks > number for num_chunks in numbers) for number in range(max(numbers))]
    where = []
    for number, count in enumerate(counts):
        for segment in order[:count]:
            tokens = torch.arange(number * size, (number + 1) * size)
            where.append(torch.where(tokens < lengths[segment], tokens + firsts[segment], total))
    row = torch.cat(where)
    back = torch.empty(total + 1, dtype=torch.long)
    back[row] = torch.arange(len(row))
    first = torch.tensor(order)
    row, back, first, home = (send(indices, device) for indices in (row, back[:total], first, first.argsort()))
    return size, row, back, counts, first, home


@cache
def fused_rule() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return flash-linear-attention's kernel with the arguments of `delta_rule`, or None if it is not installed."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None

    def rule(
        query: Tensor, key: Tensor, value: Tensor, decay: Tensor, step: Tensor, lengths: Sequence[int],
        before: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        starts = send(torch.tensor((0, *accumulate(lengths))), query.device)
        output, memory = chunk_gated_delta_rule(
            query[None], key[None], value[None], g=decay[None], beta=step[None], initial_state=before,
            output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=starts,
        )  # fmt: skip
        return output[0], memory

    return rule

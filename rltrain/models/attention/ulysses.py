"""Sequence parallelism (Jacobs et al. 2023, DeepSpeed-Ulysses): the ranks of a group share one packed row.

The activations of a long sequence may not fit on one rank. Therefore every rank runs the layers on its slice of the
tokens, and an all-to-all around attention exchanges tokens for heads: each rank attends over all tokens with its share
of the heads. The log-probs of response tokens are computed on the ranks of their predictors and then gathered on every
rank, so that all ranks compute the same loss. Each rank's gradient is its part of the group's gradient, and FSDP sums
the parts. If the number of ranks does not divide the number of heads, ranks pass keys and values around instead
(`models.attention.ring`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad
from transformers import PretrainedConfig

from rltrain.common.device import COLLECTIVE_TIMEOUT, send
from rltrain.common.errors import ConfigError
from rltrain.models.attention.packing import PackedInputs

GROUP = "rltrain_group"
RING_KEY = "ring_attention_size"


def sequence_group(
    config: PretrainedConfig, size: int, key: str, ring: int = 1, tensor_size: int = 1
) -> ProcessGroup | None:
    """Return the group of ``size`` ranks that share sequences, or None for size 1. A collective.

    The ranks are neighbours. With tensor parallelism, they are every ``tensor_size``-th rank, because the neighbours of
    a tensor-parallel group share the same sequences too. ring: size of the rings among these ranks
    (`models.attention.ring`). Raises ConfigError, which names ``key``, if the model cannot be split.
    """
    if problem := heads_problem(config, size // ring * tensor_size, key, ring):
        raise ConfigError(problem)
    return _neighbours(dist.group.WORLD, size, tensor_size) if size > 1 else None


def heads_problem(config: PretrainedConfig, size: int, key: str, ring: int = 1) -> str | None:
    """Return why the model's attention cannot be split into ``size`` parts, as ``key`` requires, or None.

    ring: size of the rings that connect such groups. Recurrent layers divide their heads among all ranks of a sequence.
    """
    text = config.get_text_config()
    # The states of recurrent layers are per value head.
    for name, kind, parts in (
        ("num_attention_heads", "attention", size), ("linear_num_value_heads", "recurrent", size * ring),
    ):  # fmt: skip
        heads = getattr(text, name, None) or parts
        if heads % parts:
            fits = ", ".join(str(divisor) for divisor in range(1, heads + 1) if heads % divisor == 0)
            if parts > size:
                rings = f"{key.rpartition('.')[0]}.{RING_KEY}={ring}"
                return f"{rings} times {key}={size} does not divide the {heads} {kind} heads. Use a product of {fits}."
            around = f", and share sequences further by {RING_KEY}" if "ulysses" in key and kind == "attention" else ""
            return f"{key}={size} does not divide the {heads} {kind} heads of the model. Use one of {fits}{around}."
    return None


@cache
def _neighbours(world: ProcessGroup, size: int, stride: int) -> ProcessGroup:
    """Create the sequence groups, once for all models of a process, and return this rank's group. ``world``: cache key,
    so that groups are created again for a new world."""
    ranks = torch.arange(world.size()).view(-1, size, stride).mT.reshape(-1, size)
    group, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), COLLECTIVE_TIMEOUT)
    return group


# -- around attention --------------------------------------------------------------------------------------------------


Sizes = list[int] | None


def exchange(rows: Tensor, group: ProcessGroup, sent: Sizes = None, received: Sizes = None) -> Tensor:
    """Exchange rows [n, ...] by all-to-all. Returns the rows from all ranks of ``group``, in rank order.

    sent: number of rows for each rank (rows are in rank order); received: number of rows from each rank. None: equal
    numbers.
    """
    exchanged: Tensor = _Exchange.apply(rows, group, sent, received)
    return exchanged


class _Exchange(torch.autograd.Function):
    """All-to-all, whose gradient is an all-to-all with swapped sizes."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup, sent: Sizes, received: Sizes) -> Tensor:
        ctx.way_back = group, received, sent
        arrived = rows.new_empty(len(rows) if received is None else sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(gradients[0], *ctx.way_back), None, None, None


def share_of_heads(group: ProcessGroup, *tensors: Tensor) -> list[Tensor]:
    """Exchange some tokens of all heads for all tokens of some heads, in one all-to-all.

    tensors: query, key, value, each [1, heads, tokens / ranks, d]. Returns each as [1, heads / ranks, tokens, d]. Heads
    that are not divisible by the ranks (keys and values of grouped queries) are repeated until they are.
    """
    ranks = group.size()
    parts = []
    for tensor in tensors:
        times = math.lcm(tensor.shape[1], ranks) // tensor.shape[1]
        # Copies of a head are adjacent, so each rank gets the keys for its share of the queries.
        tensor = tensor.repeat_interleave(times, 1) if times > 1 else tensor
        parts.append(tensor[0].unflatten(0, (ranks, -1)))
    received = exchange(torch.cat([part.flatten(1) for part in parts], 1), group)
    pieces = received.split([part[0].numel() for part in parts], 1)
    return [
        piece.view(part.shape).transpose(0, 1).flatten(1, 2)[None] for piece, part in zip(pieces, parts, strict=True)
    ]


def share_of_tokens(group: ProcessGroup, tensor: Tensor) -> Tensor:
    """Invert `share_of_heads`: map [1, tokens, heads / ranks, d] to [1, tokens / ranks, heads, d]."""
    parts = tensor[0].unflatten(0, (group.size(), -1))
    received = exchange(parts.flatten(1), group).view(parts.shape)
    return received.transpose(0, 1).flatten(1, 2)[None]


# -- around the model --------------------------------------------------------------------------------------------------


Collect = Callable[[Tensor], Tensor]


def share_of_row(inputs: PackedInputs, group: ProcessGroup | None) -> tuple[PackedInputs, Collect]:
    """Return this rank's slice of a packed row, and a function that gathers results.

    The row is padded by one unused segment, so that all slices have equal length. In the returned inputs, tokens,
    positions and images cover the slice. Predictors and labels belong to the response tokens whose predictors are in
    the slice. The plan covers the whole row. The function takes one number per response token of the slice and returns
    one per response token of the row.
    """
    if group is None:
        return inputs, lambda values: values
    ranks, total = group.size(), inputs.plan.num_tokens
    length = -(-total // ranks)
    start = group.rank() * length
    plan = inputs.plan.padded_to(length * ranks)
    tokens, positions = (
        pad(tensor, (0, length * ranks - total))[..., start : start + length]
        for tensor in (inputs.tokens, inputs.positions)
    )
    images = None if inputs.images is None else inputs.images.within(start, length)
    # Padding tokens are routed to expert 0, because they need some expert.
    experts = None if inputs.experts is None else slice_of_row(inputs.experts, group)
    # Make the indices relative to the slice. Indices of predictors on other ranks are out of range.
    predictors = inputs.host_predictors - start
    own_places = ((predictors >= 0) & (predictors < length)).nonzero()[:, 0]
    places = send(own_places, tokens.device)
    share = replace(
        inputs, tokens=tokens, positions=positions, plan=plan, images=images, host_predictors=predictors[own_places],
        experts=experts,
    )  # fmt: skip
    share = replace(share, predictors=inputs.predictors[places] - start, labels=inputs.labels[places])
    num_answer_tokens = len(inputs.labels)

    def collect(values: Tensor) -> Tensor:
        # If the row has no response tokens, all ranks of the group skip the collective.
        return _Collect.apply(values, places, num_answer_tokens, group) if num_answer_tokens else values

    return share, collect


def slice_of_row(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return this rank's slice of a value per token [total, ...], padded with zeros."""
    if group is None:
        return values
    length = -(-len(values) // group.size())
    missing = length * group.size() - len(values)
    start = group.rank() * length
    return pad(values, (0, 0) * (values.dim() - 1) + (0, missing))[start : start + length]


def sum_over_group(part: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum ``part`` over the group. Only this rank's part has a gradient."""
    if group is None:
        return part
    total = part.detach().clone()
    dist.all_reduce(total, group=group)
    return part + (total - part.detach())


def gather_row(values: Tensor, total: int, group: ProcessGroup | None) -> Tensor:
    """Gather values [total, ...] of all tokens of the row from the slices of the ranks, without a gradient."""
    if group is None:
        return values
    # The values are gathered as bytes, because indices of more than 256 experts are int16, which neither gloo nor NCCL
    # supports.
    own = values.contiguous().view(torch.uint8)
    slices = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(slices, own, group=group)
    return torch.cat(slices)[:total].view(values.dtype)


class _Collect(torch.autograd.Function):
    """Scatter of each rank's values to their indices in a vector of ``total`` values, which all ranks get.

    Each rank then computes the same loss, so the backward pass does not sum over ranks.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, total: int, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(places)
        everyone = values.new_zeros(total)
        everyone[places] = values
        dist.all_reduce(everyone, group=group)
        return everyone

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return gradients[0][places], None, None, None

"""Sequence parallelism (Jacobs et al. 2023, DeepSpeed-Ulysses): the ranks of a group hold one packed row together.

A sequence may be too long for the activations of one rank. So every rank runs the layers on its slice of the tokens,
and around attention one all-to-all trades heads for tokens: each rank attends over all tokens with its share of the
heads. The log-probs of the answers' tokens are computed where their predictors lie and then given to every rank of the
group, so that all see the same loss; the gradient of each rank is its part of the group's, and FSDP adds the parts up.
Ring attention was left out: it needs no divisible heads, but a kernel of its own per device.
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

from rltrain.base.device import COLLECTIVE_TIMEOUT, send
from rltrain.base.errors import ConfigError
from rltrain.models.attention.packing import PackedInputs

GROUP = "rltrain_group"


def sequence_group(config: PretrainedConfig, size: int, key: str) -> ProcessGroup | None:
    """The ``size`` neighbouring ranks that share sequences with this one; None where each has its own (a collective).

    Raises ConfigError, which names ``key``, where the model cannot be split so.
    """
    if problem := heads_problem(config, size, key):
        raise ConfigError(problem)
    return _neighbours(dist.group.WORLD, size) if size > 1 else None


def heads_problem(config: PretrainedConfig, size: int, key: str) -> str | None:
    """What is wrong with ``size`` parts of the model's attention, which ``key`` asks for, or None."""
    text = config.get_text_config()
    # Of recurrent layers, the heads of the values are those that have a state.
    for name, kind in (("num_attention_heads", "attention"), ("linear_num_value_heads", "recurrent")):
        heads = getattr(text, name, None) or size
        if heads % size:
            fits = ", ".join(str(divisor) for divisor in range(1, heads + 1) if heads % divisor == 0)
            return f"{key}={size} does not divide the {heads} {kind} heads of the model. Use one of {fits}."
    return None


@cache
def _neighbours(world: ProcessGroup, size: int) -> ProcessGroup:
    """One group for all models of a process. ``world``: the group that is split, so that a later one is split anew."""
    group, _ = dist.new_subgroups(size, world, COLLECTIVE_TIMEOUT)
    return group


# -- around attention --------------------------------------------------------------------------------------------------


Sizes = list[int] | None


def exchange(rows: Tensor, group: ProcessGroup, sent: Sizes = None, received: Sizes = None) -> Tensor:
    """Rows [n, ...] of this rank -> those that the ranks of ``group`` have for it, in the order of the ranks.

    sent: how many go to each rank, one rank's behind the other's; received: how many come from each. None: as many to
    and from each.
    """
    exchanged: Tensor = _Exchange.apply(rows, group, sent, received)
    return exchanged


class _Exchange(torch.autograd.Function):
    """It is its own transpose, with the sizes the other way round."""

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
    """Some tokens of all heads -> all tokens of some heads, in one all-to-all.

    tensors: query, key, value, each [1, heads, tokens / ranks, d]. Returns each as [1, heads / ranks, tokens, d]. Heads
    that the ranks do not divide (keys and values of grouped queries) are repeated until they do.
    """
    ranks = group.size()
    parts = []
    for tensor in tensors:
        times = math.lcm(tensor.shape[1], ranks) // tensor.shape[1]
        # Copies of a head are neighbours, so each rank gets the keys that its share of the queries attends to.
        tensor = tensor.repeat_interleave(times, 1) if times > 1 else tensor
        parts.append(tensor[0].unflatten(0, (ranks, -1)))
    received = exchange(torch.cat([part.flatten(1) for part in parts], 1), group)
    pieces = received.split([part[0].numel() for part in parts], 1)
    return [
        piece.view(part.shape).transpose(0, 1).flatten(1, 2)[None] for piece, part in zip(pieces, parts, strict=True)
    ]


def share_of_tokens(group: ProcessGroup, tensor: Tensor) -> Tensor:
    """The way back. tensor: [1, tokens, heads / ranks, d]. Returns [1, tokens / ranks, heads, d]."""
    parts = tensor[0].unflatten(0, (group.size(), -1))
    received = exchange(parts.flatten(1), group).view(parts.shape)
    return received.transpose(0, 1).flatten(1, 2)[None]


# -- around the model --------------------------------------------------------------------------------------------------


Collect = Callable[[Tensor], Tensor]


def share_of_row(inputs: PackedInputs, group: ProcessGroup | None) -> tuple[PackedInputs, Collect]:
    """This rank's slice of a packed row, and a function that brings results together.

    The slices are equally long: the row is padded by one segment that nobody reads. In the inputs returned, tokens,
    positions and images are those of the slice, predictors and labels belong to the answer tokens whose predictors lie
    in it, and the plan is the whole row's. The function takes one number per answer token of the slice and returns one
    per answer token of the row.
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
    # A token of padding goes to the first ones.
    experts = None if inputs.experts is None else slice_of_row(inputs.experts, group)
    # Places within the slice; predictors of other ranks fall outside of it.
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
        # A row without answer tokens has none on any rank of the group, so all ranks skip the collective.
        return _Collect.apply(values, places, num_answer_tokens, group) if num_answer_tokens else values

    return share, collect


def slice_of_row(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """Of what every token of the row has [total, ...], that of this rank's slice. Padding has zeros."""
    if group is None:
        return values
    length = -(-len(values) // group.size())
    missing = length * group.size() - len(values)
    start = group.rank() * length
    return pad(values, (0, 0) * (values.dim() - 1) + (0, missing))[start : start + length]


def whole_sum(part: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum over the row of which each rank of the group has a part, with the gradient of this rank's."""
    if group is None:
        return part
    total = part.detach().clone()
    dist.all_reduce(total, group=group)
    return part + (total - part.detach())


def whole_row(values: Tensor, total: int, group: ProcessGroup | None) -> Tensor:
    """Of every token of the row [total, ...], from those of each rank's slice, without a gradient."""
    if group is None:
        return values
    # As bytes: of more than 256 experts the numbers are int16, which neither gloo nor NCCL sends.
    own = values.contiguous().view(torch.uint8)
    slices = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(slices, own, group=group)
    return torch.cat(slices)[:total].view(values.dtype)


class _Collect(torch.autograd.Function):
    """Put values [n here] at their places among ``total``, on all ranks.

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

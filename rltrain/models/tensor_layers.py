"""Forward passes of modules that the ranks of a tensor-parallel group share, and reductions over the vocabulary.

`models.tensor_parallel` decides which modules these are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear, pad


def weights_of(layer: nn.Module) -> list[str]:
    """Return the names of a module's own weights."""
    return [name for name, _ in layer.named_parameters(recurse=False)]


def local(weight: Any) -> Any:
    """Return this rank's part of a gathered weight, differentiably; None and plain tensors unchanged."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def enter(states: Tensor, group: ProcessGroup) -> Tensor:
    """Return ``states``, whose gradient is summed over the group."""
    entered: Tensor = _Enter.apply(states, group)
    return entered


class Entry:
    """Entry of hidden states into a block. Layers that read the same states share one all-reduce.

    An entry keeps a reference to the last states. All blocks of a model use the same entry, so only one tensor is kept.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self._last: tuple[Tensor, bool, Tensor] | None = None

    def __call__(self, states: Tensor) -> Tensor:
        grad = torch.is_grad_enabled()
        if self._last is None or self._last[0] is not states or self._last[1] != grad:
            self._last = states, grad, enter(states, self.group)
        return self._last[2]


def column(layer: Any, entry: Callable[[Tensor], Tensor] | None, states: Tensor) -> Tensor:
    """Compute a linear layer whose outputs are split over the ranks."""
    return linear(states if entry is None else entry(states), local(layer.weight), local(layer.bias))


def row(layer: Any, group: ProcessGroup, states: Tensor) -> Tensor:
    """Compute a linear layer whose inputs are split over the ranks."""
    output: Tensor = _Leave.apply(linear(states, local(layer.weight)), group)
    return output if layer.bias is None else output + layer.bias


def sliced(
    layer: Any, rows: list[slice], group: ProcessGroup, entry: Callable[[Tensor], Tensor], states: Tensor
) -> Tensor:
    """Compute a linear layer with only these rows of its weight, which every rank has in full."""

    def part(weight: Tensor) -> Tensor:
        entered = enter(weight, group)
        return torch.cat([entered[each] for each in rows])

    return linear(entry(states), part(layer.weight), None if layer.bias is None else part(layer.bias))


def embed(layer: Any, compute: Callable[[Tensor], Tensor], group: ProcessGroup, start: int, tokens: Tensor) -> Tensor:
    """Compute the embeddings of all tokens. This rank has the rows of the embedding matrix from ``start``."""
    weight = local(layer.weight)
    own = (tokens >= start) & (tokens < start + len(weight))
    # The padding token gets no gradient. Its row of the embedding is on one rank only.
    padding = layer.padding_idx
    inside = padding is not None and start <= padding < start + len(weight)
    vars(layer).update(weight=weight, padding_idx=padding - start if inside else None)
    try:
        output = compute((tokens - start).where(own, 0))
    finally:
        del vars(layer)["weight"]
        layer.padding_idx = padding
    result: Tensor = _Leave.apply(output.masked_fill(~own[..., None], 0), group)
    return result


def entering(compute: Callable[..., Tensor], group: ProcessGroup, *args: Any, **kwargs: Any) -> Tensor:
    """Call ``compute``, and sum the gradient of its output over the group (`enter`)."""
    return enter(compute(*args, **kwargs), group)


def replicate(module: Any, group: ProcessGroup, **rows: slice) -> None:
    """Sum the gradients of a module's own weights over the group. rows: the rows that this rank uses, by weight name
    (default: all rows of all weights).
    """
    module.forward = partial(_replicated, module, module.forward, group, rows)


def _replicated(
    module: Any, compute: Callable[..., Any], group: ProcessGroup, rows: dict[str, slice], *args: Any, **kwargs: Any
) -> Any:
    # Instance attributes take precedence over parameters of the same name, so the family's code uses them.
    names = list(rows) or weights_of(module)
    own = {name: enter(getattr(module, name), group) for name in names}
    vars(module).update({name: own[name][rows[name]] if rows else own[name] for name in names})
    try:
        return compute(*args, **kwargs)
    finally:
        for name in names:
            del vars(module)[name]


def share_tokens(
    compute: Callable[..., Tensor], group: ProcessGroup, tokens: Tensor, experts: Tensor, weights: Tensor
) -> Tensor:
    """Compute experts for this rank's share of ``tokens`` [n, hidden], and gather the outputs of all ranks."""
    missing = -len(tokens) % group.size()
    parts = (pad(each, (0, 0, 0, missing)) for each in (tokens, experts, weights))
    output = compute(*(_Share.apply(part, group) for part in parts))
    whole: Tensor = _Gather.apply(output, group)
    return whole[: len(tokens)].clone() if missing else whole


class _Enter(torch.autograd.Function):
    """Identity, whose gradient is summed over the group."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Leave(torch.autograd.Function):
    """Sum over the group. Every part gets the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        total = part.contiguous()
        ctx.mark_dirty(part) if total is part else None
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Share(torch.autograd.Function):
    """This rank's share of rows that all ranks have. The gradients of the shares are gathered."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return rows.chunk(group.size())[group.rank()].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradients[0], ctx.group), None


class _Gather(torch.autograd.Function):
    """Rows of all ranks, in rank order. The gradient of this rank's rows is a slice."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(rows, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].chunk(ctx.group.size())[ctx.group.rank()], None


def _gathered(rows: Tensor, group: ProcessGroup) -> Tensor:
    parts = [torch.empty_like(rows, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, rows.contiguous(), group=group)
    return torch.cat(parts)


class Vocabulary:
    """Reductions over the vocabulary of a chunk's logits, of which this rank may have only some columns.

    weight: weight of the head. If it is not split over ranks, nothing is reduced.
    """

    def __init__(self, weight: Any) -> None:
        shared = isinstance(weight, DTensor)
        self.group = weight.device_mesh.get_group() if shared else None
        self._start = weight.device_mesh.get_local_rank() * len(local(weight)) if shared else 0

    def sum(self, *parts: Tensor | None) -> None:
        """Sum tensors over the group, in place."""
        for part in parts if self.group is not None else ():
            if part is not None:
                dist.all_reduce(part, group=self.group)

    def logsumexp(self, logits: Tensor) -> Tensor:
        """Return log sum exp over the vocabulary [n]."""
        if self.group is None:
            return logits.logsumexp(-1)
        own = logits.logsumexp(-1)
        highest = own.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.group)
        total = own.sub_(highest).exp_()
        dist.all_reduce(total, group=self.group)
        return total.log_().add_(highest)

    def columns(self, labels: Tensor, count: int) -> Tensor:
        """Return the column of each label in this rank's logits. For labels on other ranks the column is arbitrary."""
        return labels if self.group is None else (labels - self._start).clamp(0, count - 1)

    def own(self, values: Tensor, labels: Tensor, count: int) -> Tensor:
        """Return ``values``, with 0 for labels on another rank."""
        if self.group is None:
            return values
        places = labels - self._start
        return values.masked_fill((places < 0) | (places >= count), 0)

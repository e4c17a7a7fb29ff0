"""Expert parallelism: each rank of a group holds some experts of every layer, and tokens are exchanged between ranks.

Without it, a device gathers all experts of a layer, although each token needs only a few. With it, experts stay on
their ranks: an all-to-all before the experts sends the hidden states of tokens to the ranks of their experts, and one
after them returns the outputs (Lepikhin et al. 2020, GShard, arXiv 2006.16668). No token is dropped. The experts and
the weighting of their outputs are computed by transformers' code. Not implemented: sending a token only once to a rank
that has several of its experts. This would send fewer bytes (at 8 of 128 experts and 8 ranks, 5.3 transfers instead of
8), but outputs would be summed in a different order, and routing weights would have to be sent too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PretrainedConfig

from rltrain.models.attention.ulysses import exchange
from rltrain.models.routing import num_experts

# Attribute of those expert modules in transformers whose forward takes (tokens, experts, expert weights) and uses the
# weights only to multiply outputs.
PLAIN = "is_transposed"


def parts_with_experts(model: nn.Module) -> list[nn.Module]:
    """Return the modules that hold the experts of a layer, with each weight as [experts, ...]."""
    parts = (getattr(part, "experts", None) for part in model.modules())
    return [experts for experts in parts if isinstance(experts, nn.Module)]


def experts_problem(model: nn.Module, config: PretrainedConfig, size: int, shards: int) -> str | None:
    """Return why ``size`` ranks cannot share the experts of each layer of ``model``, with a fix, or None.

    shards: number of ranks that hold one copy of all weights.
    """
    number, parts = num_experts(config), parts_with_experts(model)
    if not number or not parts:
        return "the model has no experts. Leave it out."
    if any(".lora_" in name for name, _ in model.named_parameters() if ".experts." in name):
        return (
            "its experts have adapters, which are made of all experts of a layer at once. Leave it out, or name no "
            "experts in target_modules."
        )
    weights = [weight for part in parts for weight in part.parameters()]
    odd = [part for part in parts if not hasattr(part, PLAIN)]
    odd += [part for part in parts if any(each.dim() < 2 or len(each) != number for each in part.parameters())]
    if odd:
        return f"{type(odd[0]).__name__} computes experts in an unsupported way. Leave it out."

    def fits(size: int) -> bool:
        return number % size == 0 == shards % size and all(
            weight.shape[1] % (shards // size) == 0 for weight in weights
        )

    if fits(size):
        return None
    possible = ", ".join(str(each) for each in range(2, number + 1) if fits(each))
    rows = ", ".join(sorted({str(weight.shape[1]) for weight in weights}, key=int))
    return (
        f"the model has {number} experts in a layer, whose weights have {rows} rows, and {shards} ranks hold a copy of "
        f"them: each rank needs as many experts, and {shards} / {size} ranks as many rows of these. "
        + (f"Use one of {possible}." if possible else "No number fits: leave it out.")
    )


def keep_experts(model: nn.Module, mesh: DeviceMesh, tensor_size: int) -> list[nn.Module]:
    """Keep only this rank's experts of a model on the meta device, and exchange tokens around them.

    mesh: [ranks that share the experts]. tensor_size: number of ranks with the same samples, each of which sends its
    share of the tokens. Returns the modules whose weights are now DTensors over ``mesh``.
    """
    parts, group = parts_with_experts(model), mesh.get_group()
    part: Any
    for part in parts:
        for name, weight in list(part.named_parameters(recurse=False)):
            own = weight.new_empty(len(weight) // mesh.size(), *weight.shape[1:])
            spread = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
            part.register_parameter(name, nn.Parameter(spread, requires_grad=weight.requires_grad))
        part.num_experts = part.num_experts // mesh.size()
        part.forward = partial(_travel, part, part.forward, group, mesh.size() / tensor_size)
    return parts


def _travel(
    part: Any, compute: Callable[..., Tensor], group: ProcessGroup, divisor: float, tokens: Tensor, experts: Tensor,
    weights: Tensor,
) -> Tensor:  # fmt: skip
    """Compute the experts' outputs for this rank's tokens [n, hidden], on the ranks that hold the experts. experts:
    indices over all ranks [n, k]; weights: [n, k]."""
    order = experts.reshape(-1).argsort(stable=True)
    here, theirs, numbers = row_sizes(experts, part.num_experts, group)
    rows = exchange(tokens[order // experts.shape[1]], group, here, theirs)
    outputs = _compute(part, compute, rows, numbers, divisor)
    home = exchange(outputs, group, theirs, here)
    # Restore the order in which each token chose its experts, then sum in transformers' order.
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    chosen = home[places].unflatten(0, experts.shape)
    return (chosen * weights.unsqueeze(-1)).sum(1).to(tokens.dtype)


def row_sizes(experts: Tensor, num_here: int, group: ProcessGroup) -> tuple[list[int], list[int], Tensor]:
    """Return the number of rows to each rank, the number from each rank, and the local expert index of each received
    row.

    The host waits here, but only for the counts.
    """
    ranks = group.size()
    counts = torch.bincount(experts.reshape(-1), minlength=ranks * num_here).view(ranks, num_here)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    here, theirs = torch.stack([counts.sum(1), received.sum(1)]).tolist()
    numbers = torch.arange(num_here, device=experts.device).repeat(ranks)
    return here, theirs, numbers.repeat_interleave(received.view(-1), output_size=sum(theirs))


def _compute(part: nn.Module, compute: Callable[..., Tensor], rows: Tensor, numbers: Tensor, divisor: float) -> Tensor:
    own = {name: weight.to_local() for name, weight in part.named_parameters() if isinstance(weight, DTensor)}
    for weight in own.values():
        if weight.requires_grad:
            # FSDP averages the gradient of an expert only over the ranks that share it, but the expert gets tokens of
            # all ranks. With this divisor, it becomes an average over all ranks that have different samples, as for
            # every other weight.
            weight.register_hook(lambda gradient: gradient / divisor)
    if not len(rows):
        # Even without tokens, the weights need a gradient, and the second all-to-all must be in the graph.
        return rows + torch.stack([weight.sum() for weight in own.values()]).sum().to(rows.dtype)
    # Instance attributes take precedence over parameters of the same name, so the family's code uses these local
    # tensors.
    vars(part).update(own)
    try:
        return compute(rows, numbers[:, None], rows.new_ones(len(rows), 1))
    finally:
        for name in own:
            del vars(part)[name]

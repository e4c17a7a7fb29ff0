"""Expert parallelism: each rank of a group holds some experts of every layer, and tokens travel to them and back.

Without it a device gathers all experts of a layer to compute that layer, of which each token needs a few. With it the
experts stay: an all-to-all before them brings the hidden states of tokens to the ranks of their experts, and one behind
them brings the outputs home (Lepikhin et al. 2020, GShard, arXiv 2006.16668). No token is dropped. What an expert
computes, and how its outputs are weighed, is what transformers' own code computes, in its order.

Left out: to send a token once to a rank that has several of its experts, which takes fewer bytes (at 8 of 128 experts
and 8 ranks 5.3 sendings for 8), because a rank would then have to add up outputs whose order is another one, and
routing weights would travel too.
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

# What transformers gives to the experts of a family whose forward takes (tokens, their experts, the weights of these)
# and does nothing with the weights but to multiply outputs.
_PLAIN = "is_transposed"


def parts_with_experts(model: nn.Module) -> list[nn.Module]:
    """The modules that hold the experts of a layer as one weight each [experts, ...]."""
    found = (getattr(part, "experts", None) for part in model.modules())
    return [experts for experts in found if isinstance(experts, nn.Module)]


def experts_problem(model: nn.Module, config: PretrainedConfig, size: int, shards: int) -> str | None:
    """What is wrong with ``size`` ranks that share the experts of each layer of ``model``, and a way out; or None.

    shards: ranks that hold one copy of all weights.
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
    odd = [part for part in parts if not hasattr(part, _PLAIN)]
    odd += [part for part in parts if any(each.dim() < 2 or len(each) != number for each in part.parameters())]
    if odd:
        return f"{type(odd[0]).__name__} computes experts in a way of its own. Leave it out."

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


def keep_experts(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Give this rank its experts of every layer of a model on the meta device, and have tokens travel.

    mesh: [ranks that share the experts]. Returns the modules whose weights are spread: DTensors over ``mesh`` now.
    """
    parts, group = parts_with_experts(model), mesh.get_group()
    part: Any
    for part in parts:
        for name, weight in list(part.named_parameters(recurse=False)):
            own = weight.new_empty(len(weight) // mesh.size(), *weight.shape[1:])
            spread = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
            part.register_parameter(name, nn.Parameter(spread, requires_grad=weight.requires_grad))
        part.num_experts = part.num_experts // mesh.size()
        part.forward = partial(_travel, part, part.forward, group)
    return parts


def _travel(
    part: Any, compute: Callable[..., Tensor], group: ProcessGroup, tokens: Tensor, experts: Tensor,
    weights: Tensor,
) -> Tensor:  # fmt: skip
    """tokens: [n, hidden] of this rank. experts, weights: [n, k], numbers among those of all ranks."""
    order = experts.reshape(-1).argsort(stable=True)
    here, theirs, numbers = row_sizes(experts, part.num_experts, group)
    rows = exchange(tokens[order // experts.shape[1]], group, here, theirs)
    outputs = _compute(part, compute, rows, numbers, group.size())
    home = exchange(outputs, group, theirs, here)
    # Back in the order of the choices; then as transformers adds up.
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    chosen = home[places].unflatten(0, experts.shape)
    return (chosen * weights.unsqueeze(-1)).sum(1).to(tokens.dtype)


def row_sizes(experts: Tensor, num_here: int, group: ProcessGroup) -> tuple[list[int], list[int], Tensor]:
    """Rows that go to each rank, rows that come from each, and which expert of this rank each of the latter is for.

    The host waits here, for the numbers alone.
    """
    ranks = group.size()
    counts = torch.bincount(experts.reshape(-1), minlength=ranks * num_here).view(ranks, num_here)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    here, theirs = torch.stack([counts.sum(1), received.sum(1)]).tolist()
    numbers = torch.arange(num_here, device=experts.device).repeat(ranks)
    return here, theirs, numbers.repeat_interleave(received.view(-1), output_size=sum(theirs))


def _compute(part: nn.Module, compute: Callable[..., Tensor], rows: Tensor, numbers: Tensor, num_ranks: int) -> Tensor:
    own = {name: weight.to_local() for name, weight in part.named_parameters() if isinstance(weight, DTensor)}
    for weight in own.values():
        if weight.requires_grad:
            # FSDP takes the mean over the ranks that share an expert. Its tokens are those of all ranks, among which
            # every other weight takes the mean.
            weight.register_hook(lambda gradient: gradient / num_ranks)
    if not len(rows):
        # No token came, and yet the weights need their gradient, and the way back its place in the graph.
        return rows + torch.stack([weight.sum() for weight in own.values()]).sum().to(rows.dtype)
    # In front of the parameters of the same names, which the family's code would find.
    vars(part).update(own)
    try:
        return compute(rows, numbers[:, None], rows.new_ones(len(rows), 1))
    finally:
        for name in own:
            del vars(part)[name]

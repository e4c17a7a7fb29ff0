"""AdamW whose moments are on the device, in the dtype of the weights, for one layer at a time.

Problem: the two moments take twice the memory of the weights, and only the optimizer step reads them. Choice: they are
kept in host memory (``offload``), in bfloat16 (``dtype``), or both, and `step` visits the weights layer by layer. From
the host, the moments of the next layer arrive and the last layer's leave while the device updates this one, in
two buffers. Each layer is updated by torch's own function, so weights equal torch's AdamW bit for bit unless the dtype
differs. Left out: copies during the backward pass, which would need the buffers while activations are at their
peak; and CPU kernels for the step, which would save the copies, but round differently and need many cores.

Why a moment in bfloat16 is rounded stochastically: with beta = 0.999 a second moment changes by at most 0.1 % per step
while gradients shrink. Neighbours in bfloat16 are 0.4 to 0.8 % apart, so rounding to the nearest would keep the old
value forever, and the step size of a weight would stay at its smallest. Stochastic rounding is right on average (Gupta
et al. 2015). The first moment changes by a tenth per step (beta = 0.9), for which the nearest number suffices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.adamw import adamw

from rltrain.common.device import Device, host_memory, send
from rltrain.models.weights.shard import like, local_shard

# Moments start at multiples of this many elements, because kernels are slower on unaligned memory.
_ALIGNED = 32


class LayerwiseAdamW(torch.optim.AdamW):
    """AdamW whose parameter groups are updated one after another, with the moments of one group on the device.

    groups: trained weights of each layer (`layers_of`), all of one dtype. dtype: dtype of the moments between steps.
    offload: keep the moments in page-locked host memory. options: arguments of torch's AdamW.
    """

    def __init__(
        self, groups: Sequence[list[nn.Parameter]], dtype: torch.dtype, device: Device,
        *, offload: bool, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__([{"params": group} for group in groups], **options)
        self.dtype = dtype
        self._device, self._offload = device, offload
        self._queues = (device.new_stream(), device.new_stream()) if offload else None
        # Per group: the first moments of its weights, then the second moments. On the device they are views of one
        # tensor [2, elements]; on the host they are allocated apart, because page-locked memory comes in powers of two.
        self._moments: list[list[Tensor]] = []
        self._blocks: list[Tensor] = []

    def allocate(self) -> None:
        """Create missing moments, which are zeros: here rather than in the first step, so that a checkpoint can be
        loaded into them."""
        if self._moments:
            return
        groups = [group["params"] for group in self.param_groups]
        if self._offload:
            shards = [local_shard(weight) for group in groups for weight in 2 * group]
            layouts = [torch.empty_like(shard, dtype=self.dtype, device="meta") for shard in shards]
            host = iter(host_memory(layouts, not self._device.is_cpu))
            self._moments = [list(islice(host, 2 * len(group))) for group in groups]
        else:
            device = self._device.torch_device
            self._blocks = [torch.empty(2, _elements(group), dtype=self.dtype, device=device) for group in groups]
            self._moments = [list(chain(*_split(*pair))) for pair in zip(self._blocks, groups, strict=True)]
        for group, moments in zip(groups, self._moments, strict=True):
            for weight, first, second in zip(group, moments[: len(group)], moments[len(group) :], strict=True):
                # Always on the host, where it can be read without a wait.
                step = torch.zeros((), dtype=torch.float32)
                self.state[weight] = {
                    "step": step, "exp_avg": like(weight, first.zero_()), "exp_avg_sq": like(weight, second.zero_())
                }  # fmt: skip

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the weights, layer by layer."""
        assert closure is None, "gradients are computed before the step"
        self.allocate()
        for number, moments in enumerate(self._visit() if self._offload else self._blocks):
            group = self.param_groups[number]
            weight = group["params"][0]
            if moments.dtype == weight.dtype:
                _update(group, self.state, moments)
                continue
            wide = moments.to(weight.dtype)
            seed = _count(self.state[weight]["step"]) * len(self.param_groups) + number
            _update(group, self.state, wide)
            moments[0].copy_(wide[0])
            moments[1].copy_(_round_stochastically(wide[1], seed))
            del wide

    def _visit(self) -> Iterator[Tensor]:
        """Yield the moments of each group on the device, and copy them back when the caller asks for the next."""
        # By now, nothing is queued. The host must see the copies of the last step, because it may read this memory.
        self._device.synchronize()
        assert self._queues is not None
        (arriving, leaving), compute, parts = self._queues, self._device.current_stream(), self._moments
        groups = [group["params"] for group in self.param_groups]
        sizes = [2 * _elements(group) for group in groups]
        buffers = [torch.empty(max(sizes), dtype=self.dtype, device=self._device.torch_device) for _ in parts[:2]]
        blocks = [buffers[number % 2][:size].view(2, -1) for number, size in enumerate(sizes)]
        views = [list(chain(*_split(*pair))) for pair in zip(blocks, groups, strict=True)]
        # The memory of the buffers may have belonged to tensors that queued kernels use.
        arriving.wait_stream(compute)
        events = [self._fetch(*pair) for pair in zip(views[:2], parts[:2], strict=True)]
        for number, block in enumerate(blocks):
            compute.wait_event(events[number])
            yield block
            leaving.wait_stream(compute)
            with self._device.on_stream(leaving):
                _copy(views[number], parts[number])
            if number + 2 < len(parts):
                arriving.wait_stream(leaving)
                events.append(self._fetch(views[number + 2], parts[number + 2]))
        compute.wait_stream(leaving)

    def _fetch(self, views: list[Tensor], part: list[Tensor]) -> Any:
        """Queue copies to the device. Returns the event after them."""
        assert self._queues is not None
        with self._device.on_stream(self._queues[0]):
            _copy(part, views)
        return self._queues[0].record_event()


def layers_of(model: nn.Module) -> list[list[nn.Parameter]]:
    """Return the trained weights of each layer (FSDP unit). Weights outside of layers, such as the embedding, are
    alone."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    unit_of = {id(weight): number for number, unit in enumerate(units) for weight in unit.parameters()}
    groups: dict[object, list[nn.Parameter]] = {}
    for weight in model.parameters():
        if weight.requires_grad:
            # The first unit is the model itself.
            unit = unit_of.get(id(weight), 0)
            groups.setdefault(unit or (id(weight),), []).append(weight)
    return list(groups.values())


def _update(group: dict[str, Any], state: dict[Any, Any], moments: Tensor) -> None:
    """Update the weights of a group, as `torch.optim.AdamW.step` does. Local shards suffice, because nothing is
    reduced."""
    found = [
        (weight, *both)
        for weight, *both in zip(group["params"], *_split(moments, group["params"]), strict=True)
        if weight.grad is not None
    ]
    if not found:
        return
    weights, first, second = (list(each) for each in zip(*found, strict=True))
    steps = [state[weight]["step"] for weight in weights]
    counts = steps
    if group["fused"]:
        # The fused kernel reads and changes step counts on the device.
        counts = list(send(torch.stack(steps), moments.device).unbind())
        torch._foreach_add_(steps, 1)
    beta1, beta2 = group["betas"]
    adamw(
        [local_shard(weight) for weight in weights], [local_shard(weight.grad) for weight in weights],
        first, second, [], counts, foreach=group["foreach"], fused=group["fused"], amsgrad=False, beta1=beta1,
        beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
    )  # fmt: skip


def _split(moments: Tensor, weights: Sequence[nn.Parameter]) -> list[list[Tensor]]:
    """Return first and second moments of each weight: views of ``moments`` [2, elements]."""
    rooms, shards = [_room(weight) for weight in weights], [local_shard(weight) for weight in weights]
    return [
        [part[: shard.numel()].view(shard.shape) for part, shard in zip(row.split(rooms), shards, strict=True)]
        for row in moments
    ]


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)


def _elements(weights: Sequence[nn.Parameter]) -> int:
    """Return the moments of one kind of ``weights``, with the room between them."""
    return sum(map(_room, weights))


def _room(weight: Tensor) -> int:
    return -(-local_shard(weight).numel() // _ALIGNED) * _ALIGNED


def _count(step: Tensor) -> int:
    return int(step)


def _round_stochastically(values: Tensor, seed: int) -> Tensor:
    """Round float32 to bfloat16 (as float32): up with the probability of the part that bfloat16 cuts off.

    The noise depends on ``seed`` and on the position, so that replicas of a weight stay equal and a resumed run
    continues bit for bit.
    """
    noise = torch.Generator(values.device).manual_seed(seed)
    bits = values.view(torch.int32)
    added = torch.randint(1 << 16, bits.shape, generator=noise, dtype=torch.int32, device=bits.device).add_(bits)
    return added.bitwise_and_(-1 << 16).view(torch.float32)

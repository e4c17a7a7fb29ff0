"""Offloading: models and engines on the device in each phase.

The roles of a process together need more memory than the device has. Each role registers its tensors and the phases
that need them; `enter_phase` first offloads everything else, so that both are never on the device at once. Transfers
are slow, so waits are avoided. Host memory is page-locked and kept, because copies of pageable memory go through a
driver buffer at a fraction of the speed. Onloading runs layer by layer on a separate stream: a forward pass waits at
each layer only for that layer. Unchanged weights are not copied to the host again. A save reads tensors wherever they
are, so it is not a phase. Offloaded optimizer states stay on the host in every phase (`models.layerwise_adamw`). Left
out: overlapping offloading with the next phase, because that phase needs the freed memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rltrain.common.device import Device, host_memory
from rltrain.config.passes import UPDATES, Role
from rltrain.models.optim import moments_bytes
from rltrain.models.weights.shard import like, local_shard, reshard

# Phases that write to trained weights: optimizer steps, and loading a checkpoint.
_WRITTEN_IN = {*UPDATES}


class OffloadManager:
    """Offload manager: performs all transfers between device and host. On a CPU these do nothing."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.phase = "start"
        self.models: dict[Role, Any] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self._not_offloaded: list[torch.optim.Optimizer] = []
        self._engines: list[tuple[frozenset[str], Callable[[], object]]] = []
        self._offloadables: list[tuple[frozenset[str], _Offloadable]] = []
        self._queue = None if device.is_cpu else device.new_stream()
        self._weight_bytes: dict[Role, int] = {}
        self._peaks: dict[str, Counter[str]] = {}
        """Bytes by owner at the peak of each phase since the start."""
        self._most = (0, 0)
        """Maximum of `Device.take_peaks` since the start."""

    def add_engine(self, release: Callable[[], object], *phases: str) -> None:
        """Register an engine. It allocates memory when weights are loaded; `release` frees it in other phases."""
        self._engines.append((frozenset(phases), release))

    def add_model(self, role: Role, model: nn.Module, *phases: str, offload: bool) -> None:
        """Register a sharded model that ``phases`` need; with ``offload`` it is on the host in all other phases."""
        known = {id(weight) for other in self.models.values() for weight in other.parameters()}
        # Bytes are measured now, because a forward pass may replace shards by full weights.
        self._weight_bytes[role] = sum(
            local_shard(weight).nbytes for weight in model.parameters() if id(weight) not in known
        )
        self.models[role] = model
        if offload and self._queue is not None:
            self._offloadables.append((frozenset(phases), _Offloadable(model, self.device, self._queue)))

    def add_optimizer(self, optimizer: torch.optim.Optimizer, *, offload: bool) -> None:
        """Register an optimizer; with ``offload`` its state is always on the host (`LayerwiseAdamW`)."""
        self.optimizers.append(optimizer)
        self._not_offloaded += [] if offload else [optimizer]

    def future_optimizer_bytes(self) -> int:
        """Return the bytes that optimizers allocate in their first step and keep on the device: two moments (AdamW)."""
        return sum(map(moments_bytes, self._not_offloaded))

    def is_here(self, model: nn.Module) -> bool:
        """Return True if the weights of a model are on the device or being copied to it."""
        return all(offloadable.is_here for _, offloadable in self._offloadables if offloadable.owner is model)

    def enter_phase(self, phase: str, *, whole: bool = False) -> None:
        """Prepare the device for ``phase``, one of `device_phases`.

        whole: weights will be read outside of a forward pass, so kernels wait for all of them.
        """
        self._measure()
        self.phase = phase
        to_offload = [
            offloadable for phases, offloadable in self._offloadables if phase not in phases and offloadable.is_here
        ]
        for offloadable in to_offload:
            offloadable.start_offload()
        for phases, release in self._engines:
            if phase not in phases:
                release()
        if to_offload and self._queue is not None:
            self._queue.synchronize()
        for offloadable in to_offload:
            offloadable.finish_offload()
        self.device.empty_cache()
        for phases, offloadable in self._offloadables:
            if phase in phases:
                if not offloadable.is_here:
                    offloadable.onload()
                offloadable.seen.add(phase)
        if self._queue is not None:
            self._take_peak()  # the peak of the copies
            if whole:
                self.device.current_stream().wait_stream(self._queue)

    def memory_gb(self) -> dict[str, float]:
        """Return ``perf/*memory*`` in GiB: memory of the host, and peaks of the device since the start, in total and by
        phase."""
        memory = self.device.host_memory_gb()
        if self._queue is not None:
            self._measure()
            names = ("perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb")
            memory |= {name: size / 2**30 for name, size in zip(names, self._most, strict=True)}
        for phase, owners in self._peaks.items():
            memory |= {f"perf/memory_gb/{phase}/{owner}": size / 2**30 for owner, size in owners.items()}
        return memory

    def resident_bytes(self) -> Counter[str]:
        """Return the device bytes of weights, gradients and optimizer states, without gathered full weights."""
        here = [role for role, model in self.models.items() if self.is_here(model)]
        grads = [weight.grad for role in here for weight in self.models[role].parameters() if weight.grad is not None]
        states = [value for optim in self.optimizers for state in optim.state.values() for value in state.values()]
        own = [local_shard(state) for state in states if isinstance(state, Tensor)]
        return Counter(
            weights=sum(self._weight_bytes[role] for role in here),
            gradients=sum(local_shard(grad).nbytes for grad in grads),
            optimizer=sum(state.nbytes for state in own if state.device.type == self.device.kind),
        )

    def _measure(self) -> None:
        """Record memory by owner at the peak of the current phase, if it is the largest so far."""
        if self._queue is not None:
            owners = self.resident_bytes()
            del owners["gradients"]  # temporary memory of a finished update
            owners["work"] = max(0, self._take_peak() - owners.total())
            owners["others"] = self.device.bytes_of_others()
            self._peaks[self.phase] = max(self._peaks.get(self.phase, owners), owners, key=Counter.total)

    def _take_peak(self) -> int:
        peaks = self.device.take_peaks()
        self._most = max(self._most[0], peaks[0]), max(self._most[1], peaks[1])
        return peaks[0]


class _Offloadable:
    """Parameters of a model sharded by FSDP2: on the device, or in host memory. Buffers are small and stay on the
    device."""

    def __init__(self, model: nn.Module, device: Device, queue: Any) -> None:
        """``queue``: stream of the copies."""
        self.owner: Any = model
        self._device, self._queue = device, queue
        self.is_here = True
        self.seen: set[str] = set()
        """Phases since the parameters were onloaded."""
        self._host_copies: dict[str, Tensor] = {}
        # Event after the last copy of each unit.
        self._copy_events: dict[int, Any] = {}
        # The root is first, because it gathers embedding and head before any layer runs.
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        unit_of = {id(weight): number for number, unit in enumerate(units) for weight in unit.parameters()}
        self._names: list[list[str]] = [[] for _ in units]
        for name, parameter in model.named_parameters():
            self._names[unit_of[id(parameter)]].append(name)
        for number, unit in enumerate(units):
            # Prepended, so that it runs before FSDP's hook, which gathers the weights.
            unit.register_forward_pre_hook(lambda *_, part=number: self._wait_onloaded([part]), prepend=True)

    def start_offload(self) -> None:
        """Queue the copies to the host. The tensors must not be changed before the stream is synchronised."""
        reshard(self.owner)  # otherwise the gathered weights of the last forward pass would be copied
        self._wait_onloaded(list(self._copy_events))
        self._queue.wait_stream(self._device.current_stream())
        tensors = dict(self.owner.named_parameters())
        missing = [tensor for name, tensor in tensors.items() if name not in self._host_copies]
        hosts = iter(host_memory([local_shard(tensor) for tensor in missing]))
        with self._device.on_stream(self._queue):
            for name, tensor in tensors.items():
                if is_new := name not in self._host_copies:
                    self._host_copies[name] = next(hosts)
                if is_new or self._may_have_changed(tensor):
                    self._host_copies[name].copy_(local_shard(tensor), non_blocking=True)

    def finish_offload(self) -> None:
        """Switch to the copies on the host, which frees device memory."""
        self._put(self._host_copies)
        self.is_here = False

    def onload(self) -> None:
        """Queue the copies to the device, unit by unit."""
        parameters, device = dict(self.owner.named_parameters()), self._device.torch_device
        names = [name for unit in self._names for name in unit]
        # Memory is allocated on the compute stream, because kernels there may still use memory that was just freed.
        on_device = {name: torch.empty_like(self._host_copies[name], device=device) for name in names}
        self._queue.wait_stream(self._device.current_stream())
        for number, unit in enumerate(self._names):
            for name in unit:
                # FSDP copies a shard that needs padding on the compute stream, so the shard is onloaded on that stream.
                stream = self._device.current_stream() if _is_uneven(parameters[name]) else self._queue
                with self._device.on_stream(stream):
                    on_device[name].copy_(self._host_copies[name], non_blocking=True)
            self._copy_events[number] = self._queue.record_event()
        self._put(on_device)
        self.is_here = True
        self.seen.clear()

    def _may_have_changed(self, tensor: Tensor) -> bool:
        """Return True for trained weights after an update. Tensor versions do not show it with fused kernels."""
        return tensor.requires_grad and not self.seen.isdisjoint(_WRITTEN_IN)

    def _wait_onloaded(self, units: Sequence[int]) -> None:
        """Wait until the units are on the device. The host waits, because FSDP uses further streams."""
        for number in units:
            if event := self._copy_events.pop(number, None):
                event.synchronize()

    def _put(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the local tensors of the parameters."""
        new = {id(tensor): like(tensor, tensors[name]) for name, tensor in self.owner.named_parameters()}
        # As in `Module.to`: parameters stay the same objects, and FSDP notices the change.
        self.owner._apply(lambda tensor: new.get(id(tensor), tensor))


def _is_uneven(tensor: Tensor) -> bool:
    if not isinstance(tensor, DTensor):
        return False
    placed = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    shards = prod(size for size, placement in placed if placement.is_shard())
    return local_shard(tensor).numel() * shards != tensor.numel()

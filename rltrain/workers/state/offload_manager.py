"""Offloading: models, optimizer states and engines on the device in each phase.

The roles of a process together need more memory than the device has. Each role registers its tensors and the phases
that need them; `enter_phase` first offloads everything else, so that both are never on the device at once. Transfers
are slow, so waits are avoided. Host memory is page-locked and kept, because copies of pageable memory go through a
driver buffer at a fraction of the speed. Onloading runs layer by layer on a separate stream: a forward pass waits at
each layer only for that layer, and optimizer state arrives while gradients are computed. Unchanged weights are not
copied to the host again. A save reads tensors wherever they are, so it is not a phase. Left out: overlapping offloading
with the next phase, because that phase needs the freed memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rltrain.common.device import Device, host_memory
from rltrain.config.passes import UPDATES, Role
from rltrain.models.weights.shard import reshard

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
        self._weight_bytes[role] = sum(local(weight).nbytes for weight in model.parameters() if id(weight) not in known)
        self.models[role] = model
        if offload and self._queue is not None:
            self._offloadables.append((frozenset(phases), _OffloadableModel(model, self.device, self._queue)))

    def add_optimizer(self, optimizer: torch.optim.Optimizer, *phases: str, offload: bool) -> None:
        """Register an optimizer's state; with ``offload`` it is on the host in all phases other than ``phases``."""
        self.optimizers.append(optimizer)
        self._not_offloaded += [] if offload else [optimizer]
        if offload and self._queue is not None:
            self._offloadables.append((frozenset(phases), _OffloadableState(optimizer, self.device, self._queue)))

    def future_optimizer_bytes(self) -> int:
        """Return the bytes that optimizers allocate in their first step and keep on the device: two moments (AdamW)."""
        weights = [
            weight for optim in self._not_offloaded for group in optim.param_groups for weight in group["params"]
        ]
        return sum(2 * (weight.to_local() if isinstance(weight, DTensor) else weight).nbytes for weight in weights)

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
        own = [local(state) for state in states if isinstance(state, Tensor)]
        return Counter(
            weights=sum(self._weight_bytes[role] for role in here),
            gradients=sum(local(grad).nbytes for grad in grads),
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


@dataclass
class _Offloadable:
    """Tensors that are either on the device or offloaded to host memory."""

    owner: Any
    device: Device
    queue: Any
    """Stream of the copies."""
    is_here: bool = True
    seen: set[str] = field(default_factory=set)
    """Phases since they were onloaded."""
    # Host copy of each tensor.
    _host_copies: dict[Any, Tensor] = field(default_factory=dict)
    # Event after the last copy of each part.
    _copy_events: dict[int, Any] = field(default_factory=dict)

    def parts(self) -> list[dict[Any, Tensor]]:
        """Return groups of tensors by name, in the order in which they are needed."""
        raise NotImplementedError

    def put(self, tensors: Mapping[Any, Tensor]) -> None:
        """Replace the tensors of these names."""
        raise NotImplementedError

    def start_offload(self) -> None:
        """Queue the copies to the host. The tensors must not be changed before the stream is synchronised."""
        self.wait_onloaded()
        self.queue.wait_stream(self.device.current_stream())
        tensors = self._tensors()
        missing = [tensor for name, tensor in tensors.items() if name not in self._host_copies]
        hosts = iter(host_memory([local(tensor) for tensor in missing]))
        with self.device.on_stream(self.queue):
            for name, tensor in tensors.items():
                if is_new := name not in self._host_copies:
                    self._host_copies[name] = next(hosts)
                if is_new or self.may_have_changed(tensor):
                    self._host_copies[name].copy_(local(tensor), non_blocking=True)

    def may_have_changed(self, tensor: Tensor) -> bool:
        """Return True if the tensor may differ from its copy on the host."""
        return True

    def finish_offload(self) -> None:
        """Switch to the copies on the host, which frees device memory."""
        self.put({name: like(tensor, self._host_copies[name]) for name, tensor in self._tensors().items()})
        self.is_here = False

    def onload(self) -> None:
        """Queue the copies to the device, part by part."""
        parts, device = self.parts(), self.device.torch_device
        # Memory is allocated on the compute stream, because kernels there may still use memory that was just freed.
        on_device = {name: torch.empty_like(self._host_copies[name], device=device) for part in parts for name in part}
        self.queue.wait_stream(self.device.current_stream())
        for number, part in enumerate(parts):
            for name, tensor in part.items():
                # FSDP copies a shard that needs padding on the compute stream, so the shard is onloaded on that stream.
                stream = self.device.current_stream() if _is_uneven(tensor) else self.queue
                with self.device.on_stream(stream):
                    on_device[name].copy_(self._host_copies[name], non_blocking=True)
            self._copy_events[number] = self.queue.record_event()
        self.put({name: like(tensor, on_device[name]) for part in parts for name, tensor in part.items()})
        self.is_here = True
        self.seen.clear()

    def wait_onloaded(self, part: int | None = None) -> None:
        """Wait until one part, or all of them, are on the device. The host waits, because FSDP uses further streams."""
        for number in [part] if part is not None else list(self._copy_events):
            if event := self._copy_events.pop(number, None):
                event.synchronize()

    def _tensors(self) -> dict[Any, Tensor]:
        return {name: tensor for part in self.parts() for name, tensor in part.items()}


class _OffloadableModel(_Offloadable):
    """Parameters of a model sharded by FSDP2. Buffers are small and stay on the device."""

    def __init__(self, model: nn.Module, device: Device, queue: Any) -> None:
        super().__init__(model, device, queue)
        # The root is first, because it gathers embedding and head before any layer runs.
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        unit_of = {id(weight): number for number, unit in enumerate(units) for weight in unit.parameters()}
        self._names: list[list[str]] = [[] for _ in units]
        for name, parameter in model.named_parameters():
            self._names[unit_of[id(parameter)]].append(name)
        for number, unit in enumerate(units):
            # Prepended, so that it runs before FSDP's hook, which gathers the weights.
            unit.register_forward_pre_hook(lambda *_, part=number: self.wait_onloaded(part), prepend=True)

    def start_offload(self) -> None:
        reshard(self.owner)  # otherwise the gathered weights of the last forward pass would be copied
        super().start_offload()

    def may_have_changed(self, tensor: Tensor) -> bool:
        """Return True for trained weights after an update. Tensor versions do not show it with fused kernels."""
        return tensor.requires_grad and not self.seen.isdisjoint(_WRITTEN_IN)

    def parts(self) -> list[dict[Any, Tensor]]:
        parameters = dict(self.owner.named_parameters())
        return [{name: parameters[name] for name in names} for names in self._names]

    def put(self, tensors: Mapping[Any, Tensor]) -> None:
        parameters = dict(self.owner.named_parameters())
        new = {id(parameters[name]): tensor for name, tensor in tensors.items()}
        # As in `Module.to`: parameters stay the same objects, and FSDP notices the change.
        self.owner._apply(lambda tensor: new.get(id(tensor), tensor))


class _OffloadableState(_Offloadable):
    """Moments of an optimizer. Step counters are not moved: they are scalars, which fused AdamW needs on the device."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: Device, queue: Any) -> None:
        super().__init__(optimizer, device, queue)
        optimizer.register_step_pre_hook(lambda *_: self.wait_onloaded())

    def parts(self) -> list[dict[Any, Tensor]]:
        states = self.owner.state.items()
        return [
            {
                (id(parameter), name): value
                for parameter, state in states
                for name, value in state.items()
                if isinstance(value, Tensor) and value.dim()
            }
        ]

    def put(self, tensors: Mapping[Any, Tensor]) -> None:
        for parameter, state in self.owner.state.items():
            state.update({name: tensors[id(parameter), name] for name in state if (id(parameter), name) in tensors})


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def like(tensor: Tensor, local: Tensor) -> Tensor:
    """Return a tensor sharded like ``tensor``, with ``local`` as this rank's shard."""
    # Do not use `from_local`, which would move host tensors to the device.
    return DTensor(local, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else local


def _is_uneven(tensor: Tensor) -> bool:
    if not isinstance(tensor, DTensor):
        return False
    placed = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    shards = prod(size for size, placement in placed if placement.is_shard())
    return local(tensor).numel() * shards != tensor.numel()

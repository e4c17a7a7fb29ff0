"""Which models, optimizer states and engines are on the device in each phase.

The roles of a process need more memory together than the device has. Each registers what it owns and the phases that
need it; `enter` first sends everything else to the host, so that the two are never on the device together.

The bus is the slowest part of this, so nothing waits for it that need not. Host memory is page-locked and kept, because
copies from and to other memory go through a buffer of the driver's at a fraction of the speed. What comes back comes
layer by layer in a queue of its own: a forward waits at each layer for that layer, an optimizer's state arrives while
the gradients are computed. Weights that have only been through phases that write to none are not copied out again. A
save reads everything where it is, so it is no phase. Left out: copies out that overlap with the phase that follows,
which could not have their memory meanwhile.
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

from rltrain.base.device import Device, host_memory
from rltrain.config.passes import UPDATES, Role
from rltrain.models.weights.shard import reshard

# In these weights that learn are written to: by the optimizer, and where a checkpoint is loaded.
_WRITTEN_IN = {*UPDATES}


class Residency:
    """Owner of all moves between device and host. On a CPU, a move leaves everything where it is."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.phase = "start"
        self.models: dict[Role, Any] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self._staying: list[torch.optim.Optimizer] = []
        self._engines: list[tuple[frozenset[str], Callable[[], object]]] = []
        self._residents: list[tuple[frozenset[str], _Resident]] = []
        self._queue = None if device.is_cpu else device.new_stream()
        self._weight_bytes: dict[Role, int] = {}
        self._peaks: dict[str, Counter[str]] = {}
        """Bytes by owner at the peak of each phase since the start."""
        self._most = (0, 0)
        """What `Device.take_peaks` gives, since the start."""

    def add_engine(self, release: Callable[[], object], *phases: str) -> None:
        """Register an engine: it takes memory when weights are loaded, and releases it outside of these phases."""
        self._engines.append((frozenset(phases), release))

    def add_model(self, role: Role, model: nn.Module, *phases: str, offload: bool) -> None:
        """Register a sharded model that ``phases`` need; with ``offload`` it rests on the host in all others."""
        known = {id(weight) for other in self.models.values() for weight in other.parameters()}
        # Now, as a forward may leave whole weights in their place.
        self._weight_bytes[role] = sum(local(weight).nbytes for weight in model.parameters() if id(weight) not in known)
        self.models[role] = model
        if offload and self._queue is not None:
            self._residents.append((frozenset(phases), _Model(model, self.device, self._queue)))

    def add_optimizer(self, optimizer: torch.optim.Optimizer, *phases: str, offload: bool) -> None:
        """Register the state of an optimizer, likewise."""
        self.optimizers.append(optimizer)
        self._staying += [] if offload else [optimizer]
        if offload and self._queue is not None:
            self._residents.append((frozenset(phases), _State(optimizer, self.device, self._queue)))

    def bytes_to_come(self) -> int:
        """What optimizers will take in their first step and keep on the device: two moments of every weight (AdamW)."""
        weights = [weight for optim in self._staying for group in optim.param_groups for weight in group["params"]]
        return sum(2 * (weight.to_local() if isinstance(weight, DTensor) else weight).nbytes for weight in weights)

    def is_here(self, model: nn.Module) -> bool:
        """Whether the weights of a model are on the device, or on their way to it."""
        return all(resident.is_here for _, resident in self._residents if resident.owner is model)

    def enter(self, phase: str, *, whole: bool = False) -> None:
        """Make the device ready for ``phase``, one of `device_phases`.

        whole: weights will be read elsewhere than in a forward, so that kernels wait for all of them.
        """
        self._measure()
        self.phase = phase
        leaving = [resident for phases, resident in self._residents if phase not in phases and resident.is_here]
        for resident in leaving:
            resident.copy_out()
        for phases, release in self._engines:
            if phase not in phases:
                release()
        if leaving and self._queue is not None:
            self._queue.synchronize()
        for resident in leaving:
            resident.leave()
        self.device.empty_cache()
        for phases, resident in self._residents:
            if phase in phases:
                if not resident.is_here:
                    resident.come()
                resident.seen.add(phase)
        if self._queue is not None:
            self._take_peak()  # of the moves
            if whole:
                self.device.current_stream().wait_stream(self._queue)

    def memory_gb(self) -> dict[str, float]:
        """``perf/*memory*`` in GiB: of the host, and peaks of the device since the start, together and by phase."""
        found = self.device.host_memory_gb()
        if self._queue is not None:
            self._measure()
            names = ("perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb")
            found |= {name: size / 2**30 for name, size in zip(names, self._most, strict=True)}
        for phase, owners in self._peaks.items():
            found |= {f"perf/memory_gb/{phase}/{owner}": size / 2**30 for owner, size in owners.items()}
        return found

    def resting(self) -> Counter[str]:
        """Bytes that weights, gradients and optimizer states have of the device now, gathered weights aside."""
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
        """Remember who has the device at the peak of the phase that is there, where it is the largest so far."""
        if self._queue is not None:
            owners = self.resting()
            del owners["gradients"]  # the work of an update, which is done
            owners["work"] = max(0, self._take_peak() - owners.total())
            owners["others"] = self.device.bytes_of_others()
            self._peaks[self.phase] = max(self._peaks.get(self.phase, owners), owners, key=Counter.total)

    def _take_peak(self) -> int:
        peaks = self.device.take_peaks()
        self._most = max(self._most[0], peaks[0]), max(self._most[1], peaks[1])
        return peaks[0]


@dataclass
class _Resident:
    """Tensors that are on the device, or rest in host memory of their own."""

    owner: Any
    device: Device
    queue: Any
    """The stream of the copies."""
    is_here: bool = True
    seen: set[str] = field(default_factory=set)
    """The phases since they came."""
    # Where each tensor rests.
    _twins: dict[Any, Tensor] = field(default_factory=dict)
    # By part, what its last copy has recorded.
    _underway: dict[int, Any] = field(default_factory=dict)

    def parts(self) -> list[dict[Any, Tensor]]:
        """Tensors that are needed together, by name, in the order in which they are needed."""
        raise NotImplementedError

    def put(self, tensors: Mapping[Any, Tensor]) -> None:
        """Replace the tensors of these names."""
        raise NotImplementedError

    def copy_out(self) -> None:
        """Queue the copies to the host. The tensors are to be left alone until the queue is empty."""
        self.arrive()
        self.queue.wait_stream(self.device.current_stream())
        tensors = self._tensors()
        missing = [tensor for name, tensor in tensors.items() if name not in self._twins]
        hosts = iter(host_memory([local(tensor) for tensor in missing]))
        with self.device.on_stream(self.queue):
            for name, tensor in tensors.items():
                if is_new := name not in self._twins:
                    self._twins[name] = next(hosts)
                if is_new or self.may_have_changed(tensor):
                    self._twins[name].copy_(local(tensor), non_blocking=True)

    def may_have_changed(self, tensor: Tensor) -> bool:
        """Whether the tensor may differ from its copy on the host."""
        return True

    def leave(self) -> None:
        """Go on with the copies on the host, which gives the device's memory back."""
        self.put({name: like(tensor, self._twins[name]) for name, tensor in self._tensors().items()})
        self.is_here = False

    def come(self) -> None:
        """Queue the copies back, part by part."""
        parts, device = self.parts(), self.device.torch_device
        # Memory belongs to the kernels' queue, and may be in use there by what was freed a moment ago.
        on_device = {name: torch.empty_like(self._twins[name], device=device) for part in parts for name in part}
        self.queue.wait_stream(self.device.current_stream())
        for number, part in enumerate(parts):
            for name, tensor in part.items():
                # FSDP copies a shard that it has to pad, in the kernels' queue.
                stream = self.device.current_stream() if _is_uneven(tensor) else self.queue
                with self.device.on_stream(stream):
                    on_device[name].copy_(self._twins[name], non_blocking=True)
            self._underway[number] = self.queue.record_event()
        self.put({name: like(tensor, on_device[name]) for part in parts for name, tensor in part.items()})
        self.is_here = True
        self.seen.clear()

    def arrive(self, part: int | None = None) -> None:
        """Wait until a part is there, or all of them. The host waits, as no stream can speak for those of FSDP."""
        for number in [part] if part is not None else list(self._underway):
            if event := self._underway.pop(number, None):
                event.synchronize()

    def _tensors(self) -> dict[Any, Tensor]:
        return {name: tensor for part in self.parts() for name, tensor in part.items()}


class _Model(_Resident):
    """The parameters of a model that FSDP2 has sharded. Buffers are small, and stay."""

    def __init__(self, model: nn.Module, device: Device, queue: Any) -> None:
        super().__init__(model, device, queue)
        # The root first: it gathers embedding and head before any layer runs.
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        unit_of = {id(weight): number for number, unit in enumerate(units) for weight in unit.parameters()}
        self._names: list[list[str]] = [[] for _ in units]
        for name, parameter in model.named_parameters():
            self._names[unit_of[id(parameter)]].append(name)
        for number, unit in enumerate(units):
            # In front of FSDP's own, which gathers the weights.
            unit.register_forward_pre_hook(lambda *_, part=number: self.arrive(part), prepend=True)

    def copy_out(self) -> None:
        reshard(self.owner)  # else the gathered weights of the last forward would pass for the parameters
        super().copy_out()

    def may_have_changed(self, tensor: Tensor) -> bool:
        """Not by the version that tensors carry: fused kernels write to all weights at once and do not count it up."""
        return tensor.requires_grad and not self.seen.isdisjoint(_WRITTEN_IN)

    def parts(self) -> list[dict[Any, Tensor]]:
        parameters = dict(self.owner.named_parameters())
        return [{name: parameters[name] for name in names} for names in self._names]

    def put(self, tensors: Mapping[Any, Tensor]) -> None:
        parameters = dict(self.owner.named_parameters())
        new = {id(parameters[name]): tensor for name, tensor in tensors.items()}
        # What `Module.to` does: parameters stay the same objects, and FSDP notices.
        self.owner._apply(lambda tensor: new.get(id(tensor), tensor))


class _State(_Resident):
    """The moments of an optimizer. Its step counters stay where they are: scalars, with fused AdamW on the device."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: Device, queue: Any) -> None:
        super().__init__(optimizer, device, queue)
        optimizer.register_step_pre_hook(lambda *_: self.arrive())

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
    """What this rank has of a tensor."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def like(tensor: Tensor, local: Tensor) -> Tensor:
    """A tensor that is spread as ``tensor`` is, of which this rank has ``local``."""
    # Not `from_local`, which would bring what is on the host back to the device.
    return DTensor(local, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else local


def _is_uneven(tensor: Tensor) -> bool:
    if not isinstance(tensor, DTensor):
        return False
    placed = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    shards = prod(size for size, placement in placed if placement.is_shard())
    return local(tensor).numel() * shards != tensor.numel()

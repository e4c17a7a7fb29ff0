"""Which models, optimizer states and engines are on the device in each phase.

The roles of a process need more memory together than the device has. Each registers what it owns and the phases that
need it; `enter` first sends everything else to the host, so that the two are never on the device together. Left out:
moving single layers, and copies that overlap with computation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rltrain.device import Device

Phase = Literal["sync", "rollout", "log_prob", "ref", "values", "reward", "train_actor", "train_critic", "save"]


@dataclass(frozen=True)
class _Resident:
    phases: frozenset[str]
    to_device: Callable[[], object]
    to_host: Callable[[], object]


class Residency:
    """Owner of all moves between device and host. On a CPU, a move leaves everything where it is."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._residents: list[_Resident] = []
        self._staying: list[torch.optim.Optimizer] = []

    def add_engine(self, release: Callable[[], object]) -> None:
        """Register a rollout engine: it takes memory when weights are loaded, and releases it outside generation."""
        self._residents.append(_Resident(frozenset({"sync", "rollout"}), lambda: None, release))

    def add_model(self, model: nn.Module, *phases: Phase, offload: bool) -> None:
        """Register a model that ``phases`` need; with ``offload`` it rests on the host in all others."""
        self._residents.append(
            _Resident(
                frozenset(phases),
                lambda: model.to(self.device.torch_device),
                (lambda: model.to("cpu")) if offload else lambda: None,
            )
        )

    def add_optimizer(self, optimizer: torch.optim.Optimizer, *phases: Phase, offload: bool) -> None:
        """Register the state of an optimizer, likewise."""
        self._staying += [] if offload else [optimizer]
        self._residents.append(
            _Resident(
                frozenset(phases),
                lambda: move_optimizer(optimizer, self.device.torch_device),
                (lambda: move_optimizer(optimizer, torch.device("cpu"))) if offload else lambda: None,
            )
        )

    def bytes_to_come(self) -> int:
        """What optimizers will take in their first step and keep on the device: two moments of every weight (AdamW)."""
        weights = [each for one in self._staying for group in one.param_groups for each in group["params"]]
        return sum(2 * (each.to_local() if isinstance(each, DTensor) else each).nbytes for each in weights)

    def enter(self, phase: Phase) -> None:
        """Make the device ready for ``phase``."""
        for resident in self._residents:
            if phase not in resident.phases:
                resident.to_host()
        self.device.empty_cache()
        for resident in self._residents:
            if phase in resident.phases:
                resident.to_device()


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the state tensors of every parameter; step counters, which are scalars, stay on the host."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                state[name] = value.to(device, non_blocking=True)

"""Who is on the device now. One owner moves parameters, optimizer state and engine between device and host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from rltrain.device import Device

Phase = Literal["sync", "rollout", "score", "ref", "values", "reward", "train_actor", "train_critic", "save"]


@dataclass(frozen=True)
class _Resident:
    phases: frozenset[str]
    to_device: Callable[[], object]
    to_host: Callable[[], object]


class Residency:
    """Brings to the device what a phase needs, and sends to the host what may leave. Every role registers what it has.

    On the CPU every move is to where things already are.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._residents: list[_Resident] = []

    def add_engine(self, release: Callable[[], object]) -> None:
        """A rollout engine: it takes its memory when weights are loaded, and gives it back outside generation."""
        self._residents.append(_Resident(frozenset({"sync", "rollout"}), lambda: None, release))

    def add_model(self, model: nn.Module, *phases: Phase, offload: bool) -> None:
        """A model that is needed in ``phases``; with ``offload`` it rests on the host in all others."""
        self._residents.append(
            _Resident(
                frozenset(phases),
                lambda: model.to(self.device.torch_device),
                (lambda: model.to("cpu")) if offload else lambda: None,
            )
        )

    def add_optimizer(self, optimizer: torch.optim.Optimizer, *phases: Phase, offload: bool) -> None:
        """Optimizer state, likewise."""
        self._residents.append(
            _Resident(
                frozenset(phases),
                lambda: move_optimizer(optimizer, self.device.torch_device),
                (lambda: move_optimizer(optimizer, torch.device("cpu"))) if offload else lambda: None,
            )
        )

    def enter(self, phase: Phase) -> None:
        """Make the device ready for ``phase``. What leaves goes before what comes, so that both never share the device."""
        for resident in self._residents:
            if phase not in resident.phases:
                resident.to_host()
        self.device.empty_cache()
        for resident in self._residents:
            if phase in resident.phases:
                resident.to_device()


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the state tensors of every parameter; the step counters stay where they are."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                state[name] = value.to(device, non_blocking=True)

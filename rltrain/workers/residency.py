"""Who is on the device now. One owner moves parameters, optimizer state and engine between device and host."""

from __future__ import annotations

from typing import Literal

import torch

from rltrain.device import Device
from rltrain.models.forward import PolicyModel
from rltrain.workers.rollout.base import RolloutEngine

Phase = Literal["sync", "rollout", "score", "train", "save"]


class Residency:
    """Brings to the device what a phase needs, and with offloading sends the rest to the host.

    sync: training weights and engine; rollout: engine; score: training weights; train: training weights and optimizer;
    save: as train. On the CPU every move is to where things already are.
    """

    def __init__(
        self,
        policy: PolicyModel,
        optimizer: torch.optim.Optimizer,
        engine: RolloutEngine,
        device: Device,
        *,
        param_offload: bool,
        optimizer_offload: bool,
    ) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._engine = engine
        self._device = device
        self._param_offload = param_offload
        self._optimizer_offload = optimizer_offload

    def enter(self, phase: Phase) -> None:
        """Make the device ready for ``phase``. What leaves goes before what comes, so that both never share the device."""
        if phase not in ("sync", "rollout"):
            self._engine.release()
        if phase not in ("train", "save") and self._optimizer_offload:
            move_optimizer(self._optimizer, torch.device("cpu"))
        if phase == "rollout" and self._param_offload:
            self._policy.to("cpu")
        self._device.empty_cache()
        if phase != "rollout":
            self._policy.to(self._device.torch_device)
        if phase in ("train", "save"):
            move_optimizer(self._optimizer, self._device.torch_device)


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the state tensors of every parameter; the step counters stay where they are."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim():
                state[name] = value.to(device, non_blocking=True)

"""AdamW, the learning-rate schedule, the clipping of gradients that are sharded, and the scale of a loss in float16."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rltrain.base.device import Device
from rltrain.config.schema.model import OptimConfig


def make_optimizer(parameters: Iterable[nn.Parameter], cfg: OptimConfig, device: Device) -> torch.optim.AdamW:
    """AdamW over the sharded fp32 master weights, in one kernel where the device has it."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    betas = (cfg.betas[0], cfg.betas[1])
    decay, fused = cfg.weight_decay, device.fused_optimizer or None
    groups = [{"params": group} for group in alike(trainable)]
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=betas, eps=cfg.eps, weight_decay=decay, fused=fused)


def learning_rate(step: int, cfg: OptimConfig, warmup_steps: int, total_steps: int) -> float:
    """Learning rate of trainer step ``step`` (from 0): linear warm-up, then constant or cosine to ``min_lr_ratio``.

    A pure function of the step, so a resumed run needs no scheduler state. The optimizer steps of a trainer step share
    it.
    """
    if step < warmup_steps:
        # The first step already learns, and the full rate comes with the first step after the warm-up.
        return cfg.lr * (step + 1) / (warmup_steps + 1)
    if cfg.lr_scheduler_type == "constant":
        return cfg.lr
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    wave = 0.5 * (1 + math.cos(math.pi * 2 * cfg.num_cycles * min(progress, 1.0)))
    return cfg.lr * (cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * max(0.0, wave))


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients to a global norm of at most ``max_norm``. Returns the norm before clipping (a scalar tensor)."""
    groups = alike(parameter for parameter in parameters if parameter.grad is not None)
    norm = torch.linalg.vector_norm(torch.stack([_norm(group) for group in groups]))
    for group in groups:
        clip_grads_with_norm_(group, max_norm, norm)
    return norm


def _norm(group: list[nn.Parameter]) -> Tensor:
    """Of the gradients of weights that are spread alike, over all ranks."""
    gradients = [weight.grad for weight in group if weight.grad is not None]
    norm = get_total_norm([grad.to_local() if isinstance(grad, DTensor) else grad for grad in gradients])
    if isinstance(first := group[0], DTensor):
        squares = norm.square()
        for dim, placement in enumerate(first.placements):
            if placement.is_shard():
                dist.all_reduce(squares, group=first.device_mesh.get_group(dim))
        norm = squares.sqrt()
    return norm


def alike(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Those that are spread over the same ranks in the same way together: one kernel takes no others."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        spread = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        groups.setdefault(spread, []).append(parameter)
    return list(groups.values())


class LossScale:
    """What a loss is multiplied by where gradients are computed in float16, in which numbers below 6e-8 are 0
    (Micikevicius et al. 2018, section 3.2).

    It starts, halves and doubles as torch.amp.GradScaler does. That one is not used because its ranks decide each for
    itself, after another wait for the device; here one number of all ranks says whether a step is made, as in every
    other dtype. All values are powers of two, so that gradients lose nothing by it.
    """

    FIRST, LOWEST, HIGHEST = 2.0**16, 1.0, 2.0**24
    STEPS_TO_DOUBLE = 2000

    def __init__(self) -> None:
        self.state = torch.tensor([self.FIRST, 0.0])
        """The scale, and the steps since it was changed, on the host; written to in place."""

    @property
    def value(self) -> float:
        """The scale."""
        return float(self.state[0])

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide all gradients by it."""
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(1 / self.value)

    def made(self) -> None:
        """Count a step whose gradients were finite."""
        self.state[1] += 1
        if self.state[1] >= self.STEPS_TO_DOUBLE:
            self._become(min(2 * self.value, self.HIGHEST))

    def lower(self) -> bool:
        """Halve it, after gradients have overflowed. False where it is 1: then it is not the scale that does it."""
        if self.value <= self.LOWEST:
            return False
        self._become(self.value / 2)
        return True

    def _become(self, value: float) -> None:
        self.state.copy_(torch.tensor([value, 0.0]))

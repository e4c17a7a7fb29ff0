"""AdamW, learning-rate schedule, clipping of sharded gradients, and the loss scale for float16."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rltrain.common.device import DEVICES, Device, resolve_dtype
from rltrain.config.schema.model import OptimConfig
from rltrain.models.layerwise_adamw import LayerwiseAdamW, layers_of
from rltrain.models.weights.shard import local_shard


def make_optimizer(model: nn.Module, cfg: OptimConfig, device: Device, *, offload: bool = False) -> torch.optim.AdamW:
    """Build AdamW over the sharded master weights, fused if the device supports it. offload: keep the moments in host
    memory."""
    fused = device.fused_optimizer or None
    options: Any = {"lr": cfg.lr, "betas": tuple(cfg.betas), "eps": cfg.eps, "weight_decay": cfg.weight_decay}
    if offload or cfg.moments != "auto":
        groups = layers_of(model)
        dtype = moments_dtype(cfg, groups[0][0].dtype)
        return LayerwiseAdamW(groups, dtype, device, offload=offload, fused=fused, **options)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW([{"params": group} for group in alike(trainable)], fused=fused, **options)


def moments_dtype(cfg: OptimConfig, weights: torch.dtype) -> torch.dtype:
    """Return the dtype of the moments of ``weights``."""
    return weights if cfg.moments == "auto" else resolve_dtype(cfg.moments, DEVICES["cpu"])


def moments_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the two moments of this rank's weights, allocated or not."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    dtype = optimizer.dtype if isinstance(optimizer, LayerwiseAdamW) else weights[0].dtype
    return sum(2 * local_shard(weight).numel() * dtype.itemsize for weight in weights)


def learning_rate(step: int, cfg: OptimConfig, warmup_steps: int, total_steps: int) -> float:
    """Return the learning rate of step ``step`` (from 0): linear warm-up, then constant or cosine to ``min_lr_ratio``.

    It depends only on the step, so a resumed run needs no scheduler state. All optimizer steps of a trainer step use
    the same rate.
    """
    if step < warmup_steps:
        # With + 1, the rate of the first step is above 0, and the first step after the warm-up has the full rate.
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
    """Compute the norm of equally sharded gradients over all ranks."""
    gradients = [weight.grad for weight in group if weight.grad is not None]
    norm = get_total_norm([local_shard(grad) for grad in gradients])
    if isinstance(first := group[0], DTensor):
        squares = norm.square()
        for dim, placement in enumerate(first.placements):
            # `isinstance(…, Shard)` would not suffice: rows that tensor parallelism has split are strided over the
            # other ranks, which `Shard` cannot express.
            if not placement.is_replicate():
                dist.all_reduce(squares, group=first.device_mesh.get_group(dim))
        norm = squares.sqrt()
    return norm


def alike(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters with the same device mesh and placements, because fused kernels require equal ones."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        spread = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        groups.setdefault(spread, []).append(parameter)
    return list(groups.values())


class LossScale:
    """Loss scale for gradients in float16, in which numbers below 6e-8 are 0 (Micikevicius et al. 2018, section 3.2).

    It starts, halves and doubles like torch.amp.GradScaler. GradScaler is not used, because each rank would decide
    independently, after an additional device sync. Here a number reduced over all ranks decides whether a step is
    taken, as for every other dtype. All values are powers of two, so scaling loses no precision.
    """

    FIRST, LOWEST, HIGHEST = 2.0**16, 1.0, 2.0**24
    STEPS_TO_DOUBLE = 2000

    def __init__(self) -> None:
        self.state = torch.tensor([self.FIRST, 0.0])
        """Scale, and number of steps since its last change; on the host, updated in place."""

    @property
    def value(self) -> float:
        """Return the scale."""
        return float(self.state[0])

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide all gradients by the scale."""
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(1 / self.value)

    def made(self) -> None:
        """Count a step with finite gradients, and double the scale if it is due."""
        self.state[1] += 1
        if self.state[1] >= self.STEPS_TO_DOUBLE:
            self._become(min(2 * self.value, self.HIGHEST))

    def lower(self) -> bool:
        """Halve the scale after an overflow. Returns False at scale 1, where the scale cannot be the cause."""
        if self.value <= self.LOWEST:
            return False
        self._become(self.value / 2)
        return True

    def _become(self, value: float) -> None:
        self.state.copy_(torch.tensor([value, 0.0]))
